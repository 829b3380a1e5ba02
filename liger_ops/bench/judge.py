"""The points of a run, the rows in which another provider is faster, and the rows that changed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ..device import Spread
from .providers import LOW_MEMORY, OURS, PROVIDERS

# Metric -> its unit. speed is the time on the device, host the time on the host, graph the time of
# a captured graph, memory the peak above what was allocated before, and share that of the device's
# rate.
UNITS = {
    "speed": "ms",
    "share": "%",
    "memory": "MB",
    "gradients": "MB",
    "host": "us",
    "graph": "ms",
    "error": "relative",
}
# Names that stand for an op in the points of the device's rates.
COPY, MATRIX_PRODUCT = "copy", "matrix_product"
# The note of a point whose call ran on a simulated device, whose times mean nothing.
SIMULATED = "not measured: the device is simulated"
# Metrics that do not depend on the device's speed and memory.
OF_VALUES = ("error", "gradients")
# Times that differ by less count as equal: a relative difference.
NOISE = 0.03

# kernel, dtype, shape, mode.
Row = tuple[str, str, str, str]


@dataclass(frozen=True)
class Point:
    """One measured number with its percentiles, and its configuration."""

    kernel: str
    provider: str
    metric: str
    unit: str
    mode: str
    # The names of the shape's sizes, and the sizes.
    dims: str
    shape: str
    # None if the call failed; `note` is then the reason.
    value: Spread | None
    dtype: str
    note: str = ""
    # The rest of the configuration, as JSON: versions, and the device's rates.
    facts: str = "{}"

    @property
    def row(self) -> Row:
        return self.kernel, self.dtype, self.shape, self.mode


class Points:
    """The points of a run, in the order of measurement."""

    def __init__(self, points: Iterable[Point] = ()) -> None:
        self._points: list[Point] = []
        self._index: dict[tuple[str, ...], Point] = {}
        self.add(points)

    def __iter__(self) -> Iterator[Point]:
        return iter(self._points)

    def add(self, points: Iterable[Point]) -> None:
        for point in points:
            self._points.append(point)
            self._index[point.row + (point.provider, point.metric)] = point

    def get(
        self, kernel: str, dtype: str, shape: str, mode: str, provider: str, metric: str = "speed"
    ) -> Point | None:
        return self._index.get((kernel, dtype, shape, mode, provider, metric))

    def value(self, *key: str) -> float | None:
        """Return the median of the point with this key, or None if there is none."""
        point = self.get(*key)
        return None if point is None or point.value is None else point.value.p50

    def rows(self, metric: str = "speed") -> list[Row]:
        """Return every measured row, once."""
        return list(dict.fromkeys(point.row for point in self if point.metric == metric))

    def workloads(self) -> list[tuple[str, str, str]]:
        """Return (kernel, dtype, shape) of every row, once."""
        return list(dict.fromkeys(row[:3] for row in self.rows()))

    def providers(self) -> list[str]:
        """Return the providers with any point, in the order of PROVIDERS."""
        seen = {point.provider for point in self if point.metric in UNITS}
        return [name for name in PROVIDERS if name in seen]

    def rate(self, kernel: str) -> float | None:
        """Return a rate of the device, that of bfloat16 if there are several."""
        rates = [p for p in self if p.kernel == kernel and p.value is not None]
        rates.sort(key=lambda p: p.dtype != "bfloat16")
        return rates[0].value.p50 if rates and rates[0].value else None

    def facts(self) -> dict[str, str]:
        """Return the command line and the versions of the run."""
        facts = (json.loads(point.facts) for point in self if point.kernel == COPY)
        return next(facts, {})


def losses(points: Points) -> dict[Row, str]:
    """Return the rows in which another provider is faster than liger_ops by more than NOISE: row ->
    the times in words."""
    lost = {}
    for row in points.rows():
        ours = points.value(*row, OURS)
        others = {
            name: ms
            for name in points.providers()
            if name not in (OURS, LOW_MEMORY) and (ms := points.value(*row, name)) is not None
        }
        if ours is None or not others:
            continue
        winner = min(others, key=others.__getitem__)
        best = others[winner]
        if ours > best * (1 + NOISE):
            lost[row] = f"{winner} {best:.3f} ms, liger_ops {ours:.3f}: {ours / best - 1:.0%} more"
    return lost


def failures(points: Points) -> list[str]:
    """Return the rows in which liger_ops itself failed, each with the reason."""
    return [
        f"{p.kernel} {p.shape} {p.dtype} {p.mode}: {p.note}"
        for p in points
        if p.provider in (OURS, LOW_MEMORY) and p.value is None and p.note not in ("", SIMULATED)
    ]


def changes(points: Points, earlier: Points) -> tuple[dict[Row, tuple[float, float]], int]:
    """Return the earlier and the current time of liger_ops in each row that changed by more than
    NOISE, and the number of other rows that both runs have."""
    changed, same = {}, 0
    for row in points.rows():
        then, now = earlier.value(*row, OURS), points.value(*row, OURS)
        if then is None or now is None:
            continue
        if abs(now / then - 1) <= NOISE:
            same += 1
        else:
            changed[row] = (then, now)
    return changed, same
