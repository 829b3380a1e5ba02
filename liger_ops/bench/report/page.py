"""Write the page of a report and its plots, from records alone."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from .. import records as files
from ..providers import LOW_MEMORY, OURS
from ..show import SIMULATED, Points, cell, losses, rates
from ..steps.model import LOSS_BOUND, WARM_UP, differs
from ..steps.models import TEXT
from .plan import (
    CURVE_WAYS,
    ON_A_CPU,
    Measurement,
    Record,
    batches_of,
    is_cpu,
)
from .plots import curve_plots, step_plot

# Way -> how it is called in tables. All but PEERS are liger_ops'.
TITLES = {
    "eager": "eager", "compile": "`torch.compile`", "liger-kernel": "Liger-Kernel, eager",
    "liger": '`backend="liger"`', "enabled": "`enable()`, `torch.compile`",
    "fused": "`fuse`, eager", "fused-compile": "`fuse`, `torch.compile`",
    "hub": "hub kernels, `torch.compile`",
}  # fmt: skip
PEERS = ("eager", "compile", "liger-kernel")
BATCHES = {
    "none": "No mask", "ones": "A mask of ones", "padded": "A quarter of padding",
    "packed": "Four packed documents in a row",
}  # fmt: skip
CURVES = {
    "float32": "untouched, float32", "bfloat16": "untouched, bfloat16", "fused": "`fuse`, bfloat16",
    "liger": '`backend="liger"`, bfloat16',
}  # fmt: skip
# Losses are averaged over so many steps.
SMOOTHED = 20
STEPS_ARE = f"""\
Models of transformers with random weights, in bfloat16; a step is forward, backward and fused
AdamW. Each figure is the median of consecutive steps, with the 20th and 80th percentile, and the
peak of the memory that PyTorch's allocator hands out. Each model and way has a process of its own,
and another for the three batches with a mask, one after another, each with a new model and a new
compilation; another process may compile meanwhile, and waits for its turn on the GPU. A way is not
given a time if one of its first {WARM_UP} losses differs from those of the untouched model, eager
or else compiled, by more than {LOSS_BOUND}. Only the loss is asked of the compiled function.
`python -m liger_ops.bench.steps.model --shape NAME --batch KIND WAY` measures one figure."""
CURVES_ARE = """\
Four small models, with random weights and bytes as tokens, are trained on *Paradise Lost* by John
Milton (1667), which is in the public domain and part of the package
(`liger_ops/bench/report/paradise_lost.txt`). All ways begin with the same weights and see the same
batches; the optimizer, AdamW, keeps float32 parameters. Every figure is of losses smoothed by a
running mean of {smoothed} steps. The difference of the untouched model in bfloat16 from the
untouched one in float32 is what rounding does to this training; that of `fuse` and of the backend
is to be read beside it."""
OPS_ARE = """\
In bfloat16, on random inputs. Milliseconds by the device's events, forward and backward together
unless the row says otherwise, with the cache flushed before each call and the providers in turns.
The percentage is of the device's rate of copies, or of products for heads. MB are the peak memory
beyond the inputs. `eager` is the code in models, `aten` PyTorch's fused op, `inductor`
`torch.compile` of the models' code. A provider is compared with float64 first, and not timed where
it is wrong. `python -m liger_ops.bench --ops OP --shapes SHAPE` measures all modes of an op."""

Records = Mapping[str, Record]
Differences = dict[str, tuple[float, float]]


def slug(device: str) -> str:
    """Return the name of a device's page: "h200" of "NVIDIA H200"."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower().replace("nvidia", "")).strip("-")


