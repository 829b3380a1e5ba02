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
    # Of 64 columns, which are whole vectors: PyTorch computes what is left of a row by scalar code,
    # which may differ in the last bit, and only rows that lie apart have such ends.
    generator = torch.Generator().manual_seed(0)
    op, (gate, up) = getattr(liger_ops, name), 5 * torch.randn(2, 3, 64, generator=generator)
    assert torch.equal(op(gate, up), op(torch.cat((gate, up), -1)))
    if name == "clamped_swiglu":
        pairs = torch.stack((gate, up), -1).flatten(-2)
        assert torch.equal(op(gate, up), op(pairs, interleaved=True))
