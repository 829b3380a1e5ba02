"""`python -m liger_ops --npu`: check step by step that kernels can run on an NPU.

A step that imports a package runs in a process of its own, because the import may end the process,
and because `import torch` loads torch_npu unless TORCH_DEVICE_BACKEND_AUTOLOAD is 0.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from . import cures
from .autoload import VARIABLE

PACKAGES = (
    "liger_ops", "torch", "torch_npu", "triton", "triton-ascend", "pybind11", "numpy", "PyYAML",
)  # fmt: skip
# Variables of the report, besides those that begin with PREFIXES.
VARIABLES = (
    "CC", "LD_LIBRARY_PATH", "TORCH_DEVICE_BACKEND_AUTOLOAD", "TRITON_INTERPRET",
    "TRITON_NPU_COMPILER_PATH",
)  # fmt: skip
PREFIXES = ("ASCEND_", "LIGER_OPS_NPU_")
SECRET = re.compile("KEY|TOKEN|SECRET|PASS", re.IGNORECASE)

OK, FAILED, NOT_REACHED = "ok", "failed", "not reached"
UNKNOWN = "The cause is not known here; docs/ascend.md says how to send the report, which has more."

# A process that compiles kernels may take minutes, and the import of CANN's packages half of one.
SECONDS = 600
ANSWER = "liger_ops: "
RUN = f"""
import json, sys, traceback
found = {{}}
try:
    exec(sys.argv[1], {{"found": found}})
except BaseException as error:
    found = {{"error": f"{{type(error).__name__}}: {{error}}", "traceback": traceback.format_exc()}}
print({ANSWER!r} + json.dumps(found), flush=True)
"""
TORCH_NPU = "import torch, torch_npu"
# Where a distribution that overwrote the package is uninstalled, it imports and has no `jit`.
TRITON = """
import triton, triton.language
from triton.backends import backends
triton.jit
if "ascend" not in backends:
    raise RuntimeError(f"the backends of triton are {sorted(backends)}, and not ascend")
"""
PYBIND11 = "import pybind11"
DEVICE = """
import torch, torch_npu
if not torch.npu.is_available() or torch.npu.device_count() == 0:
    raise RuntimeError("No NPUs are available to torch_npu")
found["device"] = torch.npu.get_device_name()
import liger_ops
from liger_ops.lowering.npu import tiling
found.update(vector_cores=tiling.vector_cores(), ub_bytes=tiling.ub_bytes())
"""
KERNEL = """
import torch, torch_npu, liger_ops
from liger_ops import library
place = library.implementation(library.OPS["rms_norm"], "npu")
if not place.startswith("lowering.npu."):
    raise RuntimeError(f"rms_norm has no kernel for the NPU: {place} runs")
x, weight = torch.randn(33, 1000), torch.randn(1000)
y = liger_ops.rms_norm(x.to("npu"), weight.to("npu"), eps=1e-6).cpu().double()
exact = liger_ops.rms_norm(x.double(), weight.double(), eps=1e-6)
found["error_of_result"] = float((y - exact).abs().max())
if not found["error_of_result"] < 1e-5:
    raise RuntimeError(f"rms_norm in float32 is {found['error_of_result']} off float64")
"""


@dataclass
class Check:
    """The outcome of a check: its state, what was found, the cure if it failed, and details for
    the report."""

    name: str
    state: str = OK
    found: str = ""
    cure: str = ""
    details: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        text = f"{self.found.rstrip('. ')}. {self.cure}" if self.cure else self.found
        return f"{self.name:<20} {self.state:<12} {text}".rstrip()


class Failed(Exception):
    """A check failed. Its arguments are what was found, the cure, and details."""

    def __init__(self, found: str, cure: str = "", details: dict[str, Any] | None = None) -> None:
        super().__init__(found)
        self.found, self.details = found, details or {}
        self.cure = cure or cures.cure_of(found) or UNKNOWN


class NotReached(Exception):
    """A check needs what another one found to be missing."""


Outcome = tuple[str, dict[str, Any]] | str


def answer(code: str) -> dict[str, Any]:
    """Return what `code` finds in a process of its own, or raise Failed."""
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), root)))
    try:
        done = subprocess.run(
            [sys.executable, "-c", RUN, code],
            env={**os.environ, VARIABLE: "0", "PYTHONPATH": path},
            capture_output=True, text=True, errors="replace", timeout=SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise Failed(f"no answer in {SECONDS} s") from None
    lines = [line for line in done.stdout.splitlines() if line.startswith(ANSWER)]
    others = "\n".join(line for line in done.stdout.splitlines() if line not in lines)
    output = {"stdout": others[-4000:], "stderr": done.stderr[-4000:]}
    if not lines:
        last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise Failed(f"the process ended with status {done.returncode}: {last}", details=output)
    found: dict[str, Any] = json.loads(lines[-1].removeprefix(ANSWER))
    if "error" in found:
        # The error may be the last of a chain. Lines of code, which are indented, say nothing.
        chain = "\n".join(x for x in found["traceback"].splitlines() if not x.startswith(" "))
        cure = cures.cure_of(found["error"]) or cures.cure_of(chain)
        raise Failed(found["error"].strip().partition("\n")[0], cure, {**found, **output})
    return found


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def folder_of(package: str) -> Path | None:
    """Return a package's folder, without importing it."""
    try:
        spec = find_spec(package)
    except (ImportError, ValueError):
        return None
    places = spec.submodule_search_locations if spec is not None else None
    return Path(next(iter(places))) if places else None


