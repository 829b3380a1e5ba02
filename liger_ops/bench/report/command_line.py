"""The command line of the report."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..command_line import Parser
from ..providers import one_line
from ..steps.model import FreshProcess, FreshStep, lacks, wait_to_be_called
from ..steps.models import TEXT
from . import page
from .measured import measured
from .plan import (
    ON_A_CPU,
    PARTS,
    Measurement,
    Record,
    commit_here,
    device_name,
    is_cpu,
    load,
    plan,
    quick_plan,
    record,
    store,
)

DESCRIPTION = """\
Measure this machine's GPU within an hour, and write one page about it: training steps of ten
families beside eager, torch.compile and Liger-Kernel, where it is installed; loss curves on
Milton's Paradise Lost; heads; kernels. Each measurement runs in a process of its own and is stored
as a file of --records as soon as it is made. A run that was interrupted goes on where it stopped,
on another machine with the same GPU too, if the folder is copied there.
"""
EXAMPLES = """\
examples:
  python -m liger_ops.bench report                            an hour, then docs/reports/<gpu>.md
  python -m liger_ops.bench report --only steps --minutes 8   a part of it
  python -m liger_ops.bench report --records DIR --minutes 0  the page from what is there
  python -m liger_ops.bench report --quick                    every part at tiny sizes, on a CPU too

