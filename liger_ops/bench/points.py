"""What a run finds: a point is one measured number, with its percentiles, and what it is of."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .providers import PROVIDERS
from .timing import Spread

# Metric to its unit. speed, memory and host are of the device's milliseconds, of the peak beyond
# what was there before, and of the host's time a call; graph is the speed of a captured graph.
UNITS = {
    "speed": "ms",
    "share": "%",
    "memory": "MB",
    "gradients": "MB",
    "host": "us",
    "graph": "ms",
    "error": "relative",
}
# The rates of the device, in the place of an op.
COPY, MATRIX_PRODUCT = "copy", "matrix_product"


@dataclass(frozen=True)
class Point:
    kernel: str
    provider: str
    metric: str
    unit: str
    mode: str
    # The names of the shape's numbers, and the numbers.
    dims: str
    shape: str
    # None where the call failed; `note` then says how.
    value: Spread | None
    dtype: str
    note: str = ""
    # More of the configuration, as JSON: the versions, of the device's rates.
    facts: str = "{}"


class Points:
    """The points of a run, in the order in which they were measured."""

    def __init__(self, points: Iterable[Point] = ()) -> None:
        self._points: list[Point] = []
        self._index: dict[tuple[str, ...], Point] = {}
        self.add(points)

    def __iter__(self) -> Iterator[Point]:
        return iter(self._points)

    def __len__(self) -> int:
        return len(self._points)

    def add(self, points: Iterable[Point]) -> None:
        for point in points:
            self._points.append(point)
            key = (point.kernel, point.dtype, point.shape, point.mode, point.provider, point.metric)
            self._index[key] = point

    def get(
        self, kernel: str, dtype: str, shape: str, mode: str, provider: str, metric: str = "speed"
    ) -> Point | None:
        return self._index.get((kernel, dtype, shape, mode, provider, metric))

    def value(
        self, kernel: str, dtype: str, shape: str, mode: str, provider: str, metric: str = "speed"
    ) -> float | None:
        point = self.get(kernel, dtype, shape, mode, provider, metric)
        return None if point is None or point.value is None else point.value.p50

    def rows(self, metric: str = "speed") -> list[tuple[str, str, str, str]]:
        """(kernel, dtype, shape, mode) of everything measured, once each."""
        return list(
            dict.fromkeys((p.kernel, p.dtype, p.shape, p.mode) for p in self if p.metric == metric)
        )

    def providers(self) -> list[str]:
        """Those that have measured anything; the order is that of the package."""
        seen = {point.provider for point in self if point.metric in UNITS}
        return [name for name in PROVIDERS if name in seen]

    def rate(self, kernel: str) -> float | None:
        """The device's, of bfloat16 where there are several."""
        found = [p for p in self if p.kernel == kernel and p.value is not None]
        found.sort(key=lambda p: p.dtype != "bfloat16")
        return found[0].value.p50 if found and found[0].value else None

    def facts(self) -> dict[str, str]:
        """What the run was measured with."""
        for point in self:
            if point.kernel == COPY:
                return dict(json.loads(point.facts))
        return {}
