"""The gradients of learned tables, and the tensors saved if tables are fixed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import liger_ops
from op_table import OPS
from op_under_test import OpUnderTest
from rotary_inputs import heads, rotary_tables


@pytest.mark.parametrize("tables", ("none", "one"))
@pytest.mark.parametrize("op", [op for op in OPS.values() if op.name == "rope"], ids=repr)
def test_gradients_of_learned_tables_of_all_sequences(op: OpUnderTest, tables: str) -> None:
    """test_every_op.py has those of tables for each sequence."""
    for interleaved in (True,) if "deinterleave" in op.sampled else (False, True):
        case = op.sample(rows=2, tables=tables, interleaved=interleaved)
        args = op.forward_args(case, op.tensors(case))
        leaves = [arg.requires_grad_() for arg in args if isinstance(arg, torch.Tensor)]
        options = args[4:]

        def call(*given: torch.Tensor, options: Any = options) -> tuple[torch.Tensor, ...]:
            return liger_ops.rope(*given, *[None] * (4 - len(given)), *options)

        assert torch.autograd.gradcheck(call, leaves)


def test_fixed_tables_save_neither_q_nor_k() -> None:
    q, k = (x.requires_grad_() for x in heads(torch.float32))
    cos, sin = rotary_tables(torch.float32)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        liger_ops.rope(q, k, cos, sin)
    assert {tensor.data_ptr() for tensor in saved} == {cos.data_ptr(), sin.data_ptr()}