exit status: 0; 1 where liger_ops itself failed in a measurement; 2 where nothing could be run
"""
# A measurement that takes longer is stopped.
SECONDS = 300.0
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def main(arguments: Sequence[str]) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.one:
        wait_to_be_called()
        planned = quick_plan(torch.cuda.is_available()) if options.quick else plan()
        for measurement in planned:
            if measurement.name in options.one:
                _in_this_process(measurement, options.records, options.commit or commit_here())
        return 0
    try:
        return _report(options, parser.prog)
    except (ValueError, ImportError, OSError) as error:
        parser.error(str(error))


def _parser() -> Parser:
    parser = Parser(
        prog="python -m liger_ops.bench report",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", default=",".join(PARTS), help="some of %(default)s")
    parser.add_argument("--quick", action="store_true", help="every part at tiny sizes")
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="begin no measurement later; %(default)s"
    )
    parser.add_argument("--records", type=Path, help="default: runs/report-<gpu>")
    parser.add_argument("--page", type=Path, help="default: docs/reports/<gpu>.md")
    parser.add_argument("--retry", action="store_true", help="measure again what failed")
    parser.add_argument("--commit", help="what is measured, where git cannot say it")
    parser.add_argument("--one", nargs="+", help=argparse.SUPPRESS)
    return parser


def _report(options: argparse.Namespace, program: str) -> int:
    parts = [part for part in options.only.split(",") if part]
    for part in parts:
        if part not in PARTS:
            raise ValueError(f"part {part!r} is none of {', '.join(PARTS)}")
    measures, here = options.minutes > 0, device_name()
    if measures and is_cpu(here) and not options.quick:
        raise ValueError("PyTorch finds no GPU on this machine; --quick tries every part on a CPU")
    if not measures and options.records is None:
        raise ValueError("--minutes 0 needs --records, the folder of an earlier run")
    quick = "quick-" if options.quick else ""
    folder = options.records or Path("runs") / f"report-{quick}{page.slug(here)}"
    folder.mkdir(parents=True, exist_ok=True)
    records = load(folder)
    device = next((found.device for found in records.values()), here)
    if measures and device != here:
        raise ValueError(f"{folder} holds records of {device}, and this is {here}")
    planned = quick_plan(not is_cpu(device)) if options.quick else plan()
    if measures:
        wanted = [measurement for measurement in planned if measurement.part in parts]
        run = _Measuring(folder, records, options.commit or commit_here(), options.retry)
        try:
            run.all(wanted, 60 * options.minutes)
        except KeyboardInterrupt:
            _say("interrupted; the same command goes on")
        records = load(folder)
    if not records:
        raise ValueError(f"{folder} holds no records")
    name = f"{page.slug(device)}.md"
    file = options.page or (folder / name if options.quick else Path("docs/reports") / name)
    failed = page.write(file, planned, records, _command(options))
    _say(f"wrote {file}, from the records in {folder}")
    for text in failed:
        print(f"{program}: {text}", file=sys.stderr)
    return 1 if failed else 0


def _command(options: argparse.Namespace) -> str:
    return "python -m liger_ops.bench report" + (" --quick" if options.quick else "")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class _Measuring:
    """A run that measures what has no record."""

    def __init__(self, folder: Path, records: dict[str, Record], commit: str, retry: bool) -> None:
        self.folder, self.commit = folder, commit
        self.done = {name for name, found in records.items() if not (retry and found.error)}
        self.on_cpu = is_cpu(device_name())
        self.lacking = lacks("liger-kernel", not self.on_cpu)

    def all(self, wanted: Sequence[Measurement], seconds: float) -> None:
        if self.lacking:
            _say(f"liger-kernel {self.lacking}: it is not measured")
            wanted = [one for one in wanted if one.words[-1] != "liger-kernel"]
        began, left = time.perf_counter(), [one for one in wanted if one.name not in self.done]
        _say(f"{len(wanted)} measurements, {len(wanted) - len(left)} of them made earlier")
        process = ahead = None
        try:
            while left:
                spent = time.perf_counter() - began
                if spent > seconds:
                    _say(
                        f"{spent / 60:.1f} min: the time is over, {len(left)} measurements are left"
                    )
                    return
                number = len(wanted) - len(left) + 1
                _say(f"[{number}/{len(wanted)}] {spent:4.0f} s  {left[0]} ...")
                process = ahead or self._process(left)
                left = left[len(process.batch) :]
                # It imports while this one is measured.
                ahead = self._process(left) if left else None
                done = process.records()
                for found in done:
                    _say(f"          {page.told(found)}")
                names = {one.name for one in done}
                if undone := [one for one in process.batch if one.name not in names]:
                    left = undone + left
                    if ahead is not None:
                        ahead.end()
                        ahead = None
        finally:
            for one in (process, ahead):
                if one is not None:
                    one.end()

    def _process(self, left: Sequence[Measurement]) -> _Process:
        return (_StepProcess if left[0].part == "steps" else _OtherProcess)(self, left)


class _Process:
    """A process that makes the first of the measurements that are left."""

    batch: list[Measurement]
    process: FreshProcess

    def __init__(self, run: _Measuring) -> None:
        self.run = run

    def records(self) -> list[Record]:
        """Measure, store the records and return them."""
        raise NotImplementedError

    def end(self) -> None:
        self.process.end()


class _StepProcess(_Process):
    """Steps. Without a mask the compilation, which is timed, finds empty caches; the other batches
    find those of the same model."""

    def __init__(self, run: _Measuring, left: Sequence[Measurement]) -> None:
        super().__init__(run)
        self.batch = [left[0]]
        shape, batch, way = left[0].words
        rows, length = TEXT[shape][3]
        step = argparse.Namespace(
            shape=shape, batch=batch, batch_size=rows, sequence_length=length, layers=None,
            steps=2 if left[0].quick else 20, autocast=False, checkpoint=False,
        )  # fmt: skip
        caches = Path(tempfile.gettempdir()) / "liger_ops_report" / f"{shape}-{way}"
        if batch == "none":
            shutil.rmtree(caches, ignore_errors=True)
        folders = {name: str(caches / name.lower()) for name in CACHES}
        self.process: FreshStep = FreshStep(way, step, {**os.environ, **folders})

    def records(self) -> list[Record]:
        began = time.perf_counter()
        outcome = self.process.measured(SECONDS)
        if self.run.on_cpu and "error" not in outcome:
            outcome = {"losses": outcome["losses"], "note": ON_A_CPU}
        seconds = 0.0 if self.run.on_cpu else time.perf_counter() - began
        found = record(self.batch[0], outcome, seconds, self.run.commit)
        store(self.run.folder, found)
        return [found]


class _OtherProcess(_Process):
    """Heads, kernels and curves. In a quick run, where most of the time is the start of a process,
    one measures all of them."""

    def __init__(self, run: _Measuring, left: Sequence[Measurement]) -> None:
        super().__init__(run)
        count = next((i for i, one in enumerate(left) if one.part == "steps"), len(left))
        self.batch = list(left[: count if left[0].quick else 1])
        names = [one.name for one in self.batch]
        arguments = ["liger_ops.bench", "report", "--one", *names, "--records", str(run.folder)]
        arguments += ["--quick"] if left[0].quick else []
        arguments += ["--commit", run.commit] if run.commit else []
        self.process = FreshProcess(arguments)

    def records(self) -> list[Record]:
        folder = self.run.folder
        for one in self.batch:
            (folder / f"{one.name}.json").unlink(missing_ok=True)
        began = time.perf_counter()
        outcome = self.process.outcome(SECONDS)
        seconds = 0.0 if self.run.on_cpu else time.perf_counter() - began
        stored = load(folder)
        done = [stored[one.name] for one in self.batch if one.name in stored]
        if len(done) < len(self.batch):
            # The process ended in the first measurement without a record, and before the others.
            first = next(one for one in self.batch if one.name not in stored)
            why = outcome if isinstance(outcome, dict) else {"error": "it left no record"}
            failed = record(first, why, seconds, self.run.commit)
            store(folder, failed)
            done.append(failed)
        return done


def _in_this_process(measurement: Measurement, folder: Path, commit: str) -> None:
    began = time.perf_counter()
    try:
        outcome: dict[str, Any] = measured(measurement)
    except Exception as error:
        outcome = {"error": one_line(error)}
    seconds = time.perf_counter() - began if torch.cuda.is_available() else 0.0
    store(folder, record(measurement, outcome, seconds, commit))
