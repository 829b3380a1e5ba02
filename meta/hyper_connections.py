"""mhc_coeffs, mhc_pre and mhc_post_res: the number of streams."""

from __future__ import annotations

from typing import Any

from ..ops.hyper_connections.mhc_coeffs import MOST_STREAMS
from .checks import op
from .lines import also


@also("mhc_coeffs", "mhc_pre", "mhc_post_res")
def streams(call: Any) -> None:
    hc, C = call.x.shape[-2:]
    if not 1 <= hc <= MOST_STREAMS or C < 1:
        raise ValueError(
            f"{op(call)}: x must be (..., hc, C), with 1 to {MOST_STREAMS} streams and at least one"
            f" channel, got shape {tuple(call.x.shape)}"
        )
