"""Cases of rotary embeddings and attention."""

from __future__ import annotations

from dataclasses import fields

import torch
from hypothesis import strategies as st

from multi_token_cases import MultiTokenCase
from neighborhood_cases import NeighborhoodCase
from op_under_test import DY_LAYOUTS, X_LAYOUTS
from rms_norm_rope_cases import RMSNormRopeCase
from rope_cases import RopeCase
from strategy_parts import DTYPES


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
