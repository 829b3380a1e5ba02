"""The gradients of learned tables, and the tensors saved if tables are fixed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import liger_ops
from op_table import OPS
from rotary_inputs import heads, rotary_tables

OP = OPS["rope"]


LEARNED = OP.case(
    shape=(2, 3, 2, 6), dtype=torch.float64, k_heads=2, rotary=4, table_dtype=torch.float64,
)  # fmt: skip


@pytest.mark.parametrize("tables", ("none", "one", "batch"))
@pytest.mark.parametrize("interleaved", (False, True))
@pytest.mark.parametrize("per_pair", (False, True))
@pytest.mark.parametrize("sections", (None, (1, 0, 1)))
def test_gradients_of_learned_tables(
    tables: str, interleaved: bool, per_pair: bool, sections: tuple[int, ...] | None
) -> None:
    case = replace(
        LEARNED, tables=tables, interleaved=interleaved, per_pair=per_pair, sections=sections
    )
    q, k, cos, sin, *options = OP.forward_args(case, OP.tensors(case))
    leaves = [tensor.requires_grad_() for tensor in (q, k, cos, sin)]
    assert torch.autograd.gradcheck(lambda *t: liger_ops.rope(*t, *options), leaves)


@pytest.mark.parametrize("tables", ("none", "one", "batch"))
@pytest.mark.parametrize("sections", (None, (1, 0, 1)))
def test_gradients_of_learned_complex_frequencies(
    tables: str, sections: tuple[int, ...] | None
) -> None:
    """They follow PyTorch's convention, and agree with those of the equivalent real tables."""
    case = replace(LEARNED, tables=tables, kind="complex", sections=sections)
    q, k, freqs_cis, _, *options = OP.forward_args(case, OP.tensors(case))
    leaves = [tensor.requires_grad_() for tensor in (q, k, freqs_cis)]
    assert torch.autograd.gradcheck(lambda *t: liger_ops.rope(*t, None, *options), leaves)
    cos, sin = (part.detach().clone().requires_grad_() for part in (freqs_cis.real, freqs_cis.imag))
    dcos, dsin = torch.autograd.grad(
        sum(y.pow(3).sum() for y in liger_ops.rope(q, k, cos, sin, True, True, case.sections)),
        (cos, sin),
    )
    grad = torch.autograd.grad(
        sum(y.pow(3).sum() for y in liger_ops.rope(q, k, freqs_cis, sections=case.sections)),
        freqs_cis,
    )
    torch.testing.assert_close(grad[0], torch.complex(dcos, dsin))


@pytest.mark.parametrize("tables", ("none", "one", "batch"))
@pytest.mark.parametrize("deinterleave", (False, True))
def test_gradients_of_learned_matrices(tables: str, deinterleave: bool) -> None:
    """The numbers of a matrix are independent, though those of a rotation are not."""
    case = replace(LEARNED, tables=tables, kind="matrices", deinterleave=deinterleave)
    q, k, matrices, _, *options = OP.forward_args(case, OP.tensors(case))
    leaves = [tensor.requires_grad_() for tensor in (q, k, matrices)]
    assert torch.autograd.gradcheck(lambda *t: liger_ops.rope(*t, None, *options), leaves)


@pytest.mark.parametrize("per_pair", (False, True))
@pytest.mark.parametrize("sections", (None, (1, 0, 1)))
def test_gradients_of_learned_tables_of_deinterleaved_pairs(
    per_pair: bool, sections: tuple[int, ...] | None
) -> None:
    case = replace(
        LEARNED, interleaved=True, deinterleave=True, per_pair=per_pair, sections=sections
    )
    q, k, cos, sin, *options = OP.forward_args(case, OP.tensors(case))
    leaves = [tensor.requires_grad_() for tensor in (q, k, cos, sin)]
    assert torch.autograd.gradcheck(lambda *t: liger_ops.rope(*t, *options), leaves)


def test_fixed_tables_save_neither_q_nor_k() -> None:
    q, k = (x.requires_grad_() for x in heads(torch.float32))
    cos, sin = rotary_tables(torch.float32)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        liger_ops.rope(q, k, cos, sin)
    assert {tensor.data_ptr() for tensor in saved} == {cos.data_ptr(), sin.data_ptr()}
