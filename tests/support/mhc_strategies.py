"""Hypothesis strategies for the ops of hyper-connections."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from mhc_cases import MHCCase
from op_under_test import DY_LAYOUTS, X_LAYOUTS
from strategy_parts import DTYPES, leading_shapes

STREAMS = (1, 2, 3, 4, 4, 5, 8)
CHANNELS = (1, 2, 7, 16, 31, 64, 127, 257)
# Tokens of a block, and columns of a tile. An NPU's block has as many tokens as the second number.
TILES = (None, (1, 16), (4, 16), (8, 64))


@st.composite
def mhc(draw: st.DrawFn) -> MHCCase:
    dtype = draw(st.sampled_from(DTYPES))
    tile = draw(st.sampled_from(TILES))
    hc = draw(st.sampled_from(STREAMS))
    sizes = [C for C in CHANNELS if tile is None or 5 * tile[1] >= C]
    return MHCCase(
        shape=(*draw(leading_shapes()), hc, draw(st.sampled_from(sizes))),
        dtype=dtype,
        other_dtype=draw(st.sampled_from((torch.float32, None))),
        f_dtype=draw(st.sampled_from((None, torch.float32))),
        layout=draw(st.sampled_from(X_LAYOUTS)),
        dy_layout=draw(st.sampled_from(DY_LAYOUTS)),
        output_mask=tuple(draw(st.booleans()) for _ in range(6)),
        tile=tile,
        scale=draw(st.sampled_from((1.0, 0.05, 10.0))),
        tmax=draw(st.sampled_from((1, 2, 3, 5, 12))),
        rms_eps=draw(st.sampled_from((1e-6, 1e-2))),
        pre_eps=draw(st.sampled_from((0.0, 0.1))),
        sinkhorn_eps=draw(st.sampled_from((1e-6, 1e-2, 0.0))),
        post_mult=draw(st.sampled_from((2.0, 1.0))),
        sharpness=draw(st.sampled_from((1.0, 0.1, 4.0))),
        seed=draw(st.integers(0, 2**31)),
    )


def with_tokens() -> st.SearchStrategy[MHCCase]:
    """Cases whose first dimension has several tokens."""
    return mhc().filter(lambda case: case.tokens and case.tokens[0] > 1)
