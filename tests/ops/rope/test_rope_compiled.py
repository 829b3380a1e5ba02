"""rope in torch.compile: one compilation for all sizes, no copy, and the same layout as eager."""

from __future__ import annotations

import pytest
import torch

import liger_ops
from graphs import Recorder


@pytest.mark.parametrize("form", ("elements", "pairs", "complex", "sections", "matrices", "halves"))
def test_batch_and_length_never_recompile(form: str) -> None:
    """One compilation serves every batch and length of the heads of a projection. The graph does
    not copy them, and results have the layout of eager's."""
    options = {
        "pairs": (False, True),
        "sections": (False, False, [2, 3, 3]),
        "halves": (True, False, None, True),
    }.get(form, ())

    def model(x: torch.Tensor, *tables: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        q, k = x.view(*x.shape[:2], -1, 16).transpose(1, 2).split((4, 2), 1)
        return liger_ops.rope(q, k, *tables, *options)

    def tables(B: int, S: int) -> tuple[torch.Tensor | None, ...]:
        if form == "complex":
            return torch.randn(B, S, 8, dtype=torch.complex64), None
        if form == "matrices":
            return torch.randn(B, S, 8, 2, 2), None
        shape = (B, S, 8 if form == "pairs" else 16)
        shape = (3, *shape) if form == "sections" else shape
        return torch.randn(shape), torch.randn(shape)

    recorder = Recorder()
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=recorder.backend())
    # No size is 3, the number of tables, or 2, the size of a matrix, which Dynamo would take to be
    # the same size.
    for B, S in ((7, 6), (5, 7), (4, 64)):
        x = torch.randn(B, S, 96, requires_grad=True)
        args = tables(B, S)
        expected = model(x, *args)
        for a, b in zip(compiled(x, *args), expected, strict=True):
            assert torch.equal(a, b) and a.stride() == b.stride()
            assert a.transpose(1, 2).is_contiguous()
    assert len(recorder.forwards) == 1
    assert not any(
        "clone" in str(node.target) or "contiguous" in str(node.target)
        for graph in recorder.forwards
        for node in graph.graph.nodes
    )


def test_inductor_keeps_the_layout() -> None:
    """If Inductor itself writes q and k, they keep the strides that tracing saw."""

    def model(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k = (2 * x).view(*x.shape[:2], -1, 16).transpose(1, 2).split((4, 2), 1)
        return tuple(y + 1 for y in liger_ops.rope(q + 1, k * 3, cos, sin))

    torch._dynamo.reset()
    x = torch.randn(2, 3, 96, requires_grad=True)
    cos, sin = torch.randn(2, 3, 16), torch.randn(2, 3, 16)
    outputs, expected = torch.compile(model, fullgraph=True)(x, cos, sin), model(x, cos, sin)
    for a, b in zip(outputs, expected, strict=True):
        assert a.stride() == b.stride()
        torch.testing.assert_close(a, b)
    (grad,), (expected_grad,) = (
        torch.autograd.grad([y.square().sum() for y in ys], x) for ys in (outputs, expected)
    )
    torch.testing.assert_close(grad, expected_grad)
