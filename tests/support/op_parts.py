"""The parts that every op needs, file by file, and the parts that exist."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import op_table
from liger_ops.bench.workloads import ENTRIES

ROOT = Path(__file__).parents[2]

# Code for a process of its own: other tests define ops, and registered kernels stay registered.
REGISTRY = """
import json
import torch
import liger_ops, liger_ops.nn
import liger_ops.lowering.cuda, liger_ops.lowering.npu
from liger_ops import library

def has_kernel(name, key):
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"liger::{name}", key)

functions = {name: op.definition for name, op in library.OPS.items()} | library.COMPOSED
print(json.dumps({
    "dispatched": sorted({
        name.removeprefix("liger::").split(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("liger::")
    }),
    "composed": list(library.COMPOSED),
    "exported": [
        name for name, function in functions.items()
        if name in liger_ops.__all__
        and getattr(getattr(liger_ops, name, None), "__wrapped__", None) is function
    ],
    "ops": {
        name: {
            "kernels": {
                "cuda": "cuda" in op.kernels and has_kernel(name, "CUDA"),
                "npu": "npu" in op.kernels and has_kernel(name, "PrivateUse1"),
            },
            "kernel_modules": {device: f.__module__ for device, f in op.kernels.items()},
            "fake": op.fake is not None,
            "gradient": op.differentiable,
            "mutates": op.overload._schema.is_mutable,
            "docstring": bool(op.definition.__doc__),
        }
        for name, op in library.OPS.items()
    },
    "modules": [
        name for name, value in vars(liger_ops.nn).items()
        if isinstance(value, type) and issubclass(value, torch.nn.Module)
    ],
}))
"""

# Place of a part, such as a file -> the ops that have a part there.
Found = dict[str, set[str]]


def base(op: str) -> str:
    """Return the public op that an op belongs to, in whose files its code is."""
    return op.removesuffix("_backward").removesuffix("_forward")


def read_registry(run: Callable[[str], str]) -> dict[str, Any]:
    """Return the ops that importing liger_ops registers. `run` runs Python code, and returns its
    output."""
    return json.loads(run(REGISTRY))


def written() -> set[str]:
    """Return the public ops with a definition in liger_ops/ops, imported or not."""
    return {
        base(node.name)
        for file in sorted((ROOT / "liger_ops" / "ops").rglob("*.py"))
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef)
        if any(
            re.match(r"library\.(define|compose)\(", ast.unparse(d)) for d in node.decorator_list
        )
    }


def found(registry: dict[str, Any]) -> Found:
    """Return the existing parts of all ops."""
    files = {f"liger_ops/ops/{file.name}" for file in (ROOT / "liger_ops/ops").rglob("*.py")}
    forms = {base(op.name): set() for op in op_table.OPS.values()}
    for name, op in op_table.OPS.items():
        forms[base(op.name)].add(name)
    readme = (ROOT / "README.md").read_text()
    return {
        "a file": files,
        "torch.ops.liger": set(registry["dispatched"]),
        "liger_ops/__init__.py": set(registry["exported"]),
        **{
            f"the kernels for {device}": {
                base(op) for op, facts in registry["ops"].items() if facts["kernels"][device]
            }
            for device in ("cuda", "npu")
        },
        "the fakes": {base(op) for op, facts in registry["ops"].items() if facts["fake"]},
        "liger_ops/nn": {name.lower().removesuffix("loss") for name in registry["modules"]},
        "the table of its family, of tests/support/ops/op_table.py": set(forms),
        "liger_ops/bench/workloads": set(ENTRIES),
        "the README's table of ops": set(re.findall(r"`(\w+)\([^`]*\)`", readme)),
    }


def needed(op: str) -> Iterator[tuple[str, str]]:
    """Yield the parts that an op needs, each as its place in `found`, and its name there."""
    yield "a file", f"liger_ops/ops/{op}.py"
    yield "torch.ops.liger", op
    yield "torch.ops.liger", f"{op}_backward"
    yield "liger_ops/nn", op.replace("_", "")
    for place in (
        "liger_ops/__init__.py",
        "the kernels for cuda",
        "the kernels for npu",
        "the fakes",
        "the table of its family, of tests/support/ops/op_table.py",
        "liger_ops/bench/workloads",
        "the README's table of ops",
    ):
        yield place, op


def missing(op: str, there: Found) -> list[str]:
    """List the parts that an op needs and that do not exist."""
    return [
        f"{op}: {what} as {place}" if place == "a file" else f"{op}: {what} in {place}"
        for place, what in needed(op)
        if what not in there[place]
    ]
