"""A run beside an earlier one: what of liger_ops became faster, and what slower."""

from __future__ import annotations

from .points import COPY, Points
from .providers import OURS
from .table import milliseconds
from .targets import BEHIND


def compared(points: Points, earlier: Points) -> str:
    """The rows of liger_ops that both runs have, those that changed by more than noise in full."""
    lines = []
    same = 0
    for row in points.rows():
        now, then = points.value(*row, OURS), earlier.value(*row, OURS)
        if now is None or then is None:
            continue
        if abs(now / then - 1) <= BEHIND:
            same += 1
            continue
        kernel, dtype, shape, mode = row
        word = "slower" if now > then else "faster"
        lines.append(
            f"  {word}: {kernel} {shape} {dtype} {mode}"
            f" {milliseconds(then)} -> {milliseconds(now)} ms ({now / then - 1:+.0%})"
        )
    rates = [points.rate(COPY), earlier.rate(COPY)]
    if None not in rates:
        lines.insert(0, f"  copies at {rates[0]:.0f} GB/s, then at {rates[1]:.0f}")
    lines.append(f"  {same} rows within {BEHIND:.0%}")
    return "\n".join(["against the earlier run:", *lines])
