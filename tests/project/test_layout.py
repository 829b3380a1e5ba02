"""The house rules: layers import downward, every op has all its parts, and no host code waits."""

from __future__ import annotations

import ast
import os
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import op_parts
from sources import ROOT, imported_modules, module_of, sources

pytestmark = pytest.mark.quick

# Each layer imports from itself and from those before it. The rest of liger_ops is above ops, and
# what is in ABOVE also above lowering.
LAYERS = ("library", "ops", "meta", "lowering")
ABOVE = ("rewrites", "fusion", "distributed", "invariance", "hub")
# These know the ops alone, and each other not.
BESIDE = ("nn", "losses")
# Below them all: they import nothing of the package but each other.
BASE = (
    "accepted", "ascend", "autograd", "axes", "checkout", "compile_cache", "derived", "device",
    "invariant_mode", "record", "torch_private",
)  # fmt: skip

# Each waits for the device, which stalls it and cannot be captured in a CUDA graph.
SYNCHRONISING = {"item", "tolist", "cpu", "numpy", "nonzero", "synchronize"}


def layer_of(module: str) -> int:
    """A module's index in LAYERS, or one past the last for the rest of liger_ops."""
    parts = module.split(".")
    if len(parts) > 1 and parts[1] in BASE:
        return -1
    return LAYERS.index(parts[1]) if len(parts) > 1 and parts[1] in LAYERS else len(LAYERS)


def misplaced_imports(file: Path, source: str) -> list[str]:
    """List the imports of `file`, a path from the root, that go against the order of the layers."""
    module = module_of(file)
    if module == "liger_ops":
        return []
    own_layer = layer_of(module)
    own_device = module.split(".")[2:3] if own_layer == LAYERS.index("lowering") else []
    wrong = []
    for name in imported_modules(ast.parse(source), module, file.stem == "__init__"):
        parts = name.split(".")
        if parts[0] != "liger_ops":
            continue
        layer = layer_of(name)
        downward = layer > own_layer
        if own_layer == len(LAYERS):
            folder = module.split(".")[1]
            downward = layer == LAYERS.index("lowering") and folder not in ABOVE
            if folder == "rewrites":
                # They are for graphs of any device, know no kernels, and are under `fuse`.
                downward = layer >= LAYERS.index("lowering") and parts[1:2] != [folder]
            if folder in BESIDE:
                downward = layer > LAYERS.index("ops") and parts[1:2] != [folder]
        devices = {"cuda", "npu"}
        apart = set(own_device) <= {*devices, "common"}
        other_device = apart and set(parts[2:3]) & (devices - set(own_device))
        if downward or (own_device and other_device):
            wrong.append(f"{file}: {module} imports {name}")
    return wrong


def synchronising_calls(file: Path, source: str) -> list[str]:
    """Calls in `file` that wait for the device, or declare an op that mutates."""
    wrong = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            call = ast.unparse(node.func)
            if node.func.attr in SYNCHRONISING or call == "torch.equal":
                wrong.append(f"{file}:{node.lineno}: {call}() synchronises with the device")
        if isinstance(node, ast.keyword) and node.arg == "mutates_args":
            value = ast.unparse(node.value)
            if value != "()":
                wrong.append(f"{file}:{node.value.lineno}: mutates_args is {value}, not ()")
    return wrong