def torch_npu_loads() -> Outcome:
    if find_spec("torch_npu") is None:
        wanted = cures.minor(installed("torch") or "")
        raise Failed("torch_npu is not installed", f"Run `pip install 'torch_npu=={wanted}.*'`.")
    answer(TORCH_NPU)
    return f"torch_npu {installed('torch_npu')} loads"


def torch_npu_fits_torch() -> Outcome:
    torch, torch_npu = installed("torch"), installed("torch_npu")
    if torch is None or torch_npu is None:
        raise NotReached("needs torch_npu")
    found = f"torch_npu {torch_npu}, torch {torch}"
    if cures.minor(torch) != cures.minor(torch_npu):
        raise Failed(found, cures.pair(torch))
    return found


def triton_is_triton_ascend() -> Outcome:
    folder, ascend, upstream = folder_of("triton"), installed("triton-ascend"), installed("triton")
    if folder is None:
        raise Failed("triton-ascend is not installed", "Run `pip install triton-ascend pybind11`.")
    has_backend = (folder / "backends" / "ascend").is_dir()
    if ascend and upstream:
        text = (folder / "__init__.py").read_text() if (folder / "__init__.py").is_file() else ""
        own = re.search(r"__version__ = ['\"](.*?)['\"]", text)
        raise Failed(
            f"triton {upstream} and triton-ascend {ascend} are both installed, of which"
            f" {own[1] if own else 'neither'} is imported",
            cures.one_triton(),
        )
    if not has_backend:
        raise Failed(f"triton {upstream} in {folder} has no backend ascend", cures.one_triton())
    try:
        answer(TRITON)
    except Failed as error:
        # The next check names it.
        if "'pybind11'" not in error.found:
            raise
    return f"triton-ascend {ascend}"


def pybind11_imports() -> Outcome:
    answer(PYBIND11)
    return f"pybind11 {installed('pybind11')}"


def launcher_compiles() -> Outcome:
    """Compare the C++ standard that triton-ascend passes to its compiler, as its source says it,
    with the one that torch's headers ask for."""
    triton, torch = folder_of("triton"), folder_of("torch")
    backend = triton and triton / "backends" / "ascend"
    if backend is None or torch is None or not backend.is_dir():
        raise NotReached("needs triton-ascend")
    # The launcher is built by these two; remote_driver.py is for a device of another machine.
    sources = [backend / name for name in ("utils.py", "driver.py")]
    passed = [
        int(number)
        for file in sources
        if file.is_file()
        for number in re.findall(r"-std=(?:c|gnu)\+\+(\d+)", file.read_text(errors="replace"))
    ]
    compiler = os.environ.get("CC") or shutil.which("clang++") or shutil.which("g++")
    if compiler is None or shutil.which(compiler) is None:
        raise Failed(f"there is no C++ compiler ({compiler or 'clang++, g++'})", cures.compiler())
    if not passed:
        return f"{compiler}; triton-ascend names no C++ standard"
    needed = standard_of(torch)
    found = f"triton-ascend compiles its launcher as C++{min(passed)}, torch needs C++{needed}"
    if min(passed) < needed:
        raise Failed(found, cures.standard())
    return f"{found}, {compiler}"


def standard_of(torch: Path) -> int:
    """Return the C++ standard that torch's headers ask for, or that of its version where there is
    no header: 20 from torch 2.14 on."""
    header = torch / "include" / "ATen" / "ATen.h"
    if header.is_file():
        asked = re.findall(r"__cplusplus\s*<\s*20(\d\d)\d\dL", header.read_text(errors="replace"))
        if asked:
            return max(map(int, asked))
    numbers = cures.minor(installed("torch") or "").split(".")
    return 20 if [int(number) for number in numbers if number] >= [2, 14] else 17


