"""Invented measurements of a run of the bench, to test how results are shown."""

from __future__ import annotations

from liger_ops.bench.providers import LOW_MEMORY, PROVIDERS
from liger_ops.bench.show import COPY, MATRIX_PRODUCT, UNITS, Point, Points
from liger_ops.device import Spread

# All providers but two: no op has all.
SIX = [name for name in PROVIDERS if name not in (LOW_MEMORY, "trl")]
SHARED = {"gpu": "a GPU", "timestamp": "2026-01-02 03:04:05", "version": "0.1.0"}


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
        kernel=kernel, provider=provider, metric=metric, unit=UNITS[metric], mode=mode,
        dims="M x N", shape=shape, value=spread, dtype=dtype, note=note,
    )  # fmt: skip


def rates(copy: float = 4000.0, product: float = 700.0) -> list[Point]:
    facts = '{"command": "the command", "torch": "2.11.0"}'
    values = ((COPY, copy, "GB/s", "float32"), (MATRIX_PRODUCT, product, "TFLOP/s", "bfloat16"))
    return [
        Point(kernel, "torch", "throughput", unit, "", "", "", Spread(v, v, v), dtype, facts=facts)
        for kernel, v, unit, dtype in values
    ]


def timed(provider: str, ms: float, share: float, **where: str) -> list[Point]:
    return [point(provider, ms, **where), point(provider, share, metric="share", **where)]


def full_house() -> Points:
    """Return a workload with six providers, the most that an op has, and the longest numbers."""
    points = Points(rates())
    for name in SIX:
        for mode in ("forward", "backward", "full"):
            points.add(timed(name, 161.313, 101.0, mode=mode, shape="32768x4096"))
        points.add([point(name, 12024.0, metric="memory", mode="full")])
        points.add([point(name, 12024.0, metric="host", mode="forward")])
    return points