def run(code: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_imports_point_one_way():
    wrong = [
        problem
        for file in sources("liger_ops", "meta", "lowering")
        for problem in misplaced_imports(file.relative_to(ROOT), file.read_text())
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("liger_ops/library.py", "from .ops import rms_norm"),
        ("liger_ops/ops/x.py", "from ..meta import checks"),
        ("liger_ops/ops/x.py", "from .. import nn"),
        ("liger_ops/ops/x.py", "import liger_ops.lowering"),
        ("liger_ops/nn/x.py", "from .. import lowering"),
        ("liger_ops/losses/x.py", "from .. import meta"),
        ("liger_ops/losses/x.py", "from ..nn import derived"),
        ("meta/__init__.py", "from ..lowering import cuda"),
        ("meta/x.py", "def f():\n    from ..lowering.cuda import launch"),
        ("meta/x.py", "from liger_ops.nn import RMSNorm"),
        ("lowering/npu/x.py", "from ..cuda.launch import Plan"),
        ("lowering/cuda/x.py", "from .. import npu"),
        ("liger_ops/rewrites/x.py", "from ..lowering.cuda.norms import rms_norm"),
        ("liger_ops/rewrites/x.py", "import liger_ops.lowering.npu"),
        ("liger_ops/rewrites/x.py", "from .. import fusion"),
    ],
)
def test_a_misplaced_import_is_found(file, source):
    assert len(misplaced_imports(Path(file), source)) == 1


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("liger_ops/__init__.py", "from . import meta, lowering"),
        ("liger_ops/ops/x.py", "from .. import library\nfrom .precision import widened"),
        ("liger_ops/nn/x.py", "from .. import library\nfrom ..ops.rms_norm import rms_norm"),
        ("liger_ops/losses/x.py", "from ..ops.precision import widened\nfrom .checks import x"),
        ("liger_ops/fusion/x.py", "from ..rewrites.engine import pattern"),
        ("meta/x.py", "from .. import library\nfrom . import checks\nimport torch.cuda"),
        ("lowering/__init__.py", "from . import cuda, npu"),
        ("lowering/npu/x.py", "from ... import library, meta\nfrom ..triton_math import rounded"),
        ("lowering/cuda/x.py", "from .launch import Plan\nimport triton.language as tl"),
        (
            "liger_ops/rewrites/engine/x.py",
            "from ...library import OPS\nfrom .pattern import Pattern",
        ),
    ],
)
def test_a_well_placed_import_passes(file, source):
    assert misplaced_imports(Path(file), source) == []


def test_the_rewrites_need_no_toolchain():
    """Rewrites are for graphs of every device, and a user without Triton has them too."""
    wanted = {
        name.split(".")[0]
        for file in sources("liger_ops/rewrites")
        for name in imported_modules(
            ast.parse(file.read_text()), module_of(file.relative_to(ROOT)), False
        )
    }
    assert not wanted & {"triton", "torch_npu", "transformers"}
    assert run(BARE_PASSES, "triton", "torch_npu", "transformers").split()[-1] == "1"


# They measure what `explain(verify=True)` and `fuse(verify=batch)` report; no op or compiled code
# calls them.
MEASURES = [
    ROOT / f"liger_ops/rewrites/{name}.py"
    for name in ("verify", "differences", "engine/float64_graph")
]


# The definition of moe_experts reads the sizes of its groups of rows, and that of varlen_attention,
# within `invariant`, its documents; no kernel does.
DEFINITIONS = [
    ROOT / "liger_ops/ops/experts/rows.py",
    ROOT / "liger_ops/ops/attention/document_blocks.py",
]


# torch_npu's operator takes the documents as numbers, on the host, and so do launches for packed
# ones: one look for all layers. Where the kernels for a GPU read numbers, they are on the host
# already.
OPERATORS = [
    ROOT / f"liger_ops/ops/attention/{name}.py" for name in ("document_bounds", "packed_documents")
]


HOST_CODE = (
    *("liger_ops/ops", "liger_ops/nn", "liger_ops/losses", "liger_ops/distributed"),
    *("meta", "lowering"),
)


def test_nothing_waits_for_the_device_or_mutates():
    wrong = [
        problem
        for file in sources(*HOST_CODE) + [ROOT / "liger_ops/library.py"]
        if file not in MEASURES + DEFINITIONS + OPERATORS
        for problem in synchronising_calls(file.relative_to(ROOT), file.read_text())
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "source",
    [
        "n = x.max().item()",
        "x.shape_tensor.tolist()",
        "torch.cuda.synchronize()",
        "torch.equal(x, y)",
        "y = x.sum(0).cpu()",
        'custom_op("liger::x", mutates_args=("x",))',
    ],
)
def test_a_call_that_waits_or_mutates_is_found(source):
    assert len(synchronising_calls(Path("meta/x.py"), source)) == 1


