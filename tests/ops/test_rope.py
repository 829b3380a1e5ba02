"""rope's kernels of both devices against float64 truth, at every form of tables and layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

import liger_ops
import op_checks
import strategies
from op_table import OPS
from op_under_test import FOLDERS
from rope_cases import RopeCase

OP = OPS["rope"]
EVERY_FOLDER = pytest.mark.parametrize("folder", FOLDERS)


@pytest.mark.device_kernels
@EVERY_FOLDER
@given(case=strategies.ropes())
def test_forward_matches_truth(folder: str, case: RopeCase) -> None:
    op_checks.assert_forward_matches_truth(OP, folder, case)


@pytest.mark.device_kernels
@EVERY_FOLDER
@given(case=strategies.ropes())
def test_backward_matches_truth(folder: str, case: RopeCase) -> None:
    op_checks.assert_backward_matches_truth(OP, folder, case)


@pytest.mark.device_kernels
@EVERY_FOLDER
@settings(max_examples=settings().max_examples // 3)
@given(case=strategies.ropes(tables=("none", "one")).filter(strategies.has_rows))
def test_properties(folder: str, case: RopeCase) -> None:
    op_checks.assert_deterministic(OP, folder, case)
    op_checks.assert_tile_does_not_matter(OP, folder, case)
    op_checks.assert_rows_are_independent(OP, folder, case)


@pytest.mark.device_kernels
@EVERY_FOLDER
@pytest.mark.parametrize("interleaved", (False, True))
@pytest.mark.parametrize(
    ("shape", "rotary"),
    (((2, 16, 9, 128), 128), ((1, 9, 17, 96), 24), ((1, 2, 3, 6002), 6002), ((1, 1, 2, 601), 2)),
    ids=("llama", "partial", "wide", "mostly-copied"),
)
def test_by_the_host_codes_own_plan(
    folder: str, shape: tuple[int, ...], rotary: int, interleaved: bool
) -> None:
    case = RopeCase(
        shape=shape,
        dtype=torch.bfloat16,
        k_heads=2,
        tables="one",
        rotary=rotary,
        table_dtype=torch.bfloat16,
        layout="model",
        k_layout="model",
        interleaved=interleaved,
    )
    op_checks.assert_forward_matches_truth(OP, folder, case)
    op_checks.assert_backward_matches_truth(OP, folder, case)


# The forms of tables that a kernel reads in another way.
TABLE_FORMS = {
    "per-pair": {"per_pair": True},
    "strided": {"per_pair": True, "table_layout": "strided"},
    "complex": {"is_complex": True, "table_dtype": torch.float32},
    "complex-strided": {
        "is_complex": True,
        "table_dtype": torch.float32,
        "table_layout": "strided",
    },
    "sections": {"sections": (16, 24, 24)},
    "odd-sections": {"sections": (0, 13, 51)},
    "interleaved-sections": {"sections": (16, 24, 24), "interleaved": True},
    "complex-sections": {
        "is_complex": True,
        "table_dtype": torch.float32,
        "sections": (16, 24, 24),
    },
    "matrices": {"of_matrices": True, "table_dtype": torch.float32},
    "matrices-strided": {"of_matrices": True, "table_layout": "strided"},
    "deinterleave": {"interleaved": True, "deinterleave": True},
    "deinterleave-per-pair": {"interleaved": True, "per_pair": True, "deinterleave": True},
    "deinterleave-matrices": {"of_matrices": True, "deinterleave": True},
}


@pytest.mark.device_kernels
@EVERY_FOLDER
@pytest.mark.parametrize("form", TABLE_FORMS)
def test_tables_by_the_host_codes_own_plan(folder: str, form: str) -> None:
    """A model's sizes, and a partial rotation of them."""
    whole = RopeCase(
        shape=(2, 4, 3, 128),
        dtype=torch.bfloat16,
        k_heads=2,
        tables="batch",
        rotary=128,
        layout="model",
        k_layout="model",
        **{"table_dtype": torch.bfloat16, **TABLE_FORMS[form]},
    )
    for case in (whole, replace(whole, shape=(2, 4, 3, 160))):
        op_checks.assert_forward_matches_truth(OP, folder, case)
        op_checks.assert_backward_matches_truth(OP, folder, case)


def test_tables_are_read_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the cuda kernel, at any strides, the real and imaginary parts of complex numbers too."""
    from liger_ops.lowering.cuda.rope import rope as module

    launched: list[tuple[Any, ...]] = []
    monkeypatch.setattr(module, "launch", lambda *args, **options: launched.append(args))
    for form in TABLE_FORMS.values():
        case = RopeCase(
            shape=(2, 4, 3, 128),
            dtype=torch.bfloat16,
            tables="batch",
            rotary=128,
            layout="model",
            k_layout="model",
            **form,
        )
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
    case = RopeCase(shape=(2, 3, 5, 20), dtype=torch.bfloat16, rotary=6, layout="model")
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
    case = RopeCase(shape=(2, q_heads, 5, 8), dtype=torch.float32, k_heads=k_heads, rotary=8)
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
    case = RopeCase(shape=(2, 4, 3, 16), dtype=torch.float32, k_heads=2, rotary=16)
    tensors = OP.tensors(case)
    inverse = [order.index(dim) for dim in range(4)]
    for name in ("q", "k", "dy", "ds"):
        tensors[name] = tensors[name].permute(order).contiguous().permute(inverse)
    for backward, args in (
        (False, OP.forward_args(case, tensors)),
        (True, OP.backward_args(case, tensors)),
    ):
        definition = liger_ops.library.OPS[OP.backward_name if backward else OP.name].definition
        for outputs in (op_checks.run_kernel(OP, folder, backward, case, args), definition(*args)):
            for output, x in zip(outputs, args[:2], strict=True):
                assert output.stride() == x.stride() == torch.empty_like(x).stride()