def told(record: Record) -> str:
    """Say in one line what came of a measurement."""
    result = record.result
    if record.error:
        return f"failed: {record.error}"
    if "ms" in result:
        warm = f"{result['warm_up_s']:.0f} s, then "
        return f"{warm}{result['ms']:.1f} ms, {result['gib']:.3g} GiB; {record.seconds:.0f} s"
    if "losses" in result:
        note = result.get("note", f"{record.seconds:.0f} s")
        return f"loss {result['losses'][0]:.3f} to {result['losses'][-1]:.3f}; {note}"
    return ON_A_CPU if is_cpu(record.device) else f"{record.seconds:.0f} s"


def write(file: Path, planned: Sequence[Measurement], records: Records, command: str) -> list[str]:
    """Write the page and its plots. Return a line for each failure of liger_ops itself."""
    page = _Page(planned, {one.name: records[one.name] for one in planned if one.name in records})
    file.parent.mkdir(parents=True, exist_ok=True)
    plots = file.parent / "plots"
    head = page.head(command, f"{file.stem}.jsonl")
    sections = [*page.steps(file.stem, plots), *page.curves(file.stem, plots), *page.ops()]
    text = "\n".join([*head, *sections, *page.rest()])
    file.write_text(text.rstrip() + "\n")
    return page.ours_failed


