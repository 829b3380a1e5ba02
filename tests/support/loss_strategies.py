"""Cases of losses."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from cross_entropy_cases import LossCase
from distribution_cases import DistributionCase
from divergence_cases import DivergenceCase
from log_prob_cases import LogProbCase
from op_under_test import DY_LAYOUTS, X_LAYOUTS
from strategy_parts import DTYPES, SIZES, TILES, leading_shapes


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
