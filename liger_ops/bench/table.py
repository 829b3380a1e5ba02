"""The figures for a terminal: 80 columns are enough for six providers, the most that an op has."""

from __future__ import annotations

from collections.abc import Sequence

from .points import COPY, MATRIX_PRODUCT, Point, Points
from .providers import OURS
from .verdicts import failures, losses, verdicts

MODE_WIDTH = 10
# "0.326 101%", after a space.
CELL_WIDTH = 10
# (metric, mode) to the line's name, of what stands below the times.
OTHERS = {
    ("memory", "full"): "peak MB",
    ("host", "forward"): "host fwd",
    ("host", "full"): "host us",
    ("graph", "full"): "graph ms",
}
WIDTH = 80


def rates(points: Points) -> str:
    parts = []
    copy, product = points.rate(COPY), points.rate(MATRIX_PRODUCT)
    if copy:
        parts.append(f"copies at {copy:.0f} GB/s")
    if product:
        parts.append(f"multiplies matrices at {product:.0f} TFLOP/s")
    return ", ".join(parts)


def block(points: Points, kernel: str, dtype: str, shape: str) -> str:
    """All modes of a workload: milliseconds, and the share of the device's rate."""
    here = [p for p in points if (p.kernel, p.dtype, p.shape) == (kernel, dtype, shape)]
    modes = list(dict.fromkeys(p.mode for p in here if p.metric == "speed"))
    providers = [name for name in points.providers() if any(p.provider == name for p in here)]
    widths = [max(CELL_WIDTH, len(name)) for name in providers]
    lines = [
        f"{kernel} {shape} {dtype}",
        _line("", [name.rjust(w) for name, w in zip(providers, widths, strict=True)]),
    ]
    for mode in modes:
        cells = [cell(points, kernel, dtype, shape, mode, name) for name in providers]
        lines.append(_line(mode, [c.rjust(w) for c, w in zip(cells, widths, strict=True)]))
    for (metric, mode), name in OTHERS.items():
        found = [points.get(kernel, dtype, shape, mode, p, metric) for p in providers]
        if any(found):
            cells = [number(point) for point in found]
            lines.append(_line(name, [c.rjust(w) for c, w in zip(cells, widths, strict=True)]))
    for verdict in verdicts(points):
        if (verdict.kernel, verdict.dtype, verdict.shape) == (kernel, dtype, shape):
            lines.append(f"  {'met' if verdict.met else 'MISSED'}: {verdict.mode} {verdict.text}")
    notes = {f"{p.provider}: {p.note}": None for p in here if p.note}
    lines += [f"  {note}"[:WIDTH] for note in notes]
    return "\n".join(lines)


def _line(head: str, cells: Sequence[str]) -> str:
    return (head.ljust(MODE_WIDTH) + " ".join(["", *cells])).rstrip()


def cell(points: Points, kernel: str, dtype: str, shape: str, mode: str, provider: str) -> str:
    ms = points.value(kernel, dtype, shape, mode, provider)
    if ms is None:
        point = points.get(kernel, dtype, shape, mode, provider)
        return "-" if point is None else "failed"
    share = points.value(kernel, dtype, shape, mode, provider, "share")
    return milliseconds(ms) + ("" if share is None else f" {share:.0f}%")


def milliseconds(ms: float) -> str:
    """Four digits, or three behind the point: what repeats from run to run."""
    return f"{ms:.3f}" if ms < 10 else f"{ms:.2f}" if ms < 100 else f"{ms:.1f}"


def number(point: Point | None) -> str:
    if point is None:
        return "-"
    if point.value is None:
        return "failed"
    return milliseconds(point.value.p50) if point.unit == "ms" else f"{point.value.p50:.0f}"


def blocks(points: Points) -> str:
    workloads = dict.fromkeys((k, d, s) for k, d, s, _ in points.rows())
    return "\n\n".join(block(points, *workload) for workload in workloads)


def summary(points: Points) -> str:
    """The targets and the rows that are lost, one line each."""
    judged = verdicts(points)
    missed = [v for v in judged if not v.met]
    lost = losses(points)
    lines = [rates(points)] if rates(points) else []
    if judged:
        lines.append(f"targets: {len(judged) - len(missed)} of {len(judged)} met")
    lines += [f"  missed: {v.kernel} {v.shape} {v.mode} {v.text}" for v in missed]
    rows = [row for row in points.rows() if points.value(*row, OURS) is not None]
    lines.append(
        f"rows: {len(rows) - len(lost)} of {len(rows)} fastest or within 3% of the fastest"
    )
    lines += [f"  lost: {x.kernel} {x.shape} {x.dtype} {x.mode}: {x.text}" for x in lost]
    lines += [f"  failed: {text}" for text in failures(points)]
    return "\n".join(lines)
