"""The page of a run: docs/benchmarks.md, whose figures are written here and whose prose is not."""

from __future__ import annotations

import os
from pathlib import Path

from . import plotting
from .points import Points
from .table import OTHERS, cell, number, rates
from .targets import BEHIND
from .verdicts import Verdict, losses, verdicts

BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
NEW_PAGE = f"""# Benchmarks

{BEGIN}
{END}
"""
HOW = """\
Times are of the device, by its events, in milliseconds: the median, the cache flushed before every
call, the providers in turn. Beside them is the share of the rate at which the same device copied
memory in the same run, counted from the fewest bytes that the op must move, or of the rate at which
it multiplied matrices, from the fewest operations. More than 100% is possible: a copy is not the
fastest that there is. `forward` records the gradient, as in training. `eager` is the code that
models contain, `aten` the fused op that PyTorch has, `inductor` what `torch.compile` makes of that
code for fixed sizes; `low-memory` is liger_ops with the gradient of weight summed in its own dtype,
not in float32. Every provider is first compared with float64, and not timed where it is wrong. Peak
memory is what a forward and its backward allocate beyond their inputs, and host the time that the
host takes to issue them.
"""


def write(path: Path, points: Points, shared: dict[str, str], plots: Path | None) -> None:
    """Put the figures between the page's two markers, and leave the rest of it as it is.

    Raises:
        ValueError: the page has no such markers.
    """
    page = path.read_text() if path.exists() else NEW_PAGE
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{path} has no lines {BEGIN} and {END} for the figures between them")
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = None if plots is None else Path(os.path.relpath(plots, path.parent))
    path.write_text(f"{before}{BEGIN}\n{figures(points, shared, folder)}{END}{after}")


def figures(points: Points, shared: dict[str, str], plots: Path | None) -> str:
    facts = points.facts()
    command = facts.pop("command", "")
    lines = [
        *(["```sh", command, "```", ""] if command else []),
        f"{shared['gpu']}, {shared['timestamp']}, liger_ops {shared['version']}, "
        + ", ".join(f"{name} {version}" for name, version in facts.items())
        + ".",
        f"The device {rates(points)}.",
        "",
        HOW,
    ]
    workloads = list(dict.fromkeys((k, d, s) for k, d, s, _ in points.rows()))
    for kernel, dtype in dict.fromkeys((k, d) for k, d, _ in workloads):
        shapes = [s for k, d, s in workloads if (k, d) == (kernel, dtype)]
        lines += [f"## {kernel}, {dtype}", "", *_table(points, kernel, dtype, shapes), ""]
        if plots is not None and any(row[:2] == (kernel, dtype) for row in points.rows("share")):
            picture = (plots / plotting.file_name(kernel, dtype)).as_posix()
            lines += [f"![{kernel}, {dtype}: share of the device's rate]({picture})", ""]
    lines += _lost(points)
    return "\n".join(lines)


def _table(points: Points, kernel: str, dtype: str, shapes: list[str]) -> list[str]:
    here = [p for p in points if (p.kernel, p.dtype) == (kernel, dtype)]
    providers = [n for n in points.providers() if any(p.provider == n for p in here)]
    dims = here[0].dims
    judged = {(v.kernel, v.shape, v.mode): v for v in verdicts(points) if v.dtype == dtype}
    lines = [
        f"| {dims} | mode | {' | '.join(providers)} | target |",
        "|" + "---|" * (len(providers) + 3),
    ]
    for shape in shapes:
        for mode in dict.fromkeys(p.mode for p in here if (p.shape, p.metric) == (shape, "speed")):
            cells = [cell(points, kernel, dtype, shape, mode, name) for name in providers]
            verdict = judged.get((kernel, shape, mode))
            lines.append(_row(shape, f"{mode} ms", cells, verdict))
        for (metric, mode), name in OTHERS.items():
            found = [points.get(kernel, dtype, shape, mode, p, metric) for p in providers]
            if any(found):
                verdict = judged.get((kernel, shape, metric)) if mode == "full" else None
                lines.append(_row(shape, name, [number(point) for point in found], verdict))
    notes = {f"{p.provider} {p.shape} {p.mode}: {p.note}": None for p in here if p.note}
    return [*lines, "", *(f"- {note}" for note in notes)] if notes else lines


def _row(shape: str, mode: str, cells: list[str], verdict: Verdict | None) -> str:
    judged = ""
    if verdict is not None:
        judged = f"{verdict.text}, {'met' if verdict.met else '**missed**'}"
    return f"| {shape} | {mode} | {' | '.join(cells)} | {judged} |"


def _lost(points: Points) -> list[str]:
    lost = losses(points)
    lines = ["## The rows we lose", ""]
    if not lost:
        return [*lines, f"None: no provider is faster by more than {BEHIND:.0%} in any row.", ""]
    lines += ["| op | shape | dtype | mode | faster |", "|---|---|---|---|---|"]
    lines += [f"| {x.kernel} | {x.shape} | {x.dtype} | {x.mode} | {x.text} |" for x in lost]
    return [*lines, ""]
