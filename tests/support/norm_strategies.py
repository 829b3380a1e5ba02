"""Cases of norms."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from dyt_cases import DytCase
from gated_norm_cases import GatedNormCase
from modulated_norm_cases import ModulatedCase, modulated
from norm_cases import NormCase
from op_under_test import DY_LAYOUTS, X_LAYOUTS
from poly_norm_cases import PolyNormCase
from strategy_parts import DTYPES, SIZES, TILES, leading_shapes


@st.composite
def row_norms(
    draw: st.DrawFn, *, has_offset: bool, has_bias: bool, has_residual: bool, mask_length: int
) -> NormCase:
    """A case of an op that normalises the last dimension."""
    dtype = draw(st.sampled_from(DTYPES))
    parameter_dtype = st.sampled_from((dtype, torch.float32, None))
    weight_dtype = draw(parameter_dtype)
    tile = draw(st.sampled_from(TILES))
    # The interpreter's time grows with the number of tiles, by a few milliseconds each.
    sizes = [n for n in SIZES if tile is None or n <= 5 * tile[1]]
    return NormCase(
        shape=(*draw(leading_shapes()), draw(st.sampled_from(sizes))),
        dtype=dtype,
        weight_dtype=weight_dtype,
        bias_dtype=draw(parameter_dtype) if has_bias else None,
        residual_dtype=draw(st.sampled_from((dtype, torch.float32))) if has_residual else None,
        eps=draw(st.sampled_from((1e-6, 1e-5, 1e-2))),
        offset=draw(st.sampled_from((0.0, 1.0))) if has_offset and weight_dtype else 0.0,
        casting_mode=draw(st.sampled_from(("llama", "gemma", "none"))) if has_offset else "llama",
        layout=draw(st.sampled_from(X_LAYOUTS)),
        dy_layout=draw(st.sampled_from(DY_LAYOUTS)),
        has_ds=draw(st.booleans()),
        output_mask=tuple(draw(st.booleans()) for _ in range(mask_length)),
        tile=tile,
        scale=draw(st.sampled_from((1.0, 0.05, 10.0))),
        # layer_norm must subtract a mean far from zero before it squares.
        shift=0.0 if has_offset else draw(st.sampled_from((0.0, 30.0))),
        seed=draw(st.integers(0, 2**31)),
    )


def rms_norms() -> st.SearchStrategy[NormCase]:
    return row_norms(has_offset=True, has_bias=False, has_residual=False, mask_length=2)


def fused_add_rms_norms() -> st.SearchStrategy[NormCase]:
    return row_norms(has_offset=True, has_bias=False, has_residual=True, mask_length=2)


def layer_norms() -> st.SearchStrategy[NormCase]:
    return row_norms(has_offset=False, has_bias=True, has_residual=False, mask_length=3)


@st.composite
def modulated_norms(draw: st.DrawFn, norms: st.SearchStrategy[NormCase]) -> ModulatedCase:
    case = draw(norms)
    return modulated(
        case,
        casting_mode=draw(st.sampled_from((case.casting_mode, "float32"))),
        scale_dtype=draw(st.sampled_from((case.dtype, torch.float32))),
        shift_dtype=draw(st.sampled_from((case.dtype, torch.float32, None))),
        output_mask=tuple(draw(st.booleans()) for _ in range(5)),
    )


@st.composite
def gated_rms_norms(draw: st.DrawFn) -> GatedNormCase:
    dtype = draw(st.sampled_from(DTYPES))
    tile = draw(st.sampled_from(TILES))
    num_groups = draw(st.sampled_from((1, 1, 2, 3)))
    sizes = [n for n in SIZES if num_groups * n <= (5 * tile[1] if tile else 1021)]
    return GatedNormCase(
        shape=(*draw(leading_shapes()), num_groups * draw(st.sampled_from(sizes))),
        dtype=dtype,
        gate_dtype=draw(st.sampled_from((None, None, torch.float32))),
        weight_dtype=draw(st.sampled_from((dtype, torch.float32, None))),
        eps=draw(st.sampled_from((1e-6, 1e-5, 1e-2))),
        norm_before_gate=draw(st.booleans()),
        num_groups=num_groups,
        activation=draw(st.sampled_from(("silu", "sigmoid"))),
        casting_mode=draw(st.sampled_from(("llama", "gemma"))),
        layout=draw(st.sampled_from(X_LAYOUTS)),
        dy_layout=draw(st.sampled_from(DY_LAYOUTS)),
        output_mask=tuple(draw(st.booleans()) for _ in range(3)),
        tile=tile,
        scale=draw(st.sampled_from((1.0, 0.05, 10.0))),
        seed=draw(st.integers(0, 2**31)),
    )


@st.composite
def poly_norms(draw: st.DrawFn) -> PolyNormCase:
    dtype = draw(st.sampled_from(DTYPES))
    tile = draw(st.sampled_from(TILES))
    sizes = [n for n in SIZES if tile is None or n <= 5 * tile[1]]
    return PolyNormCase(
        shape=(*draw(leading_shapes()), draw(st.sampled_from(sizes))),
        dtype=dtype,
        weight_dtype=draw(st.sampled_from((None, torch.float32))),
        bias_dtype=draw(st.sampled_from((dtype, torch.float32, None))),
        bias_shape=draw(st.sampled_from(((1,), ()))),
        eps=draw(st.sampled_from((1e-6, 1e-5, 1e-2))),
        layout=draw(st.sampled_from(X_LAYOUTS)),
        dy_layout=draw(st.sampled_from(DY_LAYOUTS)),
        output_mask=tuple(draw(st.booleans()) for _ in range(3)),
        tile=tile,
        scale=draw(st.sampled_from((1.0, 0.05, 10.0))),
        seed=draw(st.integers(0, 2**31)),
    )


@st.composite
def dyts(draw: st.DrawFn) -> DytCase:
    dtype = draw(st.sampled_from(DTYPES))
    tile = draw(st.sampled_from(TILES))
    sizes = [n for n in SIZES if tile is None or n <= 5 * tile[1]]
    return DytCase(
        shape=(*draw(leading_shapes()), draw(st.sampled_from(sizes))),
        dtype=dtype,
        alpha=draw(st.sampled_from((0.5, -1.0, 0.01))),
        alpha_shape=draw(st.sampled_from(((1,), ()))),
        gamma_dtype=draw(st.sampled_from((None, torch.float32))),
        beta_dtype=draw(st.sampled_from((dtype, torch.float32, None))),
        layout=draw(st.sampled_from(X_LAYOUTS)),
        dy_layout=draw(st.sampled_from(DY_LAYOUTS)),
        output_mask=tuple(draw(st.booleans()) for _ in range(4)),
        tile=tile,
        scale=draw(st.sampled_from((1.0, 0.05, 10.0))),
        seed=draw(st.integers(0, 2**31)),
    )


@st.composite
def group_norms(draw: st.DrawFn) -> NormCase:
    dtype = draw(st.sampled_from(DTYPES))
    parameter_dtype = st.sampled_from((dtype, torch.float32, None))
    num_groups = draw(st.sampled_from((1, 2, 3)))
    channels = num_groups * draw(st.sampled_from((1, 2, 3, 7)))
    tile = draw(st.sampled_from((None, (1, 16), (2, 16), (4, 4), (4, 16))))
    # The interpreter's time grows with the number of tiles, by a few milliseconds each.
    positions = ((), (1,), (7,), (0,), (5, 7), (2, 3, 3))
    large = () if tile else ((129,), (16, 16))
    spatial = draw(st.sampled_from(positions + large))
    return NormCase(
        shape=(draw(st.sampled_from((0, 1, 2))), channels, *spatial),
        dtype=dtype,
        weight_dtype=draw(parameter_dtype),
        bias_dtype=draw(parameter_dtype),
        num_groups=num_groups,
        eps=draw(st.sampled_from((1e-6, 1e-5, 1e-2))),
        layout=draw(st.sampled_from(X_LAYOUTS)),
        dy_layout=draw(st.sampled_from(DY_LAYOUTS)),
        output_mask=tuple(draw(st.booleans()) for _ in range(3)),
        tile=tile,
        scale=draw(st.sampled_from((1.0, 0.05, 10.0))),
        shift=draw(st.sampled_from((0.0, 30.0))),
        seed=draw(st.integers(0, 2**31)),
    )
