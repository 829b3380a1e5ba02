"""swiglu, geglu and clamped_swiglu: the forms of their arguments."""

from __future__ import annotations

import pytest
import torch

import liger_ops
from liger_ops import library


def test_inductor_hands_over_the_halves_of_a_projection_as_they_lie(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    strides = []
    record = library.OPS["swiglu"]
    definition = record.definition

    def recorded(gate: torch.Tensor, up: torch.Tensor, *options: float) -> torch.Tensor:
        strides.append((gate.stride(), up.stride()))
        return definition(gate, up, *options)

    monkeypatch.setattr(record, "definition", recorded)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, w: liger_ops.swiglu(*(x @ w).chunk(2, -1)), fullgraph=True)
    x, w = torch.randn(6, 8), torch.randn(8, 32)
    torch.testing.assert_close(compiled(x, w), definition(*(x @ w).chunk(2, -1)))
    assert strides[0] == ((32, 1), (32, 1))


@pytest.mark.parametrize("name", ("swiglu", "geglu", "clamped_swiglu"))
def test_the_forms_are_one(name: str) -> None:
    """Up to rounding: PyTorch's vectorised and scalar code may differ in the last bit, and which of
    them an element gets depends on its strides and address."""
    generator = torch.Generator().manual_seed(0)
    op, (gate, up) = getattr(liger_ops, name), 5 * torch.randn(2, 3, 6, generator=generator)
    torch.testing.assert_close(op(torch.cat((gate, up), -1)), op(gate, up))
    if name == "clamped_swiglu":
        pairs = torch.stack((gate, up), -1).flatten(-2)
        torch.testing.assert_close(op(pairs, interleaved=True), op(gate, up))
