"""Hypothesis strategies: they draw shapes, strides and options; the values come from a seed."""

from __future__ import annotations

from dataclasses import fields

import torch
from hypothesis import strategies as st

from activation_cases import ActivationCase
from attn_res_cases import AttnResCase
from cross_entropy_cases import LossCase
from distribution_cases import DistributionCase
from divergence_cases import DivergenceCase
from dyt_cases import DytCase
from embedding_cases import EmbeddingCase
from gated_norm_cases import GatedNormCase
from log_prob_cases import LogProbCase
from modulated_norm_cases import ModulatedCase, modulated
from multi_token_cases import MultiTokenCase
from neighborhood_cases import NeighborhoodCase
from norm_cases import NormCase
from op_under_test import DY_LAYOUTS, X_LAYOUTS, Case
from poly_norm_cases import PolyNormCase
from rms_norm_rope_cases import RMSNormRopeCase
from rope_cases import RopeCase

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# One, odd, prime, around a power of two, and round as in models.
SIZES = (1, 2, 3, 7, 13, 16, 31, 64, 127, 128, 129, 257, 300, 768, 1021)
ROWS = (0, 1, 2, 3, 5, 9)
# Small tiles, so that a program loops over several and a row needs several.
TILES = (None, (1, 16), (2, 16), (4, 64), (1, 64), (2, 1024))


