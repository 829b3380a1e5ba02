"""`python -m liger_ops`: print what this machine has, what works here, and the next command."""

from __future__ import annotations

import argparse
import json
from typing import Any

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
STEP = "python -m liger_ops.bench step --model llama-3.2-1b"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m liger_ops",
        description="Print what this machine has, what works here, and the next command.",
    )
    parser.add_argument("--ops", action="store_true", help="add a table: what runs each op here")
    parser.add_argument("--json", action="store_true", help="print all of it as JSON")
    options = parser.parse_args(arguments)
    report = describe()
    print(json.dumps(report, indent=2) if options.json else as_text(report, options.ops))


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
    kernels = [f"{device}: {len(ops)} of {count} ops" for device, ops in report["kernels"].items()]
    has_kernels = any(report["kernels"].get(device_type) for device_type in report["devices"])
    facts = {
        "liger_ops": f"{package['version']}, sources {package['sources']}, {package['folder']}",
        "versions": ", ".join(versions),
        "platform": ", ".join([report["platform"], *toolkits]),
        "devices": ", ".join(devices),
        "best device": report["best_device"],
        "problem": report["problem"],
        "kernels for": ", ".join(kernels),
        "works here": (KERNELS if has_kernels else DEFINITIONS).format(count=count),
        "next": STEP if has_kernels else EXPLAIN,
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
    main()
