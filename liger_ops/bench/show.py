"""Show the results of a run as a table for the terminal, a page, and plots, and judge them: the
points of a run, the rows in which another provider is faster, and the rows that changed.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


# 80 columns fit six providers, the most that an op has.
WIDTH = 80
MODE_WIDTH = 10
# The width of "0.326 101%" after a space.
CELL_WIDTH = 10
# (metric, mode) -> title, for the lines below the times.
OTHERS = {
    ("memory", "full"): "peak MB",
    ("host", "forward"): "host fwd",
    ("host", "full"): "host us",
    ("graph", "full"): "graph ms",
}

BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
NEW_PAGE = f"""# Benchmarks

{BEGIN}
{END}
"""
HOW = """\
Times are device times from its events, in milliseconds: medians, with the cache flushed before
every call and the providers taking turns. The percentage beside a time is the achieved bandwidth
relative to the copy bandwidth that the same device reached in the same run, counted from the fewest
bytes that the op must move; for `linear_cross_entropy` it is the achieved rate of operations
relative to one large matrix product. It can exceed 100%, because a copy is not the fastest memory
access. `forward` records the gradient, as in training. `eager` is the code that models contain,
`aten` PyTorch's own fused op, `inductor` what `torch.compile` makes of the models' code for fixed
sizes, and `low-memory` liger_ops with the gradient of weight summed in its own dtype, not in
float32. Every provider is first compared with float64, and is not timed where it is wrong. Peak
memory is what forward and backward allocate beyond their inputs. Host is the time that the CPU
takes to issue the calls.
"""

# A provider has the same colour in every plot.
COLOURS = {name: f"C{i}" for i, name in enumerate(PROVIDERS)}


def rates(points: Points) -> str:
    parts = []
    copy, product = points.rate(COPY), points.rate(MATRIX_PRODUCT)
    if copy:
        parts.append(f"copies at {copy:.0f} GB/s")
    if product:
        parts.append(f"multiplies matrices at {product:.0f} TFLOP/s")
    return ", ".join(parts)


def block(points: Points, kernel: str, dtype: str, shape: str) -> str:
    """Format all modes of a workload, in milliseconds and as a share of the device's rate."""
    here = [p for p in points if p.row[:3] == (kernel, dtype, shape)]
    providers = _providers(points, here)
    lines = [f"{kernel} {shape} {dtype}"]
    for name, cells in (("", providers), *_lines(points, kernel, dtype, shape, providers)):
        aligned = (
            cell.rjust(max(CELL_WIDTH, len(provider)))
            for cell, provider in zip(cells, providers, strict=True)
        )
        lines.append((name.ljust(MODE_WIDTH) + " ".join(["", *aligned])).rstrip())
    notes = {f"{p.provider}: {p.note}": None for p in here if p.note}
    return "\n".join([*lines, *(f"  {note}"[:WIDTH] for note in notes)])


def blocks(points: Points) -> str:
    return "\n\n".join(block(points, *workload) for workload in points.workloads())


def summary(points: Points) -> str:
    """Format the device's rates, the lost rows and the failures, one line each. For a simulated
    device, say that nothing is measured, and list the failures."""
    lost = losses(points)
    rows = [row for row in points.rows() if points.value(*row, OURS) is not None]
    if any(point.note == SIMULATED for point in points):
        return "\n".join([SIMULATED, *(f"failed: {text}" for text in failures(points))])
    won = f"{len(rows) - len(lost)} of {len(rows)} fastest or within {NOISE:.0%} of the fastest"
    lines = [*filter(None, [rates(points)]), f"rows: {won}"]
    for (kernel, dtype, shape, mode), text in lost.items():
        lines.append(f"  lost: {kernel} {shape} {dtype} {mode}: {text}")
    return "\n".join([*lines, *(f"  failed: {text}" for text in failures(points))])


def compared(points: Points, earlier: Points) -> str:
    """Format the rows of liger_ops that became faster or slower than in an earlier run."""
    lines = ["against the earlier run:"]
    now_at, then_at = points.rate(COPY), earlier.rate(COPY)
    if now_at and then_at:
        lines.append(f"  copies at {now_at:.0f} GB/s, then at {then_at:.0f}")
    changed, same = changes(points, earlier)
    for (kernel, dtype, shape, mode), (then, now) in changed.items():
        lines.append(
            f"  {'slower' if now > then else 'faster'}: {kernel} {shape} {dtype} {mode}"
            f" {_milliseconds(then)} -> {_milliseconds(now)} ms ({now / then - 1:+.0%})"
        )
    return "\n".join([*lines, f"  {same} rows within {NOISE:.0%}"])


def _providers(points: Points, here: Iterable[Point]) -> list[str]:
    present = {point.provider for point in here}
    return [name for name in points.providers() if name in present]


def _lines(
    points: Points, kernel: str, dtype: str, shape: str, providers: Sequence[str]
) -> Iterator[tuple[str, list[str]]]:
    """Yield the lines of a workload, each a name and a cell per provider."""
    workload = (kernel, dtype, shape)
    for mode in (row[3] for row in points.rows() if row[:3] == workload):
        yield mode, [cell(points, (*workload, mode, name)) for name in providers]
    for (metric, mode), title in OTHERS.items():
        measured = [points.get(*workload, mode, name, metric) for name in providers]
        if any(measured):
            yield title, [_number(point) for point in measured]