def listed_one_by_one(source: str) -> list[str]:
    """The kernels whose header has two successive lines of one parameter each."""
    wrong = []
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef):
            continue
        if any("triton.jit" in ast.unparse(decorator) for decorator in function.decorator_list):
            lines = Counter(parameter.lineno for parameter in function.args.args)
            alone = {line for line, parameters in lines.items() if parameters == 1}
            if any(line + 1 in alone for line in alone):
                wrong.append(function.name)
    return wrong


def test_kernels_parameters_are_grouped():
    wrong = {file.name: listed_one_by_one(file.read_text()) for file in sources("lowering")}
    assert any(wrong) and not any(wrong.values()), wrong


def test_a_kernel_with_a_parameter_on_each_line_is_found():
    grouped = "@triton.jit\ndef kernel(\n    x_ptr, y_ptr,\n    N,\n):  # fmt: skip\n    pass\n"
    listed = grouped.replace("x_ptr, y_ptr", "x_ptr,\n    y_ptr")
    assert listed_one_by_one(grouped) == [] and listed_one_by_one(listed) == ["kernel"]


@pytest.fixture(scope="module")
def registry() -> dict[str, Any]:
    return op_parts.read_registry(run)


def test_every_op_goes_through_the_library(registry):
    known = set(registry["ops"]) | set(registry["composed"])
    assert set(registry["dispatched"]) == known, "registered elsewhere"
    assert registry["ops"], "no op is registered"


def test_every_public_op_has_all_its_parts(registry):
    """A composed op has no kernels of its own; the files of its name hold those of the op that it
    calls."""
    there = op_parts.found(registry)
    ops = op_parts.written() | {op_parts.base(op) for op in registry["dispatched"]}
    missing = [part for op in sorted(ops) for part in op_parts.missing(op, there)]
    assert not missing, "missing: " + "; ".join(missing)


def test_each_part_that_an_op_lacks_is_named(registry):
    there = op_parts.found(registry)
    for place, what in op_parts.needed("rms_norm"):
        without = {**there, place: there[place] - {what}}
        (named,) = op_parts.missing("rms_norm", without)
        assert "rms_norm: " in named and what in named and place in named
    assert len(op_parts.missing("nothing", there)) == len(list(op_parts.needed("nothing"))) >= 11


def test_every_op_is_registered_in_full(registry):
    missing = []
    for op, facts in registry["ops"].items():
        missing += [
            f"{op}: a kernel for {device}" for device, has in facts["kernels"].items() if not has
        ]
        missing += [
            f"{op}: a kernel for {device} in its folder, not in {module}"
            for device, module in facts["kernel_modules"].items()
            if not module.startswith(f"liger_ops.lowering.{device}.")
        ]
        missing += [
            f"{op}: a {part}" for part in ("fake", "gradient", "docstring") if not facts[part]
        ]
        if facts["mutates"]:
            missing.append(f"{op}: a schema that mutates nothing")
    assert not missing, "missing: " + "; ".join(missing)


def test_every_example_has_a_main():
    examples = {file: ast.parse(file.read_text()) for file in sources("examples")}
    assert examples, "there is no example"
    imported = {
        name.split(".")[0]
        for file, tree in examples.items()
        for name in imported_modules(tree, file.stem, False)
    }
    for file, body in ((file, tree.body) for file, tree in examples.items()):
        if file.stem in imported:
            continue
        functions = [node.name for node in body if isinstance(node, ast.FunctionDef)]
        tests = [ast.unparse(node.test) for node in body if isinstance(node, ast.If)]
        assert "main" in functions, f"{file.name} has no main()"
        assert "__name__ == '__main__'" in tests, f"{file.name} does not run main() as a script"


BARE_IMPORT = """
import sys
from importlib.machinery import PathFinder

absent = set(sys.argv[1:])

class WithoutThem(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] in absent else super().find_spec(name, path, target)

sys.meta_path = [WithoutThem if finder is PathFinder else finder for finder in sys.meta_path]

def packages():
    names = {name.split(".")[0] for name in sys.modules if not name.startswith("_")}
    return names - set(sys.stdlib_module_names)

import torch
before = packages()
import liger_ops
print(*packages() - before)
x = torch.randn(3, 5, requires_grad=True)
torch.ops.liger.rms_norm(x, torch.ones(5), 1e-6).sum().backward()
assert x.grad is not None
"""


