"""What the fakes of mhc_coeffs, mhc_pre and mhc_post_res check."""

from __future__ import annotations

from typing import Any

from ...ops.hyper_connections.mhc_coeffs import MOST_STREAMS
from .. import checks


def streams(call: Any, *others: str) -> None:
    """Check that x is (..., hc, C), and that it and the tensors in `others` are floating point, on
    one device."""
    checks.floating(call, "x", *others)
    checks.at_least_dims(call, "x", 2, "(..., hc, C)")
    checks.same_device(call, "x", *others)
    hc, C = call.x.shape[-2:]
    if not 1 <= hc <= MOST_STREAMS or C < 1:
        raise ValueError(
            f"{checks.op(call)}: x must be (..., hc, C), with 1 to {MOST_STREAMS} streams and at"
            f" least one channel, got shape {tuple(call.x.shape)}"
        )
