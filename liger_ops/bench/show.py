"""Show the results of a run as a table for the terminal, a page, and plots."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from .judge import COPY, MATRIX_PRODUCT, NOISE, SIMULATED, Point, Points, changes, failures, losses
from .providers import OURS, PROVIDERS

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
        yield mode, [_cell(points, (*workload, mode, name)) for name in providers]
    for (metric, mode), title in OTHERS.items():
        measured = [points.get(*workload, mode, name, metric) for name in providers]
        if any(measured):
            yield title, [_number(point) for point in measured]


def _cell(points: Points, key: tuple[str, str, str, str, str]) -> str:
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