BARE_PASSES = (
    BARE_IMPORT
    + """
print(liger_ops.explain(torch.nn.RMSNorm(8, eps=1e-6), torch.ones(2, 8)).counts()["rms_norm"])
"""
)


def test_import_needs_torch_alone():
    assert run(BARE_IMPORT, "triton", "torch_npu", "transformers").split() == ["liger_ops"]


def test_import_loads_no_toolchain():
    assert run(BARE_IMPORT).split() == ["liger_ops"]


# What a reader has to take in at once: the files of a folder beside its `__init__.py`, the lines of
# a file, and the parameters of a function. A kernel, and a function whose docstring lists its
# arguments for users, may have more parameters. Half of the files have at least MEDIAN lines.
FILES, LINES, MEDIAN, PARAMETERS = 15, 420, 130, 20


def over_budget(file: Path, source: str) -> list[str]:
    """List what a file has too much of."""
    lines = source.count("\n")
    wrong = [f"{file}: {lines} lines"] if lines > LINES else []
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef):
            continue
        decorators = " ".join(map(ast.unparse, function.decorator_list))
        documented = "Args:\n" in (ast.get_docstring(function) or "")
        count = len(function.args.args) + len(function.args.kwonlyargs)
        if count > PARAMETERS and not documented and "triton.jit" not in decorators:
            wrong.append(f"{file}:{function.lineno}: {function.name} has {count} parameters")
    return wrong


def test_the_house_is_within_its_budget():
    files = [file.relative_to(ROOT) for file in sources("liger_ops", "meta", "lowering")]
    wrong = [problem for file in files for problem in over_budget(file, (ROOT / file).read_text())]
    tests = [file.relative_to(ROOT) for file in sources("tests")]
    folders = Counter(file.parent for file in (*files, *tests) if file.name != "__init__.py")
    wrong += [f"{folder}: {n} files" for folder, n in folders.items() if n > FILES]
    # The modules of tests are imported by their names alone.
    names = Counter(file.name for file in tests if file.name != "conftest.py")
    wrong += [f"tests: {n} files are called {name}" for name, n in names.items() if n > 1]
    lines = [len((ROOT / f).read_text().splitlines()) for f in files if f.name != "__init__.py"]
    if statistics.median(lines) < MEDIAN:
        wrong.append(
            f"half of the source files have under {MEDIAN} lines: merge those of a subject"
        )
    assert len(files) > 100 and not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "source",
    [
        "\n" * (LINES + 1),
        f"def f({', '.join(f'a{i}' for i in range(PARAMETERS + 1))}): pass",
        f"def f(*, {', '.join(f'a{i}' for i in range(PARAMETERS + 1))}): pass",
    ],
)
def test_what_is_over_the_budget_is_found(source):
    assert len(over_budget(Path("meta/x.py"), source)) == 1


# PyTorch has no public module for nested values, and its other modules name these so.
ACCEPTED = ("torch.utils._pytree", "torch.ops.", "torch._check")


def private_parts(file: Path, source: str) -> list[str]:
    """The private parts of PyTorch that a file names, in attributes and imports."""
    tree = ast.parse(source)
    named = [*imported_modules(tree, module_of(file), file.stem == "__init__")]
    named += [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    return [
        f"{file}: {name}"
        for name in named
        if name.split(".")[0] == "torch"
        and any(part.startswith("_") and not part.startswith("__") for part in name.split("."))
        and not name.startswith(ACCEPTED)
    ]


def test_private_parts_of_torch_are_in_one_file():
    wrong = [
        problem
        for file in sources("liger_ops", "meta", "lowering")
        if file.name != "torch_private.py"
        for problem in private_parts(file.relative_to(ROOT), file.read_text())
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "source",
    [
        "import torch._inductor.config as config",
        "from torch._guards import tracing",
        "from torch.nn.attention.flex_attention import _apply_kernel_options",
        "torch._C._any_requires_grad(x)",
    ],
)
def test_a_private_part_of_torch_is_found(source):
    assert len({line.split("(")[0] for line in private_parts(Path("meta/x.py"), source)}) >= 1
