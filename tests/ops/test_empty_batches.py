"""Calls without rows: kernels of both devices give what the definition gives, and no launch has a
grid of no programs, for which the interpreter raises here as an NPU does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import liger_ops
from liger_ops import library
from op_checks import as_tuple, poisoned_memory
from op_table import OPS
from op_under_test import DEVICE, EVERY_FOLDER, OpUnderTest

# The axis of the rows or the batch, for the ops for which it is not the first.
ROWS = {"attn_res": 1}


def empty_cases(op: OpUnderTest) -> Iterator[tuple[int, Any]]:
    """Yield the op's cases with each of their axes of size 0 in turn, and the axis."""
    for case in (op.sample(torch.float32), *(op.case(**case) for case in op.cases.values())):
        for axis, size in enumerate(case.shape):
            if size:
                shape = (*case.shape[:axis], 0, *case.shape[axis + 1 :])
                yield axis, replace(case, shape=shape)


@pytest.mark.device_kernels
@EVERY_FOLDER
@pytest.mark.parametrize("op", OPS.values(), ids=OPS.keys())
def test_an_empty_call_gives_what_the_definition_does(op: OpUnderTest, folder: str) -> None:
    compared = set()
    for axis, case in empty_cases(op):
        # Not every axis may be empty: drawing the tensors, or the definition, then fails. That runs
        # on the CPU: PyTorch's gradient of an embedding without columns reads memory that is not
        # its own on a GPU (torch 2.11), and with that every later test of the process fails.
        try:
            tensors = op.tensors(case)
            args = {False: op.forward_args(case, tensors), True: op.backward_args(case, tensors)}
            expected = {
                backward: as_tuple(
                    library.OPS[op.backward_name if backward else op.name].check_and_define(
                        *(x.cpu() if isinstance(x, torch.Tensor) else x for x in given)
                    )
                )
                for backward, given in args.items()
            }
        except (IndexError, RuntimeError, ValueError, ZeroDivisionError):
            continue
        compared.add(axis)
        for backward, given in args.items():
            with poisoned_memory():
                outputs = as_tuple(op.kernel(folder, backward)(*given))
            for output, reference in zip(outputs, expected[backward], strict=True):
                assert (output is None) == (reference is None)
                if output is not None:
                    assert output.dtype is reference.dtype
                    torch.testing.assert_close(output.cpu(), reference, equal_nan=True)
    assert ROWS.get(op.id, 0) in compared


@pytest.mark.device_kernels
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@EVERY_FOLDER
def test_the_loss_of_no_tokens_is_pytorchs(folder: str, reduction: str) -> None:
    x = torch.randn(0, 8, device=DEVICE)
    target = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    forward = library.OPS["cross_entropy_forward"].kernels[folder]
    loss = forward(x, target, reduction=reduction)[0]
    expected = torch.nn.functional.cross_entropy(x, target, reduction=reduction)
    torch.testing.assert_close(loss, expected, equal_nan=True)


def test_gradients_of_weights_without_rows_are_zeros() -> None:
    weight, bias = torch.ones(3, requires_grad=True), torch.ones(1, requires_grad=True)
    x = torch.empty(0, 64, requires_grad=True)
    liger_ops.poly_norm(x, weight, bias).sum().backward()
    assert [grad.tolist() for grad in (weight.grad, bias.grad)] == [[0.0] * 3, [0.0]]


@triton.jit
def _noop_kernel(x_ptr, BLOCK: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, BLOCK), 0.0)


@pytest.mark.parametrize("grid", [(0,), (3, 0)], ids=str)
def test_the_interpreter_refuses_a_grid_of_no_programs(grid: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="_noop_kernel: the grid .*0.* has no programs"):
        _noop_kernel[grid](torch.ones(4), BLOCK=4)
