"""Cases of activations, softmax, embedding and attention residuals."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from activation_cases import ActivationCase
from attn_res_cases import AttnResCase
from embedding_cases import EmbeddingCase
from op_under_test import DY_LAYOUTS, X_LAYOUTS, Case
from strategy_parts import DTYPES, SIZES, TILES, leading_shapes


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
