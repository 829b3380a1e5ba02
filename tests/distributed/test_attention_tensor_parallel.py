"""Attention of the rank's heads, with masks: models train as in one process."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import pytest
import torch

import ranks
from attention_models import batch, blocks_everywhere, model
from causal_models import assert_same_gradients
from data_masks import on_the_cpu
from liger_ops import backend, fuse
from liger_ops.fusion.attention import attention_function
from liger_ops.rewrites import default_rewrites
from liger_ops.rewrites.attention import masked_attention
from parallel_plans import parallel
from sharded_training import BOUND, Graphs, full

pytestmark = pytest.mark.device_kernels

SECONDS = 300
# Rows of two blocks of a mask. In Gemma 3, every other layer has a window.
LENGTH = 150
BATCHES = [("llama", "right"), ("llama", "packed"), ("gemma3", "right"), ("gemma3", "bare")]


def sharded(name: str, sequence: bool) -> Any:
    made = model(name, torch.float32)
    return parallel(made, ranks.mesh(names=("tp",))["tp"], sequence)


def step(made: Any, kind: str, call: Any = None) -> tuple[Any, Any]:
    rows = batch(kind, LENGTH, ranks.DEVICE)
    if "attention_mask" in rows:
        rows["labels"] = rows["labels"].masked_fill(rows["attention_mask"] == 0, -100)
    loss = (made if call is None else call)(**rows, use_cache=False).loss
    loss.backward()
    return loss.detach(), {name: full(one.grad) for name, one in made.named_parameters()}


@functools.cache
def expected(name: str, kind: str) -> tuple[Any, Any]:
    return step(model(name, torch.float32), kind)


def compare(made: Any, name: str, kind: str, call: Any = None) -> None:
    loss, grads = step(made, kind, call)
    true_loss, true_grads = expected(name, kind)
    torch.testing.assert_close(loss, true_loss, rtol=BOUND, atol=0.0)
    assert_same_gradients(grads, true_grads, BOUND)


def block_masks() -> None:
    attention = attention_function._attention
    recorded = mock.patch.object(attention_function, "_attention", wraps=attention)
    for i, (name, kind) in enumerate(BATCHES):
        made = sharded(name, sequence=i % 2 == 0)
        fuse(made)
        with blocks_everywhere(), recorded as called:
            compare(made, name, kind)
        # Without padding, the layer of Gemma 3 without a window is causal.
        assert called.call_count == (1 if kind == "bare" else 2)
        assert all(call.args[0].shape[1] == 2 for call in called.call_args_list)


def dense_masks() -> None:
    """As on a CPU, or in float32 on a GPU."""
    for name, kind in BATCHES:
        made = sharded(name, sequence=True)
        assert fuse(made).counts()["attention"] == 1
        compare(made, name, kind)


def rewritten_masks() -> None:
    """By the backend: the masks are made in the graph, for all heads."""
    with pytest.MonkeyPatch.context() as patch:
        on_the_cpu(patch)
        patch.setattr(masked_attention, "DEVICES", {ranks.DEVICE: True})
        patch.setattr(default_rewrites, "NEEDS_INDUCTOR", frozenset())
        for name, kind in (("llama", "packed"), ("gemma3", "right")):
            torch._dynamo.reset()
            graphs, made = Graphs(), sharded(name, sequence=name == "llama")
            fuse(made, attention=False)
            options = {"inner_backend": graphs, "strict": True}
            compare(made, name, kind, torch.compile(made, backend=backend, options=options))
            assert len(graphs) == 1 and len(graphs.nodes("varlen_attention")) == 2


test_attention_tensor_parallel = ranks.tests(
    {2: [block_masks, dense_masks, rewritten_masks]}, SECONDS
)
