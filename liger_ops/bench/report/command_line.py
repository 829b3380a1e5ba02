"""The command line of the report."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch

from ..command_line import Parser
from ..providers import one_line
from ..steps.model import NEEDS, FreshProcess, lacks
from . import page
from .measured import measured, prepare
from .plan import (
    PARTS,
    Measurement,
    Record,
    commit_here,
    device_name,
    is_cpu,
    load,
    plan,
    quick_plan,
    read,
    read_all,
    record,
    save_all,
    store,
)
from .turns import HAS_TURNS, Turn

DESCRIPTION = """\
Measure this machine's GPU within an hour, and write one page about it: training steps of ten
families beside eager, torch.compile and Liger-Kernel, where it is installed; loss curves on
Milton's Paradise Lost; heads; kernels. Each model and way, and each op, has a process of its own,
and each measurement is stored as a file of --records as soon as it is made. A run that was
interrupted goes on where it stopped, on another machine with the same GPU too, if the folder is
copied there. All records are written to a file beside the page, too, from which --take reads them.
"""
EXAMPLES = """\
examples:
  python -m liger_ops.bench report                            an hour, then docs/reports/<gpu>.md
  python -m liger_ops.bench report --only steps --minutes 8   a part of it
  python -m liger_ops.bench report --gpus 4                   the same on four GPUs at once
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
        planned = quick_plan(torch.cuda.is_available()) if options.quick else plan()
        here = [measurement for measurement in planned if measurement.name in options.one]
        prepare(here[0])
        turn = Turn(options.turn) if options.turn else None
        for measurement in here:
            with turn or nullcontext():
                outcome, seconds = _outcome(measurement, turn.clock if turn else time.perf_counter)
            commit = options.commit or commit_here()
            store(options.records, record(measurement, outcome, seconds, commit))
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
    parser.add_argument(
        "--gpus", type=int, default=1, help="measure on so many at once; %(default)s"
    )
    parser.add_argument("--records", type=Path, help="default: runs/report-<gpu>")
    parser.add_argument("--take", type=Path, metavar="FILE", help="first take a page's records")
    parser.add_argument("--page", type=Path, help="default: docs/reports/<gpu>.md")
    parser.add_argument("--retry", action="store_true", help="measure again what failed")
    parser.add_argument("--commit", help="what is measured, where git cannot say it")
    parser.add_argument("--one", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--turn", type=Path, help=argparse.SUPPRESS)
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
    if options.take:
        for found in read_all(options.take):
            if not (folder / f"{found.name}.json").exists():
                store(folder, found)
    records = load(folder)
    device = next((found.device for found in records.values()), here)
    if measures and device != here:
        raise ValueError(f"{folder} holds records of {device}, and this is {here}")
    planned = quick_plan(not is_cpu(device)) if options.quick else plan()
    if measures:
        wanted = [measurement for measurement in planned if measurement.part in parts]
        run = _Measuring(folder, records, options.commit or commit_here(), options.retry)
        try:
            run.all(wanted, 60 * options.minutes, _gpus(options.gpus))
        except KeyboardInterrupt:
            _say("interrupted; the same command goes on")
        records = load(folder)
    if not records:
        raise ValueError(f"{folder} holds no records")
    name = f"{page.slug(device)}.md"
    file = options.page or (folder / name if options.quick else Path("docs/reports") / name)
    failed = page.write(file, planned, records, _command(options))
    save_all(file.with_suffix(".jsonl"), records)
    _say(f"wrote {file}, from the records in {folder}, and beside it those records")
    for text in failed:
        print(f"{program}: {text}", file=sys.stderr)
    return 1 if failed else 0


def _gpus(count: int) -> list[str]:
    """Return what CUDA_VISIBLE_DEVICES is in the processes of each GPU."""
    there = torch.cuda.device_count() if torch.cuda.is_available() else 1
    if not 0 < count <= there:
        raise ValueError(f"--gpus {count}: {there} {'is' if there == 1 else 'are'} here")
    if count == 1:
        return [os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(there)))
    return visible.split(",")[:count]


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
        self.is_over = False
        # The processes of a GPU: one is measured, or trains, while another compiles.
        self.workers = 2 if HAS_TURNS and not self.on_cpu else 1
        # What failed for want of memory beside another process.
        self.alone: list[Measurement] = []
        self.lock = threading.Lock()
        self.processes: set[_Process] = set()
        self.caches = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)

    def all(self, wanted: Sequence[Measurement], seconds: float, gpus: Sequence[str]) -> None:
        for way, package in NEEDS.items():
            of_way = [one for one in wanted if one.words[-1] == way]
            if of_way and (lacking := lacks(package, not self.on_cpu)):
                _say(f"{package} {lacking}: it is not measured")
                wanted = [one for one in wanted if one not in of_way]
        self.left = [one for one in wanted if one.name not in self.done]
        self.began, self.seconds, self.total = time.perf_counter(), seconds, len(wanted)
        _say(f"{len(wanted)} measurements, {len(wanted) - len(self.left)} of them made earlier")
        self._share([gpu for gpu in gpus for _ in range(self.workers)])
        if self.alone and not self._is_late():
            _say(f"{self._minutes()}: {len(self.alone)} again, each with a GPU for itself")
            self.left, self.alone, self.workers = self.alone + self.left, [], 1
            self._share(gpus)
        self.left += self.alone
        if self.left:
            _say(f"{self._minutes()}: the time is over, {len(self.left)} measurements are left")

    def _share(self, gpus: Sequence[str]) -> None:
        """Make the measurements, a process at a time on each GPU of the list."""
        with ThreadPoolExecutor(len(gpus)) as pool:
            workers = [pool.submit(self._measure_on, gpu) for gpu in gpus]
            try:
                for worker in workers:
                    worker.result()
            except BaseException:
                with self.lock:
                    self.is_over = True
                    for process in self.processes:
                        process.fresh.kill()
                raise

    def _measure_on(self, gpu: str) -> None:
        """Make measurements until none is left or the time is over."""
        while (process := self._next(gpu)) is not None:
            _say(f"{self._minutes()}, {process.number}/{self.total}: {process} ...")
            done = {found.name for found in self._records_of(process)}
            with self.lock:
                self.processes.discard(process)
                undone = [one for one in process.batch if one.name not in done]
                self.left[:0] = [one for one in undone if one not in self.alone]

    def _records_of(self, process: _Process) -> list[Record]:
        """Have a process measure; return the records, which are stored."""
        began = time.perf_counter()
        why = process.measured()
        done = [found for one in process.batch if (found := read(self.folder, one.name))]
        if len(done) < len(process.batch) and not self.is_over:
            # It ended in the first measurement without a record, and before the others.
            seconds = 0.0 if self.on_cpu else time.perf_counter() - began
            names = {found.name for found in done}
            first = next(one for one in process.batch if one.name not in names)
            done.append(record(first, why, seconds, self.commit))
            store(self.folder, done[-1])
        for found in done:
            _say(f"    {found.name}: {page.told(found)}")
        if self.workers > 1:
            # Two models may not fit where one does.
            again = {found.name for found in done if "out of memory" in found.error.lower()}
            with self.lock:
                self.alone += [one for one in process.batch if one.name in again]
            done = [found for found in done if found.name not in again]
        return done

    def _is_late(self) -> bool:
        return self.is_over or time.perf_counter() - self.began > self.seconds

    def _next(self, gpu: str) -> _Process | None:
        """Start the process of the next measurements, if there are any."""
        with self.lock:
            if not self.left or self._is_late():
                return None
            name = self.left[0].process
            batch = list(takewhile(lambda one: one.process == name, self.left))
            number = self.total - len(self.left) + 1
            self.left = self.left[len(batch) :]
            caches = Path(self.caches.name)
            process = _Process(batch, number, self.folder, self.commit, gpu, caches)
            self.processes.add(process)
            return process

    def _minutes(self) -> str:
        return f"{(time.perf_counter() - self.began) / 60:.1f} min"


