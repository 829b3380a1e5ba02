"""modulated_layer_norm against float64 truth, and the code of diffusion models that it replaces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import liger_ops
import modulated_blocks as blocks
import op_checks
from op_table import OPS
from op_under_test import EVERY_FOLDER, SAME

OP = OPS["modulated_layer_norm-sample"]


BLOCKS: dict[str, tuple[Any, dict[str, Any]]] = {
    "dit": (blocks.dit, {}),
    "zero": (blocks.zero, {}),
    "continuous": (blocks.continuous, {}),
    "wan": (blocks.wan, {"casting_mode": "float32"}),
}


def inputs(name: str, dtype: torch.dtype, per_token: bool = False) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    x = torch.randn(3, 5, 64).to(dtype)
    if name != "wan":
        return x, *(torch.randn(3, 64).to(dtype) for _ in range(2))
    return x, *torch.randn(2, 3, 5 if per_token else 1, 64)


@pytest.mark.parametrize("affine", (False, True))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("name", BLOCKS)
def test_definition_is_the_blocks_code(name: str, dtype: torch.dtype, affine: bool) -> None:
    """Half precision rounds where the blocks do. ATen sums a row in another order."""
    block, options = BLOCKS[name]
    for per_token in (False, True):
        x, scale, shift = inputs(name, dtype, per_token)
        kind = blocks.FP32LayerNorm if name == "wan" else nn.LayerNorm
        norm = kind(64, 1e-6, elementwise_affine=affine)
        for parameter in norm.parameters():
            nn.init.normal_(parameter)
        norm = norm if name == "wan" else norm.to(dtype)
        expected = block(norm, x, scale, shift)
        y = liger_ops.modulated_layer_norm(x, scale, shift, norm.weight, norm.bias, 1e-6, **options)
        if dtype is torch.float32:
            torch.testing.assert_close(y, expected)
        else:
            # A value beside the middle of two others may round to the other of them.
            assert (y != expected).float().mean() < 0.005
            torch.testing.assert_close(y, expected, rtol=0.02, atol=0.02)


def test_each_casting_mode_rounds_in_its_own_places() -> None:
    """The test above would fail with the other mode."""
    x, scale, shift = inputs("wan", torch.bfloat16)
    modes = [
        liger_ops.modulated_layer_norm(x, scale, shift, casting_mode=mode)
        for mode in ("torch", "float32")
    ]
    assert (modes[0] != modes[1]).float().mean() > 0.05


@EVERY_FOLDER
@pytest.mark.parametrize("mode", ("torch", "float32"))
@pytest.mark.parametrize("wide", (False, True))
@pytest.mark.device_kernels
def test_kernels_round_where_the_definition_does(folder: str, mode: str, wide: bool) -> None:
    case = OP.case(
        shape=(2, 3, 300), dtype=torch.bfloat16, scale_dtype=torch.float32 if wide else SAME,
        shift_dtype=torch.bfloat16, casting_mode=mode,
    )  # fmt: skip
    args = OP.forward_args(case, OP.tensors(case))
    (y,) = op_checks.run_kernel(OP, folder, False, case, args)
    assert (y != OP.definition(*args)).float().mean() < 0.01


def test_rows_of_a_flattened_batch() -> None:
    """(M, N) with (B, N) is (B, M / B, N) with (B, N), and with (B, 1, N)."""
    x, scale, shift = inputs("dit", torch.float32)
    y = liger_ops.modulated_layer_norm(x, scale, shift)
    assert torch.equal(liger_ops.modulated_layer_norm(x, scale[:, None], shift[:, None]), y)
    assert torch.equal(
        liger_ops.modulated_layer_norm(x.flatten(0, 1), scale, shift), y.flatten(0, 1)
    )
    frames = x[:, None].expand(3, 2, 5, 64)
    per_frame = torch.stack((scale, scale), 1)
    y = y[:, None].expand(3, 2, 5, 64)
    assert torch.equal(
        liger_ops.modulated_layer_norm(frames, per_frame, per_frame * 0 + shift[:, None]), y
    )


@EVERY_FOLDER
def test_no_rows(folder: str) -> None:
    """scale has elements where x has none: its gradient is 0."""
    x, scale = torch.empty(0, 5, 8), torch.ones(8)
    kernel = OP.kernel(folder, backward=True)
    assert OP.kernel(folder)(x, scale).shape == x.shape
    _, dscale, dshift, dweight, dbias = kernel(
        x, x, scale, scale, scale, scale, 1e-6, [True] * 5, plan=None
    )
    for gradient in (dscale, dshift, dweight, dbias):
        assert torch.equal(gradient, torch.zeros(8))