def cell(points: Points, key: tuple[str, str, str, str, str]) -> str:
    """Format the time of a row and provider, and its share of the device's rate."""
    share = points.value(*key, "share")
    return _number(points.get(*key)) + ("" if share is None else f" {share:.0f}%")


def _number(point: Point | None) -> str:
    if point is None:
        return "-"
    if point.value is None:
        return "simulated" if point.note == SIMULATED else "failed"
    value = point.value.p50
    return _milliseconds(value) if point.unit == "ms" else f"{value:.0f}"


def _milliseconds(ms: float) -> str:
    """Format a time with four digits, or three after the point: more do not repeat between runs."""
    return f"{ms:.3f}" if ms < 10 else f"{ms:.2f}" if ms < 100 else f"{ms:.1f}"


def write_page(path: Path, points: Points, shared: dict[str, str], plots: Path | None) -> None:
    """Write the figures between the page's two markers, and keep the rest of the page.

    Raises:
        ValueError: the page does not have the markers.
    """
    page = path.read_text() if path.exists() else NEW_PAGE
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{path} has no lines {BEGIN} and {END} for the figures between them")
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = None if plots is None else Path(os.path.relpath(plots, path.parent))
    path.write_text(f"{before}{BEGIN}\n{_figures(points, shared, folder)}{END}{after}")


def _figures(points: Points, shared: dict[str, str], plots: Path | None) -> str:
    facts = points.facts()
    command = facts.pop("command", "")
    packages = ", ".join(f"{name} {version}" for name, version in facts.items())
    lines = [
        *(["```sh", command, "```", ""] if command else []),
        f"{shared['gpu']}, {shared['timestamp']}, liger_ops {shared['version']}, {packages}.",
        f"The device {rates(points) or 'is not measured'}.",
        "",
        HOW,
    ]
    drawn = {row[:2] for row in points.rows("share")}
    for kernel, dtype in dict.fromkeys(workload[:2] for workload in points.workloads()):
        lines += [f"## {kernel}, {dtype}", "", *_table(points, kernel, dtype), ""]
        if plots is not None and (kernel, dtype) in drawn:
            picture = (plots / plot_name(kernel, dtype)).as_posix()
            lines += [f"![{kernel}, {dtype}: share of the device's rate]({picture})", ""]
    lines += ["## The rows we lose", ""]
    lost = losses(points)
    if lost:
        lines += ["| op | shape | dtype | mode | faster |", "|---|---|---|---|---|"]
        lines += [
            f"| {k} | {s} | {d} | {mode} | {text} |" for (k, d, s, mode), text in lost.items()
        ]
    else:
        lines.append(f"None: no provider is faster by more than {NOISE:.0%} in any row.")
    return "\n".join([*lines, ""])


def _table(points: Points, kernel: str, dtype: str) -> list[str]:
    here = [p for p in points if p.row[:2] == (kernel, dtype)]
    providers = _providers(points, here)
    lines = [
        f"| {here[0].dims} | mode | {' | '.join(providers)} |",
        "|" + "---|" * (len(providers) + 2),
    ]
    for workload in points.workloads():
        if workload[:2] == (kernel, dtype):
            for name, cells in _lines(points, *workload, providers):
                title = name if name in OTHERS.values() else f"{name} ms"
                lines.append(f"| {workload[2]} | {title} | {' | '.join(cells)} |")
    notes = {f"- {p.provider} {p.shape} {p.mode}: {p.note}": None for p in here if p.note}
    return [*lines, "", *notes] if notes else lines


def plot_name(kernel: str, dtype: str) -> str:
    return f"{kernel}_{dtype}.png"


def plot(points: Points, folder: Path) -> list[Path]:
    """Plot the share of the device's rate by shape: a file per op and dtype, a panel per mode, a
    line per provider.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    files = []
    rows = points.rows("share")
    for kernel, dtype in dict.fromkeys(row[:2] for row in rows):
        here = [row for row in rows if row[:2] == (kernel, dtype)]
        modes = list(dict.fromkeys(mode for *_, mode in here))
        shapes = sorted({shape for _, _, shape, _ in here}, key=_size)
        figure = Figure(figsize=(4 * len(modes) + 1, 4), layout="tight")
        panels = figure.subplots(1, len(modes), sharey=True, squeeze=False)[0]
        for panel, mode in zip(panels, modes, strict=True):
            _draw(panel, points, kernel, dtype, mode, shapes)
        panels[0].set_ylabel("% of the device's rate")
        panels[-1].legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
        figure.suptitle(f"{kernel}, {dtype}")
        files.append(folder / plot_name(kernel, dtype))
        figure.savefig(files[-1], dpi=100)
    return files


def _draw(
    panel: Any, points: Points, kernel: str, dtype: str, mode: str, shapes: list[str]
) -> None:
    for name in points.providers():
        shares = [points.value(kernel, dtype, shape, mode, name, "share") for shape in shapes]
        if any(share is not None for share in shares):
            values = [math.nan if share is None else share for share in shares]
            panel.plot(range(len(shapes)), values, marker="o", label=name, color=COLOURS[name])
    panel.set_title(mode)
    panel.set_xticks(range(len(shapes)), shapes, rotation=45, ha="right", fontsize="small")
    panel.set_ylim(bottom=0)
    panel.grid(alpha=0.3)


def _size(shape: str) -> tuple[int, int]:
    """Return the sort key of a shape: the width, then the number of elements."""
    sizes = [int(size) for size in shape.split("x")]
    return sizes[-1], math.prod(sizes)
