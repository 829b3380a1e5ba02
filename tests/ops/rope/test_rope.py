"""rope's kernels of both devices against float64 truth, at every form of tables and layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import liger_ops
import op_checks
from op_table import OPS
from op_under_test import EVERY_FOLDER
from rope_cases import TABLE_FORMS

OP = OPS["rope"]


def test_tables_are_read_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the cuda kernel, at any strides, the real and imaginary parts of complex numbers too."""
    from liger_ops.lowering.cuda.rope import rope as module

    launched: list[tuple[Any, ...]] = []
    monkeypatch.setattr(module, "launch", lambda *args, **options: launched.append(args))
    for form in TABLE_FORMS.values():
        case = OP.case(
            shape=(2, 4, 3, 128), dtype=torch.bfloat16, tables="batch", rotary=128, layout="model",
            k_layout="model", **form,
        )  # fmt: skip
        args = OP.forward_args(case, OP.tensors(case))
        OP.kernel("cuda")(*args)
        stored = {tensor.untyped_storage().data_ptr() for tensor in args[:4] if tensor is not None}
        read = [arg for arg in launched.pop() if isinstance(arg, Tensor)]
        # Its outputs are the last two.
        assert {tensor.untyped_storage().data_ptr() for tensor in read[:-2]} == stored


@pytest.mark.device_kernels
@EVERY_FOLDER
def test_what_is_not_rotated_is_copied(folder: str) -> None:
    """Bit for bit, infinities too."""
    case = OP.case(shape=(2, 3, 5, 20), dtype=torch.bfloat16, rotary=6, layout="model")
    q, k, cos, sin, *options = OP.forward_args(case, OP.tensors(case))
    q[..., 6:] = torch.linspace(-torch.inf, 0, 14)
    for backward, mask in ((False, ()), (True, ([True, True],))):
        args = (q, k, cos, sin, *options, *mask)
        outputs = op_checks.run_kernel(OP, folder, backward, case, args)
        for output, x in zip(outputs, (q, k), strict=True):
            assert output is not None
            assert torch.equal(output[..., 6:].view(torch.int16), x[..., 6:].view(torch.int16))


@pytest.mark.device_kernels
@EVERY_FOLDER
@pytest.mark.parametrize("q_heads, k_heads", ((3, 0), (0, 2), (0, 0)))
def test_no_heads(folder: str, q_heads: int, k_heads: int) -> None:
    """One tensor is rotated beside another of no heads."""
    case = OP.case(shape=(2, q_heads, 5, 8), dtype=torch.float32, k_heads=k_heads, rotary=8)
    tensors = OP.tensors(case)
    for backward, args in (
        (False, OP.forward_args(case, tensors)),
        (True, OP.backward_args(case, tensors)),
    ):
        definition = liger_ops.library.OPS[OP.backward_name if backward else OP.name].definition
        outputs = op_checks.run_kernel(OP, folder, backward, case, args)
        for output, true in zip(outputs, definition(*args), strict=True):
            torch.testing.assert_close(output, true)


@pytest.mark.device_kernels
@EVERY_FOLDER
@pytest.mark.parametrize("order", ((0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (2, 1, 0, 3)))
def test_outputs_have_the_layout_of_the_inputs(folder: str, order: tuple[int, ...]) -> None:
    """Contiguous, a model's, and sequence-first."""
    case = OP.case(shape=(2, 4, 3, 16), dtype=torch.float32, k_heads=2, rotary=16)
    tensors = OP.tensors(case)
    inverse = [order.index(dim) for dim in range(4)]
    for name in ("q", "k", "dq", "dk"):
        tensors[name] = tensors[name].permute(order).contiguous().permute(inverse)
    for backward, args in (
        (False, OP.forward_args(case, tensors)),
        (True, OP.backward_args(case, tensors)),
    ):
        definition = liger_ops.library.OPS[OP.backward_name if backward else OP.name].definition
        for outputs in (op_checks.run_kernel(OP, folder, backward, case, args), definition(*args)):
            for output, x in zip(outputs, args[:2], strict=True):
                assert output.stride() == x.stride() == torch.empty_like(x).stride()
