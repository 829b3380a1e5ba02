"""A model within PyTorch's `context_parallel`: the loss and gradients of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.experimental import context_parallel
from transformers import LlamaConfig, LlamaForCausalLM

import context_parallel_cpu
import ranks
from causal_models import assert_same_gradients
from liger_ops import backend, fuse
from liger_ops.fusion.attention import attention_function
from sharded_training import Graphs

pytestmark = pytest.mark.device_kernels

SECONDS = 300
ROWS = 2
# The ring of a GPU takes pieces of 32 tokens, of which a rank has two.
LENGTH = 16 if ranks.DEVICE == "cpu" else 128
BOUND = 1e-5
# The ring of a GPU in float32, that of efficient attention, takes keys of as many heads as queries.
KEYS = 1 if ranks.DEVICE == "cpu" else 2


def test_two_devices(tmp_path: Path) -> None:
    checks = [fused, rewritten, masks_are_refused]
    assert not ranks.failures(checks, 2, tmp_path, SECONDS)


def made(use_cache: bool = False) -> Any:
    # Heads of 16, which flex_attention takes.
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=KEYS, head_dim=16, use_cache=use_cache,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def batch(documents: int = 1) -> dict[str, Tensor]:
    """shift_labels are made of the whole sequence, so that the last token of a part has the first
    one of the next part as its label."""
    torch.manual_seed(0)
    ids = torch.randint(1, 61, (ROWS, LENGTH))
    labels = ids.masked_fill(torch.rand(ROWS, LENGTH) < 0.3, -100)
    shifted = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()
    positions = torch.arange(LENGTH // documents).repeat(ROWS, documents)
    return {"input_ids": ids, "position_ids": positions, "shift_labels": shifted}


def without_masks(model: Any) -> Any:
    """As accelerate does: the positions of a part look like those of packed documents."""

    def drop(module: Any, args: Any, kwargs: Any) -> Any:
        return args, {**kwargs, "attention_mask": None}

    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(drop, with_kwargs=True)
    return model


def expected() -> tuple[Tensor, Any]:
    model, whole = made(), batch()
    items = (whole["shift_labels"] != -100).sum()
    given = {**whole, "labels": whole["shift_labels"]}
    loss = model(**given, num_items_in_batch=items).loss
    loss.backward()
    return loss.detach(), model


def check(model: Any, compute: Any = None) -> None:
    context_parallel_cpu.register()
    mesh = ranks.mesh()
    whole = batch()
    items = (whole["shift_labels"] != -100).sum()
    with context_parallel(mesh, buffers=list(whole.values()), buffer_seq_dims=[1, 1, 1]):
        own = context_parallel_cpu.positions(LENGTH).chunk(2)[dist.get_rank()]
        assert whole["position_ids"][0].equal(own)
        given = {**whole, "labels": whole["shift_labels"], "num_items_in_batch": items}
        loss = (model if compute is None else compute)(**given).loss
        loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    gradients = {}
    for name, parameter in model.named_parameters():
        dist.all_reduce(parameter.grad)
        gradients[name] = parameter.grad
    true_loss, truth = expected()
    torch.testing.assert_close(total, true_loss, rtol=BOUND, atol=0.0)
    true_gradients = {name: one.grad for name, one in truth.named_parameters()}
    assert_same_gradients(gradients, true_gradients, BOUND)


def fused() -> None:
    attention_function.EVERYWHERE = True  # As on a GPU in half precision.
    model = made()
    assert "attention(" in str(fuse(model))
    check(without_masks(model))


def rewritten() -> None:
    # Without a cache, AOTAutograd refuses the index tensors of the operator that stands in on CPUs.
    graphs, model = Graphs(), without_masks(made(use_cache=True))
    options = {"inner_backend": graphs, "strict": True}
    check(model, torch.compile(model, backend=backend, options=options))
    assert graphs.nodes("rope") and graphs.nodes("swiglu")


def masks_are_refused() -> None:
    """Flash attention and flex_attention of a fused model would attend to the rank's keys alone."""
    attention_function.EVERYWHERE = True
    context_parallel_cpu.register()
    mesh, packed = ranks.mesh(), batch(documents=4)
    model = made()
    fuse(model)
    with (
        context_parallel(mesh, buffers=list(packed.values()), buffer_seq_dims=[1, 1, 1]),
        pytest.raises(ValueError, match="context_parallel"),
    ):
        model(**packed)
