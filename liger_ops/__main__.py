"""`python -m liger_ops`: print what this machine has, what works here, and the next command."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from . import __version__
from .ascend import checks
from .environment import describe

DEFINITIONS = (
    "fuse, backend='liger', explain, export and all {count} ops, by their definitions in PyTorch:"
    " the same numbers but no faster; kernels need a GPU with triton or an NPU"
)
KERNELS = "fuse, backend='liger', explain, export and all {count} ops; float64 has no kernels"
EXPLAIN = """\
python -c "import liger_ops, torch; print(liger_ops.explain(torch.nn.LayerNorm(8), \
torch.ones(2, 8)))"\
"""
NPU = "python -m liger_ops --npu"
STEP = "python -m liger_ops.bench step --model llama-3.2-1b"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m liger_ops",
        description="Print what this machine has, what works here, and the next command.",
    )
    parser.add_argument("--ops", action="store_true", help="add a table: what runs each op here")
    parser.add_argument("--json", action="store_true", help="print all of it as JSON")
    parser.add_argument(
        "--npu",
        action="store_true",
        help="check that kernels can run on an NPU, and name the cures",
    )
    parser.add_argument(
        "--report", metavar="FILE", help="where --npu writes its report (default: report.json)"
    )
    options = parser.parse_args(arguments)
    if options.npu and (options.ops or options.json):
        parser.error("--npu goes with --report alone, got --ops or --json")
    if options.report is not None and not options.npu:
        parser.error("--report goes with --npu alone")
    if options.npu:
        return check_npu(options.report or "report.json")
    report = describe()
    print(json.dumps(report, indent=2) if options.json else as_text(report, options.ops))
    return 0


def check_npu(file: str) -> int:
    """Print a line for each check of the NPU, write the report to a file, and return 1 if a check
    failed or the report could not be written."""
    done = checks.run(lambda check: print(check, flush=True))
    try:
        Path(file).write_text(json.dumps(checks.described(done, __version__), indent=2) + "\n")
    except OSError as error:
        print(f"{file} cannot be written: {error}", file=sys.stderr)
        return 1
    failed = [check.name for check in done if check.state == checks.FAILED]
    print(f"\n{len(failed)} of {len(done)} checks failed; {file} has the details")
    return 1 if failed else 0


def as_text(report: dict[str, Any], ops: bool = False) -> str:
    """Format the report of `environment.describe` as ten lines of text, and with `ops` a table."""
    package, count = report["liger_ops"], len(report["ops"])
    versions = [f"{name} {number or 'is missing'}" for name, number in report["versions"].items()]
    toolkits = [
        f"{toolkit} {report[f'{toolkit}_of_torch']}"
        for toolkit in ("cuda", "hip")
        if report[f"{toolkit}_of_torch"]
    ]
    devices = [
        f"{device_type}:{index} {device['name']}"
        + (f" ({device['capability']})" * bool(device["capability"]))
        for device_type, named in report["devices"].items()
        for index, device in enumerate(named)
    ]
    kernels = [
        f"{device}: {len(ops)} of {count} ops"
        + (f" ({report['without_kernels'][device]})" if device in report["without_kernels"] else "")
        for device, ops in report["kernels"].items()
    ]
    has_kernels = any(report["kernels"].get(device_type) for device_type in report["devices"])
    # Where torch_npu fails, `import torch` does so too, in every command but this package's.
    is_broken_npu = report["problem"] and report["versions"]["torch_npu"]
    facts = {
        "liger_ops": f"{package['version']}, sources {package['sources']}, {package['folder']}",
        "versions": ", ".join(versions),
        "platform": ", ".join([report["platform"], *toolkits]),
        "devices": ", ".join(devices),
        "best device": report["best_device"],
        "problem": report["problem"],
        "kernels for": ", ".join(kernels),
        "works here": (KERNELS if has_kernels else DEFINITIONS).format(count=count),
        "next": NPU if is_broken_npu else STEP if has_kernels else EXPLAIN,
        "all ops": "python -m liger_ops --ops, or --json",
    }
    text = "\n".join(f"{name:<14} {fact}" for name, fact in facts.items() if fact)
    return f"{text}\n\n{_table(report)}" if ops else text


def _table(report: dict[str, Any]) -> str:
    rows = [["op", *report["devices"]]]
    rows += [[name, *where.values()] for name, where in report["ops"].items()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


if __name__ == "__main__":
    sys.exit(main())