def compiler_answers() -> Outcome:
    """Find bishengir-compile where triton-ascend does: on PATH, else TRITON_NPU_COMPILER_PATH."""
    home = os.environ.get("ASCEND_HOME_PATH", "")
    path = shutil.which("bishengir-compile")
    given = os.environ.get("TRITON_NPU_COMPILER_PATH")
    if path is None and given:
        path = shutil.which("npuc", path=given)
    if path is None:
        # set_env.sh, or a part of CANN that is installed and not on PATH.
        beside = (
            sorted(Path(home).rglob("bishengir-compile")) if Path(home).is_dir() and home else []
        )
        cure = f"Add {beside[0].parent} to PATH." if beside else cures.bishengir()
        raise Failed(
            f"bishengir-compile is not on PATH; ASCEND_HOME_PATH is {home or 'not set'}", cure
        )
    if not home:
        raise Failed(f"{path} is there, and ASCEND_HOME_PATH is not set", cures.set_env())
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Failed(f"{path} does not run: {error}", cures.bishengir()) from None
    printed = f"{done.stdout}\n{done.stderr}".strip().partition("\n")[0].strip()
    if done.returncode:
        raise Failed(f"{path} --version ended with status {done.returncode}: {printed}")
    return f"{path}: {printed}"


def device_is_known() -> Outcome:
    found = answer(DEVICE)
    return (
        f"{found['device']}: {found['vector_cores']} vector cores, a Unified Buffer of"
        f" {found['ub_bytes']} bytes"
    ), found


def kernel_runs() -> Outcome:
    found = answer(KERNEL)
    return f"rms_norm in float32 is {found['error_of_result']:.1e} off float64", found


# Name -> the check, and the names of those that it needs.
CHECKS: dict[str, tuple[Callable[[], Outcome], tuple[str, ...]]] = {
    "torch_npu": (torch_npu_loads, ()),
    "versions": (torch_npu_fits_torch, ()),
    "triton": (triton_is_triton_ascend, ()),
    "pybind11": (pybind11_imports, ()),
    "C++ standard": (launcher_compiles, ()),
    "bishengir-compile": (compiler_answers, ()),
    "device": (device_is_known, ("torch_npu", "triton", "pybind11", "C++ standard")),
    "kernel": (kernel_runs, ("bishengir-compile", "device")),
}


def run(report: Callable[[Check], Any] = print) -> list[Check]:
    """Run all checks, as far as each can, and pass each to `report` when it ends."""
    done: dict[str, Check] = {}
    for name, (check, needs) in CHECKS.items():
        done[name] = _outcome(name, check, [need for need in needs if done[need].state != OK])
        report(done[name])
    return list(done.values())


def _outcome(name: str, check: Callable[[], Outcome], missing: list[str]) -> Check:
    if missing:
        return Check(name, NOT_REACHED, f"needs {', '.join(missing)}")
    try:
        found = check()
    except NotReached as error:
        return Check(name, NOT_REACHED, str(error))
    except Failed as error:
        return Check(name, FAILED, error.found, error.cure, error.details)
    text, details = found if isinstance(found, tuple) else (found, {})
    return Check(name, OK, text, details=details)


def described(checks: list[Check], liger_ops: str) -> dict[str, Any]:
    """Return the report: versions, variables without secrets, CANN's version, and the checks."""
    return {
        "versions": {
            "python": platform.python_version(),
            **{package: installed(package) for package in PACKAGES},
            "liger_ops": liger_ops,
        },
        "platform": platform.platform(),
        "environment": variables(os.environ),
        "cann": _cann(os.environ.get("ASCEND_HOME_PATH", "")),
        "checks": [asdict(check) for check in checks],
    }


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that matter, and of PATH the folders of Ascend's software."""
    kept = {
        name: value
        for name, value in sorted(environment.items())
        if (name in VARIABLES or name.startswith(PREFIXES)) and not SECRET.search(name)
    }
    folders = environment.get("PATH", "").split(os.pathsep)
    named = [folder for folder in folders if re.search("cann|ascend", folder, re.IGNORECASE)]
    return {**kept, "PATH": os.pathsep.join(named)}


def _cann(home: str) -> dict[str, str]:
    """Return the beginnings of the files in which CANN has its version."""
    files = [
        *(Path(home) / name for name in ("version.cfg", "version.info")),
        *(Path(home).glob("*-linux/ascend_toolkit_install.info") if home else ()),
    ]
    return {str(f): f.read_text(errors="replace")[:500] for f in files if home and f.is_file()}
