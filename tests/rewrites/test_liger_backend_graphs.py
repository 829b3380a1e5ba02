"""Whole graphs: subgraphs are rewritten too, and unused writes are kept."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.utils.checkpoint import checkpoint

from backends import inputs, model
from liger_ops import backend
from rewriting import Rewriter, check, values

pytestmark = pytest.mark.usefixtures("empty_caches")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_checkpointed_block_is_rewritten(dtype):
    def function(x: Tensor, weight: Tensor) -> Tensor:
        x = checkpoint(model, x, weight, use_reentrant=False)
        return model(x, weight)

    x, weight = values(2, 3, 8, dtype=dtype), values(8, dtype=dtype)
    found = check(function, x, weight, counts={"rms_norm": 2, "swiglu": 2})
    parts = [
        sum("liger" in str(node.target) for node in part.graph.nodes)
        for part in found.graphs[0].modules()
        if isinstance(part, fx.GraphModule)
    ]
    assert sorted(parts) == [2, 2]


def test_a_checkpointed_block_under_no_grad():
    """A block does not show the modes of its caller, and they do not change inside of it."""

    def function(x: Tensor, weight: Tensor) -> Tensor:
        with torch.no_grad():
            y = checkpoint(model, x, weight, use_reentrant=False)
        return x * y

    check(function, *inputs(), counts={"rms_norm": 1, "swiglu": 1})


def test_compiled_first_within_hooks_of_saved_tensors():
    """As a layer that is compiled by itself, in a checkpoint or with offloading: the hooks get the
    tensors of the call, and none of the compilation."""
    saved = []
    compiled = torch.compile(model, backend=backend, options={"inner_backend": "aot_eager"})
    for _ in range(2):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
            compiled(*inputs())
    assert len(saved) > 0
    assert {type(x) for x in saved} <= {Tensor, torch.nn.Parameter}
    assert len(saved) % 2 == 0


def test_the_branches_of_a_condition_are_rewritten():
    def function(x: Tensor, weight: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, model, lambda x, weight: model(x * 2, weight), (x, weight))

    found = Rewriter()
    compiled = torch.compile(function, backend=found, fullgraph=True)
    for sign in (1, -1):
        x, weight = (one.detach() for one in inputs())
        x = sign * x.abs()
        torch.testing.assert_close(compiled(x, weight), function(x, weight))
    assert found.counts() == {"rms_norm": 2, "swiglu": 2}


def test_writes_that_nothing_uses_are_kept():
    def function(
        gate: Tensor, up: Tensor, buffer: Tensor, total: Tensor, kept: Tensor, out: Tensor
    ) -> Tensor:
        buffer.copy_(gate.detach())
        total.add_(1)
        total[0] = 7.0
        kept[..., :4].mul_(up.detach()[..., :4])
        torch.add(out, 1.0, out=out)
        return F.silu(gate) * up

    gate, up = values(2, 8), values(2, 8, seed=1)
    buffers = [torch.zeros(2, 8), torch.zeros(3), torch.ones(2, 8), torch.ones(5)]
    check(function, gate, up, *buffers, counts={"swiglu": 1})