class _Process:
    """A process that makes measurements and stores their records. The steps of a model and way have
    a cache of compiled kernels in `caches`, which is empty for the batch without a mask, whose
    compilation is timed; batches with one find its kernels."""

    def __init__(
        self, batch: list[Measurement], number: int, folder: Path, commit: str, gpu: str,
        caches: Path,
    ) -> None:  # fmt: skip
        self.batch, self.number, self.folder = batch, number, folder
        names = [one.name for one in batch]
        arguments = ["liger_ops.bench", "report", "--one", *names, "--records", str(folder)]
        arguments += ["--quick"] if batch[0].quick else []
        arguments += ["--commit", commit] if commit else []
        if HAS_TURNS:
            arguments += ["--turn", str(Path(tempfile.gettempdir(), f"liger_ops_turn_{gpu}"))]
        environment = {"CUDA_VISIBLE_DEVICES": gpu} if gpu else {}
        if batch[0].part == "steps":
            shape, masks, way = batch[0].words
            of_way = caches / f"{shape} {way}"
            if masks == "none":
                shutil.rmtree(of_way, ignore_errors=True)
            environment |= {name: str(of_way / name.lower()) for name in CACHES}
        self.fresh = FreshProcess(arguments, {**os.environ, **environment})

    def __str__(self) -> str:
        first, *others = self.batch
        words = [one.words[1] if one.part == "steps" else str(one) for one in others]
        return ", ".join((str(first), *words))

    def measured(self) -> dict[str, Any]:
        """Measure; return the reason that records are missing, if they are."""
        for one in self.batch:
            (self.folder / f"{one.name}.json").unlink(missing_ok=True)
        outcome = self.fresh.outcome(SECONDS * len(self.batch))
        return outcome if isinstance(outcome, dict) else {"error": "it left no record"}


def _outcome(measurement: Measurement, clock: Callable[[], float]) -> tuple[dict[str, Any], float]:
    """Measure in this process; return what came of it, and the seconds by the clock on a GPU."""
    began = clock()
    try:
        outcome = measured(measurement, clock)
    except Exception as error:
        outcome = {"error": one_line(error)}
    return outcome, clock() - began if torch.cuda.is_available() else 0.0
