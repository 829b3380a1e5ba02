"""`python -m liger_ops` prints versions, devices, and the implementation that runs each op here."""

from __future__ import annotations

import argparse
import json
from typing import Any

from .environment import describe

# Where no device has kernels, the table of ops would have one word in each row.
NO_KERNELS = """\
ops            all {count} run their definition in PyTorch, the same numbers but no faster
works here     fuse, backend='liger', explain and every op; kernels need a GPU with triton or an NPU
next           python -c "import liger_ops, torch; print(liger_ops.explain(torch.nn.LayerNorm(8), \
torch.ones(2, 8)))"
all ops        python -m liger_ops --json"""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m liger_ops",
        description="Print versions, devices, and what runs each op on this machine.",
    )
    parser.add_argument("--json", action="store_true", help="print the same as JSON")
    options = parser.parse_args(arguments)
    report = describe()
    print(json.dumps(report, indent=2) if options.json else as_text(report))


def as_text(report: dict[str, Any]) -> str:
    """Format the report of `environment.describe` as text."""
    own = report["liger_ops"]
    lines = [("liger_ops", f"{own['version']}, sources {own['sources']}, {own['folder']}")]
    lines += [(name, found or "not installed") for name, found in report["versions"].items()]
    lines.append(("platform", report["platform"]))
    for toolkit in ("cuda", "hip"):
        if report[f"{toolkit}_of_torch"]:
            lines.append((f"{toolkit} of torch", report[f"{toolkit}_of_torch"]))
    for kind, devices in report["devices"].items():
        for index, device in enumerate(devices):
            capability = f", capability {device['capability']}" if device["capability"] else ""
            lines.append((f"{kind}:{index}", device["name"] + capability))
    lines.append(("best device", report["best_device"]))
    if report["problem"]:
        lines.append(("problem", report["problem"]))
    for device, ops in report["kernels"].items():
        total = len(report["ops"])
        state = f"registered for {len(ops)} of {total} ops" if ops else "not registered"
        lines.append((f"{device} kernels", state))
    facts = "\n".join(f"{name:<14} {value}" for name, value in lines)
    accelerators = [kind for kind in report["devices"] if report["kernels"].get(kind)]
    if not accelerators:
        return f"{facts}\n{NO_KERNELS.format(count=len(report['ops']))}"
    return (
        f"{facts}\n\n{_table(report)}\n\nfloat64 runs the definition on every device.\n"
        "next           python -m liger_ops.bench --help"
    )


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
