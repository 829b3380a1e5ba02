"""The command line of the bench."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NoReturn

import liger_ops

from ..compile_cache import package_hash
from ..device import Effort
from ..environment import TRITON
from . import records, show
from .measure import DeviceLost, Run
from .providers import PROVIDERS
from .show import Points, failures
from .timing import KINDS, Accelerator, NoAccelerator, find
from .workloads import DTYPES, ENTRIES, SETS, selected
from .workloads.entry import MODES

PACKAGES = ("torch", TRITON, "torch_npu", "triton-ascend", "liger-kernel", "quack-kernels")
DESCRIPTION = """\
Time every op of liger_ops on this machine's GPU or NPU, beside the code that models contain
(eager), ATen's fused op where there is one (aten), torch.compile (inductor), liger-kernel and quack
where they are installed. Each is first compared with float64, and not timed where it is wrong.
The NPU's side has not been run on an Ascend device.
"""
EXAMPLES = """\
examples:
  python -m liger_ops.bench step --model llama-3.2-1b   training steps of a model; step --help
  python -m liger_ops.bench report                       a page about this GPU; report --help
  python -m liger_ops.bench --ops rms_norm,swiglu --shapes llama-3.1-8b
  python -m liger_ops.bench --ops rms_norm --shapes 8192x4096 --dtypes bfloat16 --json now.json
  python -m liger_ops.bench --from now.json --compare before.json --plot plots

exit status: 0; 1 where liger_ops itself failed in a row; 2 where nothing could be run
"""


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Exit with one sentence, without the usage."""
        self.exit(2, f"{self.prog}: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    parser, words = _parser(), sys.argv[1:] if arguments is None else [*arguments]
    if words[:1] in (["step"], ["report"]):
        return _of_models(parser, *words)
    options = parser.parse_args(words)
    try:
        earlier = records.read(options.compare)[0] if options.compare else None
        if options.source:
            points, shared = records.read(options.source)
            print(show.blocks(points) + "\n")
        else:
            points, shared = _run(options, words)
        print(show.summary(points))
        if earlier is not None:
            print(show.compared(points, earlier))
        if options.plot:
            for file in show.plot(points, options.plot):
                print(f"wrote {file}")
        if options.docs:
            show.write_page(options.docs, points, shared, options.plot)
            print(f"wrote {options.docs}")
    except (NoAccelerator, ValueError, ImportError, OSError) as error:
        parser.error(str(error))
    return 1 if failures(points) else 0


def _of_models(parser: Parser, command: str, *arguments: str) -> int:
    """Time training steps of a model in the ways of the README's table, or write a report."""
    try:
        from .report import command_line
        from .steps import model
    except ImportError as error:
        parser.error(
            f"{command} needs transformers, pip install 'liger_ops[transformers]': {error}"
        )
    if command == "report":
        return command_line.main(arguments)
    return model.main(arguments, model.README_WAYS)


def _parser() -> Parser:
    parser = Parser(
        prog="python -m liger_ops.bench",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = lambda text: [name for name in text.split(",") if name]
    what = parser.add_argument_group("what is run")
    what.add_argument("--ops", type=names, help=f"some of {', '.join(ENTRIES)}; all by default")
    what.add_argument(
        "--shapes",
        type=names,
        default=["models", "small"],
        help=f"some of {', '.join(SETS)}, names of models, sizes such as 8192x4096;"
        " models,small by default",
    )
    what.add_argument("--providers", type=names, default=PROVIDERS, help=", ".join(PROVIDERS))
    what.add_argument("--modes", type=names, default=MODES, help=", ".join(MODES))
    what.add_argument("--dtypes", type=names, help=", ".join(DTYPES))
    what.add_argument("--device", choices=KINDS, help="the first that is found by default")
    how = parser.add_argument_group("for how long")
    how.add_argument("--repetitions", type=integer(1), default=Effort.rounds, help="of each call")
    how.add_argument(
        "--budget", type=float, default=float("inf"), help="begin no shape after these seconds"
    )
    out = parser.add_argument_group("what comes out, beside the table")
    out.add_argument("--json", type=Path, metavar="FILE", help="the records, after every shape")
    out.add_argument("--plot", type=Path, metavar="DIR", help="share of the rate by shape, PNG")
    out.add_argument("--docs", type=Path, metavar="FILE", help="a page with tables and plots")
    out.add_argument("--compare", type=Path, metavar="FILE", help="the records of an earlier run")
    out.add_argument(
        "--from", dest="source", type=Path, metavar="FILE", help="run nothing, show these records"
    )
    return parser


def integer(least: int) -> Callable[[str], int]:
    """Return an argument type: an integer of at least `least`."""

    def convert(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least {least}")
        return int(text)

    return convert


def _run(options: argparse.Namespace, arguments: Sequence[str]) -> tuple[Points, dict[str, str]]:
    for chosen, accepted in ((options.providers, PROVIDERS), (options.modes, MODES)):
        for name in chosen:
            if name not in accepted:
                raise ValueError(f"{name!r} is none of {', '.join(accepted)}")
    workloads = selected(options.ops, options.shapes, options.dtypes)
    accelerator = find(options.device)
    run = Run(
        accelerator,
        workloads,
        [name for name in PROVIDERS if name in options.providers],
        [mode for mode in MODES if mode in options.modes],
        Effort(rounds=options.repetitions),
        options.budget,
        facts=_facts(arguments),
        say=lambda text: print(text, file=sys.stderr, flush=True),
    )
    return carried_out(run, accelerator, options.json)


def carried_out(
    run: Run, accelerator: Accelerator, file: Path | None
) -> tuple[Points, dict[str, str]]:
    """Run the bench: print each finished workload, and write the points to the file. Return the
    points, and the facts that all records share."""
    shared = {
        "gpu": accelerator.name,
        "timestamp": time.strftime("%Y-%m-%d %H:%M:%S"),
        "version": liger_ops.__version__,
    }
    try:
        for workload in run.steps():
            if file is not None:
                records.write(file, run.points, *shared.values())
            if workload is not None:
                print(show.block(run.points, *workload.row) + "\n", flush=True)
    except DeviceLost as error:
        run.say(f"the device is lost, and the rest not measured: {error}")
    except KeyboardInterrupt:
        run.say("interrupted, and the rest not measured")
    if file is not None:
        records.write(file, run.points, *shared.values())
    for peer, reason in run.peers.missing.items():
        run.say(f"{peer} is not measured: {reason}")
    if run.left:
        run.say(f"the time was over before {len(run.left)}: {', '.join(run.left)}")
    return run.points, shared


def _facts(arguments: Sequence[str]) -> dict[str, str]:
    """Return the command line and the package versions of this run."""
    facts = {"command": " ".join(["python -m liger_ops.bench", *arguments])}
    for package in PACKAGES:
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            continue
    return {**facts, "sources": package_hash()}