class _Page:
    def __init__(self, planned: Sequence[Measurement], records: Records) -> None:
        self.planned, self.records = planned, records
        self.quick = planned[0].quick
        self.device = next(iter(records.values())).device
        self.made = [one for one in planned if one.name in records]
        # What is not a figure, and why: a line each.
        self.notes: list[str] = []
        self.ours_failed: list[str] = []

    def _failed(self, what: str, why: str, ours: bool) -> None:
        self.notes.append(f"- {what}: {why}")
        if ours:
            self.ours_failed.append(f"{what}: {why}")

    def head(self, command: str, data: str) -> list[str]:
        found = list(self.records.values())
        versions: dict[str, set[str]] = {}
        for record in found:
            for package, version in record.versions.items():
                versions.setdefault(package, set()).add(version)
        packages = ", ".join(f"{name} {' and '.join(sorted(v))}" for name, v in versions.items())
        times = sorted(record.at for record in found)
        sources = Counter(
            f"commit {record.commit}" if record.commit else f"sources {record.sources}"
            for record in found
        )
        (main, _), *others = sources.most_common()
        also = ", ".join(f"{count} at {source}" for source, count in others)
        changed = " A + behind a commit means that files were changed."
        lines = [
            f"# {self.device}" + (", a quick trial" if self.quick else ""),
            "",
            "```sh",
            command,
            "```",
            "",
            f"{self.device}, {times[0]} to {times[-1]}. {packages}.",
            f"Measured at {main}" + (f", but {also}." if also else "."),
        ]
        if any("+" in source for source in sources):
            lines[-1] += changed
        if self.quick:
            lines += ["Tiny sizes try every part of the command: no figure here says anything."]
        if is_cpu(self.device):
            lines += [f"Times and memory are {ON_A_CPU}."]
        else:
            minutes = sum(record.seconds for record in found) / 60
            lines += [f"The {len(found)} measurements took {minutes:.0f} minutes of one GPU."]
        lines += [f"[{data}]({data}) has all that was measured, and the commit of each."]
        if "liger-kernel" not in versions:
            lines += ["Liger-Kernel was not installed, so that no figure of it is here."]
        return [*lines, ""]

    def steps(self, stem: str, plots: Path) -> list[str]:
        made = [one for one in self.made if one.part == "steps"]
        if not made:
            return []
        shapes = list(dict.fromkeys(one.words[0] for one in self.planned if one.part == "steps"))
        lines = ["## Training steps", "", STEPS_ARE, ""]
        shown: dict[tuple[str, str], dict[str, Any]] = {}
        for batch in batches_of(dict(self.records), shapes, self.quick):
            here = [one for one in made if one.words[1] == batch]
            ways = [way for way in TITLES if any(one.words[2] == way for one in here)]
            rows, seconds = [], []
            for shape in dict.fromkeys(one.words[0] for one in here):
                of_way = {
                    one.words[2]: self.records[one.name] for one in here if one.words[0] == shape
                }
                cells = {way: self._step(shape, batch, way, of_way) for way in ways}
                rows.append([_model(shape), *cells.values()])
                good = {way: of_way[way].result for way in ways if _is_time(cells[way])}
                shown[shape, batch] = good
                seconds.append(
                    [
                        _model(shape),
                        *(f"{good[w]['warm_up_s']:.0f}" if w in good else "" for w in ways),
                    ]
                )
            header = ["model", *(TITLES[way] for way in ways)]
            lines += [f"### {BATCHES[batch]}", "", *_table(header, rows), ""]
            if batch == "none" and not is_cpu(self.device):
                about = (
                    f"Seconds of the first {WARM_UP} steps, with the compilation, in empty caches:"
                )
                lines += [about, "", *_table(header, seconds), ""]
        return [*lines, *step_plot(plots, stem, shown)]

    def _step(self, shape: str, batch: str, way: str, of_way: Mapping[str, Record]) -> str:
        """Return the cell of a way."""
        record = of_way.get(way)
        if record is None:
            return ""
        what, ours = f"step of {shape}, {batch}, {way}", way not in PEERS
        if record.error:
            self._failed(what, record.error, ours)
            return "failed"
        untouched = [of_way[name] for name in ("eager", "compile") if name in of_way]
        first = next((found for found in untouched if not found.error), None)
        if first is not None and differs(record.result, first.result):
            self._failed(
                what, f"losses {record.result['losses']}, not {first.result['losses']}", ours
            )
            return "other losses"
        if "ms" not in record.result:
            return ON_A_CPU
        result = record.result
        spread = f"({result['ms_20']:.1f} to {result['ms_80']:.1f})"
        unchecked = "" if first is not None else ", losses not compared"
        return f"{result['ms']:.1f} ms {spread}, {result['gib']:.1f} GiB{unchecked}"

    def curves(self, stem: str, plots: Path) -> list[str]:
        made = [one for one in self.made if one.part == "curves"]
        if not made:
            return []
        lines = ["## Loss curves", "", CURVES_ARE.format(smoothed=SMOOTHED), ""]
        rows, drawn = [], {}
        for shape in dict.fromkeys(one.words[0] for one in made):
            smooth: dict[str, list[float]] = {}
            for one in made:
                if one.words[0] != shape:
                    continue
                record, way = self.records[one.name], one.words[1]
                if record.error:
                    ours = way not in CURVE_WAYS[:2]
                    self._failed(f"curve of {shape}, {way}", record.error, ours)
                else:
                    smooth[way] = _smoothed(record.result["losses"])
            for way, curve in smooth.items():
                apart = [_apart(smooth, way, other) for other in CURVE_WAYS[:2]]
                ends = [f"{curve[i]:.4f}" for i in (0, -1)]
                rows.append([_model(shape), CURVES[way], *ends, *apart])
            if smooth:
                drawn[shape] = smooth
        sizes = {tuple(r.result["size"]) for r in self._of(made) if "size" in r.result}
        for steps, batch_rows, length in sorted(sizes):
            lines += [f"{steps} steps of {batch_rows} x {length} bytes.", ""]
        header = ["model", "trained", "first loss", "last loss"]
        header += ["largest difference from float32", "from untouched bfloat16"]
        lines += [*_table(header, rows), ""]
        return [*lines, *curve_plots(plots, stem, drawn)]

    def _of(self, made: Iterable[Measurement]) -> list[Record]:
        return [self.records[one.name] for one in made]

    def ops(self) -> list[str]:
        lines: list[str] = []
        everything = Points()
        for part in ("heads", "kernels"):
            made = [one for one in self.made if one.part == part]
            if not made:
                continue
            points = Points()
            missing: dict[str, str] = {}
            for one in made:
                record = self.records[one.name]
                if record.error:
                    self._failed(f"{part}, {one.words[0]}", record.error, True)
                    continue
                for text in record.result["lost"]:
                    self._failed(f"{part}, {one.words[0]}", text, True)
                points.add(files.points_of(record.result["points"]))
                missing |= record.result["missing"]
            everything.add(points)
            lines += [f"## {part.capitalize()}", "", *([] if lines else [OPS_ARE, ""])]
            lines += [f"The device {rates(points)}.", ""] if rates(points) else []
            lines += [*self._ops(points), ""]
            lines += [f"No {peer}: {reason}" for peer, reason in missing.items()]
            lines += [""] if missing else []
        lost = losses(everything)
        if lines and not is_cpu(self.device):
            total = len(
                [row for row in everything.rows() if everything.value(*row, OURS) is not None]
            )
            lines += ["### Where another provider is faster", ""]
            lines += [f"{len(lost)} of {total} rows, all modes counted, by more than 3%:", ""]
            lines += [
                f"- {op} {shape}, {mode}: {text}" for (op, _, shape, mode), text in lost.items()
            ]
            lines += [""]
        return lines

    def _ops(self, points: Points) -> list[str]:
        providers = points.providers()
        rows = []
        for workload in points.workloads():
            modes = [row[3] for row in points.rows() if row[:3] == workload]
            mode = "full" if "full" in modes else modes[0]
            what = f"`{workload[0]}` {workload[2]}" + ("" if mode == "full" else f", {mode}")
            cells = [cell(points, (*workload, mode, name)) for name in providers]
            rows.append([what, "ms", *(ON_A_CPU if c == "simulated" else c for c in cells)])
            memory = [points.value(*workload, "full", name, "memory") for name in providers]
            if any(value is not None for value in memory):
                rows.append(["", "MB", *("" if v is None else f"{v:.0f}" for v in memory)])
            for name in providers:
                point = points.get(*workload, mode, name)
                if point is not None and point.note not in ("", SIMULATED):
                    self._failed(f"{what}, {name}", point.note, name in (OURS, LOW_MEMORY))
        return _table(["op and shape", "", *providers], rows)

    def rest(self) -> list[str]:
        lines = []
        if self.notes:
            lines += ["## What failed", "", *dict.fromkeys(self.notes), ""]
        left = [one for one in self.planned if one.name not in self.records]
        if left:
            lines += [
                "## Not measured",
                "",
                f"{len(left)} of {len(self.planned)} measurements:",
                "",
            ]
            groups: dict[str, list[str]] = {}
            for one in left:
                key = " ".join((one.part, *one.words[:-1])) if one.part != "kernels" else "kernels"
                groups.setdefault(key, []).append(one.words[0 if one.part == "kernels" else -1])
            lines += [f"- {key}: {', '.join(words)}" for key, words in groups.items()]
        return lines


def _model(shape: str) -> str:
    return f"{TEXT[shape][0]} (`{shape}`)"


def _is_time(cell: str) -> bool:
    return " ms " in cell


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return [f"| {' | '.join(cells)} |" for cells in lines]


def _smoothed(values: Sequence[float]) -> list[float]:
    """Return the running means of SMOOTHED values, or of half of them if there are few."""
    window = min(SMOOTHED, max(len(values) // 2, 1))
    sums = [0.0, *accumulate(values)]
    return [(sums[i + window] - sums[i]) / window for i in range(len(values) - window + 1)]


def _apart(curves: Mapping[str, Sequence[float]], way: str, other: str) -> str:
    """Return the largest difference of two ways' curves, or nothing if there is none to tell."""
    if other not in curves or CURVE_WAYS.index(way) <= CURVE_WAYS.index(other):
        return ""
    # A NaN is the largest of all.
    pairs = zip(curves[way], curves[other], strict=True)
    return f"{max((abs(a - b) for a, b in pairs), key=_rank):.1e}"


def _rank(value: float) -> float:
    return float("inf") if value != value else value
