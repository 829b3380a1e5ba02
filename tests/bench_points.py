"""Points of a run that never was, for what only shows them."""

from __future__ import annotations

from liger_ops.bench.points import COPY, MATRIX_PRODUCT, UNITS, Point
from liger_ops.bench.timing import Spread


def point(
    provider: str,
    value: float | None,
    *,
    kernel: str = "rms_norm",
    metric: str = "speed",
    mode: str = "forward",
    shape: str = "32768x4096",
    dtype: str = "bfloat16",
    note: str = "",
) -> Point:
    spread = None if value is None else Spread(value, 0.9 * value, 1.2 * value)
    return Point(
        kernel=kernel,
        provider=provider,
        metric=metric,
        unit=UNITS[metric],
        mode=mode,
        dims="M x N",
        shape=shape,
        value=spread,
        dtype=dtype,
        note=note,
    )


def rates(copy: float = 4000.0, product: float = 700.0) -> list[Point]:
    facts = '{"command": "the command", "torch": "2.11.0"}'
    values = ((COPY, copy, "GB/s", "float32"), (MATRIX_PRODUCT, product, "TFLOP/s", "bfloat16"))
    return [
        Point(kernel, "torch", "throughput", unit, "", "", "", Spread(v, v, v), dtype, facts=facts)
        for kernel, v, unit, dtype in values
    ]


def timed(provider: str, ms: float, share: float, **where: str) -> list[Point]:
    return [point(provider, ms, **where), point(provider, share, metric="share", **where)]