def leading_shapes() -> st.SearchStrategy[tuple[int, ...]]:
    return st.one_of(
        st.just(()),
        st.tuples(st.sampled_from(ROWS)),
        st.tuples(st.integers(1, 2), st.sampled_from(ROWS)),
        st.tuples(st.integers(1, 2), st.integers(1, 2), st.integers(1, 2)),
    )


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
def embeddings(draw: st.DrawFn) -> EmbeddingCase:
    tile = draw(st.sampled_from((None, (1, 16), (2, 16), (4, 64), (8, 16))))
    sizes = [n for n in SIZES if tile is None or n <= 5 * tile[1]]
    # Enough indices for words whose rows are in several chunks.
    leading = draw(st.one_of(leading_shapes(), st.just((40,))))
    return EmbeddingCase(
        shape=(*leading, draw(st.sampled_from(sizes))),
        dtype=draw(st.sampled_from(DTYPES)),
        words=draw(st.sampled_from((1, 2, 7, 50))),
        index_dtype=draw(st.sampled_from((torch.int64, torch.int32))),
        padding_idx=draw(st.sampled_from((None, 0, -1))),
        layout=draw(st.sampled_from(X_LAYOUTS)),
        dy_layout=draw(st.sampled_from(DY_LAYOUTS)),
        tile=tile,
        scale=draw(st.sampled_from((1.0, 10.0))),
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
def attention_residuals(draw: st.DrawFn) -> AttnResCase:
    dtype = draw(st.sampled_from(DTYPES))
    tile = draw(st.sampled_from(TILES))
    sizes = [n for n in SIZES if tile is None or n <= 5 * tile[1]]
    blocks = draw(st.sampled_from((1, 2, 3, 8)))
    return AttnResCase(
        shape=(blocks, *draw(leading_shapes()), draw(st.sampled_from(sizes))),
        dtype=dtype,
        query_dtype=draw(st.sampled_from((dtype, torch.float32))),
        weight_dtype=draw(st.sampled_from((dtype, torch.float32, None))),
        eps=draw(st.sampled_from((1e-6, 1e-2))),
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
def softmaxes(draw: st.DrawFn) -> Case:
    """A case of softmax and log_softmax. float16 can hold 5 times the largest scale."""
    tile = draw(st.sampled_from(TILES))
    sizes = [n for n in SIZES if tile is None or n <= 5 * tile[1]]
    scale = draw(st.sampled_from((1.0, 0.05, 10.0, 1e4)))
    return Case(
        shape=(*draw(leading_shapes()), draw(st.sampled_from((0, *sizes)))),
        dtype=draw(st.sampled_from(DTYPES)),
        layout=draw(st.sampled_from(X_LAYOUTS)),
        dy_layout=draw(st.sampled_from(DY_LAYOUTS)),
        tile=tile,
        scale=scale,
        shift=draw(st.sampled_from((0.0, 30.0))) if scale <= 10 else 0.0,
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


# Values beyond which exp or its square leaves float32's range, and where an activation is flat or
# linear; NaN and 0 stay what they are.
SPECIAL_GATES = (1e4, -1e4, 88.0, -88.0, -104.0, 20.0, -20.0, -1.278, 0.0, 1e-7, -1e-30)
HUGE_GATES = (3e38, -3e38, 1e20, -1e20)


@st.composite
def activations(draw: st.DrawFn) -> ActivationCase:
    dtype = draw(st.sampled_from(DTYPES))
    tile = draw(st.sampled_from(TILES))
    sizes = [n for n in SIZES if tile is None or n <= 5 * tile[1]]
    special = SPECIAL_GATES if dtype is torch.float16 else SPECIAL_GATES + HUGE_GATES
    return ActivationCase(
        shape=(*draw(leading_shapes()), draw(st.sampled_from(sizes))),
        dtype=dtype,
        up_dtype=draw(st.sampled_from((None, torch.float32))),
        special=tuple(draw(st.lists(st.sampled_from(special), max_size=4))),
        gate_multiplier=draw(st.sampled_from((1.0, 0.5, -0.3))),
        down_multiplier=draw(st.sampled_from((1.0, 0.088))),
        approximate=draw(st.sampled_from(("tanh", "none"))),
        alpha=draw(st.sampled_from((1.0, 1.702))),
        limit=draw(st.sampled_from((7.0, 0.5, float("inf")))),
        up_offset=draw(st.sampled_from((1.0, 0.0))),
        layout=draw(st.sampled_from(X_LAYOUTS)),
        dy_layout=draw(st.sampled_from(DY_LAYOUTS)),
        output_mask=tuple(draw(st.booleans()) for _ in range(2)),
        tile=tile,
        scale=draw(st.sampled_from((1.0, 1e-3, 10.0))),
        seed=draw(st.integers(0, 2**31)),
    )


@st.composite
def ropes(draw: st.DrawFn, tables: tuple[str, ...] = ("none", "one", "batch")) -> RopeCase:
    dtype = draw(st.sampled_from(DTYPES))
    layouts = (*X_LAYOUTS, "model")
    # The interpreter's time grows with the number of tiles, by a few milliseconds each.
    D = draw(st.sampled_from((2, 3, 6, 16, 20, 34, 80)))
    whole = D - D % 2
    positions, heads = st.sampled_from((1, 2, 3, 5, 0)), st.sampled_from((1, 2, 3, 0))
    rotary = draw(st.sampled_from((whole, 2 * (whole // 4) or whole)))
    kind = draw(st.sampled_from(("real", "real", "real", "complex", "matrices")))
    is_complex, of_matrices = kind == "complex", kind == "matrices"
    sections = None
    if draw(st.booleans()) and not of_matrices:
        # The cuda kernel loads vectors of the tables if sections end at multiples of 8.
        ends = st.sampled_from(sorted({0, 1, 8, 16, 24, rotary // 2}))
        first, second = sorted(min(draw(ends), rotary // 2) for _ in range(2))
        sections = (first, second - first, rotary // 2 - second)
    interleaved = draw(st.booleans())
    return RopeCase(
        shape=(draw(st.sampled_from((1, 2, 0))), draw(heads), draw(positions), D),
        dtype=dtype,
        k_heads=draw(heads),
        tables=draw(st.sampled_from(tables)),
        rotary=rotary,
        table_dtype=torch.float32 if is_complex else draw(st.sampled_from((dtype, torch.float32))),
        layout=draw(st.sampled_from(layouts)),
        k_layout=draw(st.sampled_from(layouts)),
        table_layout=draw(st.sampled_from((*X_LAYOUTS, "strided"))),
        dy_layout=draw(st.sampled_from((*DY_LAYOUTS, "model"))),
        interleaved=interleaved,
        per_pair=draw(st.booleans()),
        is_complex=is_complex,
        sections=sections,
        of_matrices=of_matrices,
        deinterleave=draw(st.booleans()) and (interleaved or is_complex or of_matrices),
        output_mask=(draw(st.booleans()), draw(st.booleans())),
        # The tile has positions and pairs.
        tile=draw(st.sampled_from((None, (1, 16), (2, 16), (4, 4)))),
        scale=draw(st.sampled_from((1.0, 0.05, 100.0))),
        seed=draw(st.integers(0, 2**31)),
    )


@st.composite
def rms_norm_ropes(
    draw: st.DrawFn, tables: tuple[str, ...] = ("none", "one", "batch")
) -> RMSNormRopeCase:
    """A case of rope, with norms before it."""
    case = draw(ropes(tables))
    weight_dtype = st.sampled_from((case.dtype, torch.float32, None))
    weights = draw(weight_dtype), draw(weight_dtype)
    mode = draw(st.sampled_from(("llama", "gemma", "none")))
    drawn = {field.name: getattr(case, field.name) for field in fields(case)}
    return RMSNormRopeCase(
        **{
            **drawn,
            "q_weight_dtype": weights[0],
            "k_weight_dtype": weights[1],
            "eps": draw(st.sampled_from((1e-6, 1e-2))),
            "offset": draw(st.sampled_from((0.0, 1.0))) if None not in weights else 0.0,
            "casting_mode": mode,
            "output_mask": (*case.output_mask, draw(st.booleans()), draw(st.booleans())),
        }
    )


@st.composite
def neighborhoods(draw: st.DrawFn) -> NeighborhoodCase:
    """A case of neighborhood_attention."""
    # The interpreter's time grows with the number of tiles, by a few milliseconds each.
    line = draw(st.booleans())
    lengths = (draw(st.sampled_from((1, 2, 5, 17, 40))),)
    if not line:
        side = st.sampled_from((1, 2, 3, 6))
        lengths = (draw(side), draw(side))
    border = draw(st.sampled_from(("clipped", "shifted")))
    sizes, dilations, causal = [], [], []
    for length in lengths:
        is_causal = draw(st.booleans())
        size = draw(st.sampled_from((1, 2, 3, 4, 9, 33) if line else (1, 2, 3, 4)))
        dilation = draw(st.sampled_from((1, 1, 2, 3, 50)))
        if not is_causal and border == "clipped":
            size -= 1 - size % 2
        if not is_causal and border == "shifted":
            size = min(size, length)
            dilation = min(dilation, length // size)
        sizes.append(size)
        dilations.append(dilation)
        causal.append(is_causal)
    layouts = st.sampled_from((*X_LAYOUTS, "model"))
    batch, key_heads, group = draw(
        st.sampled_from(
            ((1, 1, 1), (1, 1, 3), (1, 2, 1), (1, 2, 2), (2, 1, 1), (2, 1, 2), (0, 1, 1))
        )
    )
    D = draw(st.sampled_from((1, 3, 8, 16, 20, 33)))
    return NeighborhoodCase(
        shape=(batch, key_heads * group, *lengths, D),
        dtype=draw(st.sampled_from(DTYPES)),
        key_heads=key_heads,
        kernel_size=tuple(sizes),
        dilation=tuple(dilations),
        is_causal=tuple(causal),
        border=border,
        softmax_scale=draw(st.sampled_from((None, 1.0, -0.3))),
        layout=draw(layouts),
        key_layout=draw(layouts),
        dy_layout=draw(st.sampled_from((*DY_LAYOUTS, "model"))),
        output_mask=tuple(draw(st.booleans()) for _ in range(3)),
        tile=draw(st.sampled_from((None, (1, 16) if line else (2, 8), (4, 4)))),
        scale=draw(st.sampled_from((1.0, 0.05, 10.0))),
        seed=draw(st.integers(0, 2**31)),
    )


@st.composite
def losses(draw: st.DrawFn) -> LossCase:
    """A case of cross_entropy."""
    dtype = draw(st.sampled_from(DTYPES))
    tile = draw(st.sampled_from(TILES))
    sizes = [n for n in SIZES if tile is None or n <= 5 * tile[1]]
    reduction = draw(st.sampled_from(("mean", "sum", "none")))
    weight_dtype = st.sampled_from((None, None, torch.float32, dtype))
    return LossCase(
        shape=(*draw(leading_shapes()), draw(st.sampled_from(sizes))),
        dtype=dtype,
        target_dtype=draw(st.sampled_from((torch.int64, torch.int32))),
        ignored=draw(st.sampled_from((0, 1, 2, 3))),
        # One ignored index is also a class, one is not.
        ignore_index=draw(st.sampled_from((-100, 0))),
        weight_dtype=draw(weight_dtype),
        token_weight_dtype=draw(weight_dtype),
        has_items=reduction == "mean" and draw(st.booleans()),
        reduction=reduction,
        label_smoothing=draw(st.sampled_from((0.0, 0.1, 1.0))),
        lse_square_scale=draw(st.sampled_from((0.0, 1e-4, 0.1))),
        softcap=draw(st.sampled_from((None, 3.0, 30.0))),
        logit_scale=draw(st.sampled_from((1.0, 0.0625, 2.0))),
        return_predicted=draw(st.booleans()),
        return_entropy=draw(st.booleans()),
        layout=draw(st.sampled_from(X_LAYOUTS)),
        dy_layout=draw(st.sampled_from(DY_LAYOUTS)),
        output_mask=tuple(draw(st.booleans()) for _ in range(3)),
        tile=tile,
        scale=draw(st.sampled_from((1.0, 0.05, 10.0))),
        seed=draw(st.integers(0, 2**31)),
    )


@st.composite
def log_probs(draw: st.DrawFn) -> LogProbCase:
    """A case of log_prob."""
    tile = draw(st.sampled_from(TILES))
    sizes = [n for n in SIZES if tile is None or n <= 5 * tile[1]]
    return LogProbCase(
        shape=(*draw(leading_shapes()), draw(st.sampled_from(sizes))),
        dtype=draw(st.sampled_from(DTYPES)),
        target_dtype=draw(st.sampled_from((torch.int64, torch.int32))),
        ignored=draw(st.sampled_from((0, 1, 2, 3))),
        # One ignored index is also a class, one is not.
        ignore_index=draw(st.sampled_from((-100, 0))),
        temperature=draw(st.sampled_from((1.0, 0.6, 2.5))),
        softcap=draw(st.sampled_from((None, 3.0, 30.0))),
        logit_scale=draw(st.sampled_from((1.0, 0.0625, 2.0))),
        layout=draw(st.sampled_from(X_LAYOUTS)),
        dy_layout=draw(st.sampled_from(DY_LAYOUTS)),
        output_mask=tuple(draw(st.booleans()) for _ in range(3)),
        tile=tile,
        scale=draw(st.sampled_from((1.0, 0.05, 10.0))),
        seed=draw(st.integers(0, 2**31)),
    )


@st.composite
def divergences(draw: st.DrawFn) -> DivergenceCase:
    """A case of divergence."""
    tile = draw(st.sampled_from(TILES))
    sizes = [n for n in SIZES if tile is None or n <= 5 * tile[1]]
    dtype = draw(st.sampled_from(DTYPES))
    return DivergenceCase(
        shape=(*draw(leading_shapes()), draw(st.sampled_from(sizes))),
        dtype=dtype,
        teacher_dtype=draw(st.sampled_from((None, None, torch.float32))),
        kind=draw(st.sampled_from(("jsd", "forward_kl", "reverse_kl", "tvd"))),
        beta=draw(st.sampled_from((0.5, 0.1, 0.9, 0.0, 1.0))),
        temperature=draw(st.sampled_from((1.0, 0.6, 2.5))),
        teacher_temperature=draw(st.sampled_from((None, 0.7, 2.0))),
        target_dtype=draw(st.sampled_from((torch.int64, torch.int32))),
        ignored=draw(st.sampled_from((None, 0, 1, 2, 3))),
        # One ignored index is also a class, one is not.
        ignore_index=draw(st.sampled_from((-100, 0))),
        layout=draw(st.sampled_from(X_LAYOUTS)),
        dy_layout=draw(st.sampled_from(DY_LAYOUTS)),
        output_mask=tuple(draw(st.booleans()) for _ in range(3)),
        tile=tile,
        scale=draw(st.sampled_from((1.0, 0.05, 10.0))),
        seed=draw(st.integers(0, 2**31)),
    )


@st.composite
def distribution_losses(draw: st.DrawFn) -> DistributionCase:
    """A case of kl_div, jsd or tvd."""
    tile = draw(st.sampled_from(TILES))
    sizes = [n for n in SIZES if tile is None or n <= 5 * tile[1]]
    return DistributionCase(
        op=draw(st.sampled_from(("kl_div", "jsd", "tvd"))),
        shape=(*draw(leading_shapes()), draw(st.sampled_from(sizes))),
        dtype=draw(st.sampled_from(DTYPES)),
        second_dtype=draw(st.sampled_from((None, None, torch.float32))),
        reduction=draw(st.sampled_from(("batchmean", "mean", "sum", "none"))),
        log_target=draw(st.booleans()),
        eps=draw(st.sampled_from((1e-10, 0.0, 1e-2))),
        beta=draw(st.sampled_from((0.5, 0.1, 0.9, 0.0, 1.0))),
        zeros=draw(st.booleans()),
        target_dtype=draw(st.sampled_from((torch.int64, torch.int32))),
        ignored=draw(st.sampled_from((None, 0, 1, 2, 3))),
        # One ignored index is also a class, one is not.
        ignore_index=draw(st.sampled_from((-100, 0))),
        layout=draw(st.sampled_from(X_LAYOUTS)),
        dy_layout=draw(st.sampled_from(X_LAYOUTS)),
        output_mask=tuple(draw(st.booleans()) for _ in range(3)),
        tile=tile,
        scale=draw(st.sampled_from((1.0, 0.05, 10.0))),
        seed=draw(st.integers(0, 2**31)),
    )


@st.composite
def multi_token_attentions(draw: st.DrawFn) -> MultiTokenCase:
    """A case of multi_token_attention. A call takes no tile."""
    # The interpreter's time grows with the rows.
    L = draw(st.sampled_from((1, 2, 7, 16, 37)))
    groups = draw(st.sampled_from((1, 2)))
    kernel, dilation = (draw(st.sampled_from(((1, 1), (3, 3), (3, 1), (2, 4)))) for _ in range(2))
    # What each dimension loses without padding. The result must be square: its size is L less
    # `smaller` or, for an even kernel, more than L.
    lost = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
    if sum(lost) % 2:
        kernel, dilation, lost = (3, 3), (1, 1), [2, 2]
    whole = 0 if all(n % 2 == 0 for n in lost) else max(lost)
    smaller = draw(st.sampled_from((0, 0, 1))) if min(lost) > 1 and L > 2 else 0
    padding = tuple((whole + n) // 2 - smaller for n in lost)
    dtype = draw(st.sampled_from(DTYPES))
    return MultiTokenCase(
        shape=(draw(st.sampled_from((0, 1, 2, 3))), groups * draw(st.sampled_from((1, 3))), L, L),
        dtype=dtype,
        weight_dtype=draw(st.sampled_from((None, None, torch.float32, torch.bfloat16))),
        out=groups * draw(st.sampled_from((1, 2))),
        kernel=kernel,
        stride=(draw(st.sampled_from((1, 1, 2))),),
        padding=padding,
        dilation=dilation,
        groups=groups,
        bias=draw(st.booleans()),
        sparse=draw(st.booleans()),
        layout=draw(st.sampled_from(X_LAYOUTS)),
        dy_layout=draw(st.sampled_from(DY_LAYOUTS)),
        output_mask=tuple(draw(st.booleans()) for _ in range(3)),
        scale=draw(st.sampled_from((1.0, 0.05, 10.0))),
        shift=draw(st.sampled_from((0.0, 30.0))),
        seed=draw(st.integers(0, 2**31)),
    )


def has_rows(case: Case) -> bool:
    """Whether the first dimension has several rows."""
    return len(case.shape) > 1 and case.shape[0] > 1
