"""`python -m liger_ops --npu` names each broken state of an NPU's packages with its cure.

Each state is a virtual environment with this one's packages, except triton and pybind11, and with
stand-ins for torch_npu, triton-ascend, pybind11 and CANN. The stand-in for torch_npu simulates the
device, on which the interpreter runs the npu kernels.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from liger_ops import library
from liger_ops.ascend import autoload, checks, cures
from paths import SUPPORT

ROOT = Path(__file__).parents[2]
MINOR = ".".join(torch.__version__.split(".")[:2])
LEFT_OUT = ("triton-", "triton_ascend", "torch_npu", "pybind11")

SIMULATED = f"""
import sys
sys.path[:0] = [{str(SUPPORT)!r}, {str(SUPPORT / "ops")!r}]
try:
    import interpreter, simulated_npu
except ImportError:
    # torch_npu does not import triton, and loads where that is broken.
    pass
else:
    interpreter.patch()
    simulated_npu.install()
    simulated_npu.active = True
sys.path[:2] = []

def _autoload():
    pass
"""
NO_HCCL = "libhccl.so: cannot open shared object file: No such file or directory"
NO_LANGUAGE = "cannot import name 'Language' from 'triton.backends.compiler'"
BACKEND = """
from triton.backends.{module} import {base}
class Ascend({base}):
    is_active = staticmethod(lambda: False)
Ascend.__abstractmethods__ = frozenset()
"""
COMPILER = "#!/bin/sh\necho bishengir-compile 9.9\n"


@dataclass
class State:
    """Stand-ins that are installed: each one's source or version, None for one that is missing."""

    torch_npu: str | None = SIMULATED
    torch_npu_version: str = f"{MINOR}.0.post4"
    # Distributions that claim to have installed the package `triton`.
    tritons: dict[str, str] = field(default_factory=lambda: {"triton-ascend": "3.2.0"})
    has_backend: bool = True
    has_init: bool = True
    is_found: bool = True
    fails: str = ""
    standard: int = 20
    pybind11: bool = True
    compiler: str | None = COMPILER
    home: bool = True


def distribution(folder: Path, name: str, version: str, entry_points: str = "") -> None:
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(entry_points)


def install(state: State, folder: Path) -> None:
    """Write the stand-ins of a state."""
    if state.torch_npu is not None:
        (folder / "torch_npu").mkdir()
        (folder / "torch_npu" / "__init__.py").write_text(state.torch_npu)
        entry = "[torch.backends]\ntorch_npu = torch_npu:_autoload\n"
        distribution(folder, "torch_npu", state.torch_npu_version, entry)
    if state.pybind11:
        (folder / "pybind11.py").touch()
        distribution(folder, "pybind11", "3.1.0")
    real = Path(next(iter(find_spec("triton").submodule_search_locations)))
    triton = folder / "triton"
    (triton / "backends").mkdir(parents=True)
    for source, target in ((real, triton), (real / "backends", triton / "backends")):
        for entry in source.iterdir():
            if entry.name not in ("__init__.py", "backends", "__pycache__") or target != triton:
                (target / entry.name).symlink_to(entry)
    header = f"raise ImportError({state.fails!r})\n" if state.fails else "import pybind11\n"
    if state.has_init:
        (triton / "__init__.py").write_text(header + (real / "__init__.py").read_text())
    if state.has_backend:
        backend = triton / "backends" / "ascend"
        backend.mkdir()
        for module, base in (("compiler", "BaseBackend"), ("driver", "DriverBase")):
            text = BACKEND.format(module=module, base=base)
            (backend / f"{module}.py").write_text(text)
        (backend / "utils.py").write_text(f'cc_cmd += ["-std=c++{state.standard}", "-shared"]\n')
    is_found = state.has_backend and state.is_found
    for name, version in state.tritons.items():
        entry = "[triton.backends]\nascend = triton.backends.ascend\n"
        distribution(folder, name, version, entry if name == "triton-ascend" and is_found else "")


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the Python of an empty environment, and a folder with links to all packages but those
    of an NPU."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder / "venv", symlinks=True, with_pip=False)
    packages = folder / "packages"
    packages.mkdir()
    for path in filter(Path.is_dir, (Path(p) for p in sys.path if "-packages" in p)):
        for entry in path.iterdir():
            is_left_out = entry.name == "triton" or entry.name.startswith(LEFT_OUT)
            if not is_left_out and entry.suffix != ".pth" and not (packages / entry.name).exists():
                (packages / entry.name).symlink_to(entry)
    return folder / "venv" / "bin" / "python", packages


@pytest.fixture
def start(environment: tuple[Path, Path], tmp_path: Path) -> Iterator[object]:
    """Return a function that runs Python in a state."""
    python, packages = environment

    def run(state: State, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        site, home, work = (tmp_path / name for name in ("site", "home", "work"))
        for folder in (site, home / "bin", work):
            folder.mkdir(parents=True)
        install(state, site)
        if state.compiler is not None:
            (home / "bin" / "bishengir-compile").write_text(state.compiler)
            (home / "bin" / "bishengir-compile").chmod(0o755)
        paths = [str(home / "bin"), *os.environ["PATH"].split(os.pathsep)]
        given = {
            "PYTHONPATH": os.pathsep.join(map(str, (ROOT, site, packages))),
            "PATH": os.pathsep.join(paths),
            "TRITON_INTERPRET": "1",
            "HOME": str(tmp_path),
            **({"ASCEND_HOME_PATH": str(home)} if state.home else {}),
            **variables,
        }
        return subprocess.run(
            [str(python), *arguments], cwd=work, env=given, capture_output=True, text=True
        )

    yield run


def outcomes(text: str) -> dict[str, tuple[str, str]]:
    """Return each check's state and text."""
    found = {}
    for line in text.splitlines():
        name = next((n for n in checks.CHECKS if line.startswith(f"{n} ")), None)
        if name is not None:
            states = (checks.OK, checks.FAILED, checks.NOT_REACHED)
            rest = line.removeprefix(name).strip()
            state = next(s for s in states if rest.startswith(f"{s} "))
            found[name] = (state, rest.removeprefix(state).strip())
    return found


def test_a_healthy_machine_passes(start, tmp_path):
    done = start(State(), "-m", "liger_ops", "--npu", "--report", "npu.json")
    found = outcomes(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert found.keys() == checks.CHECKS.keys()
    assert {state for state, _ in found.values()} == {checks.OK}
    assert "vector cores, a Unified Buffer of 196608 bytes" in found["device"][1]
    report = json.loads((tmp_path / "work" / "npu.json").read_text())
    assert report["versions"]["torch_npu"] == f"{MINOR}.0.post4"
    assert 0 < report["checks"][-1]["details"]["error_of_result"] < 1e-5


BROKEN = {
    "no pybind11": (State(pybind11=False), "pybind11", "pip install pybind11"),
    "triton, then triton-ascend": (
        State(tritons={"triton": "3.8.0", "triton-ascend": "3.2.0"}, fails=NO_LANGUAGE),
        "triton",
        "are both installed, of which ... pip uninstall -y triton triton-ascend",
    ),
    "triton-ascend, then triton": (
        State(tritons={"triton": "3.8.0", "triton-ascend": "3.2.0"}, has_backend=False),
        "triton",
        "are both installed, of which ... pip uninstall -y triton triton-ascend",
    ),
    "triton was uninstalled": (
        State(has_init=False),
        "triton",
        "pip uninstall -y triton triton-ascend",
    ),
    "the backend is not found": (
        State(is_found=False),
        "triton",
        "pip uninstall -y triton triton-ascend",
    ),
    "C++ standard": (State(standard=14), "C++ standard", "Install torch 2.13 with torch_npu 2.13"),
    "no CANN": (
        State(torch_npu=f"raise ImportError({NO_HCCL!r})\n", compiler=None, home=False),
        "torch_npu",
        "source /usr/local/Ascend/cann/set_env.sh",
    ),
    "no compiler": (State(compiler=None), "bishengir-compile", "set_env.sh"),
    "no driver": (
        State(torch_npu=f"raise ImportError({NO_HCCL.replace('hccl', 'ascend_hal')!r})\n"),
        "torch_npu",
        "Install the NPU's driver",
    ),
    "wrong pair": (
        State(torch_npu_version="2.9.0.post2"),
        "versions",
        f"pip install 'torch_npu=={MINOR}.*'",
    ),
    "no torch_npu": (State(torch_npu=None), "torch_npu", f"pip install 'torch_npu=={MINOR}.*'"),
    "no device": (
        State(torch_npu=SIMULATED + "simulated_npu.active = False\n"),
        "device",
        "`npu-smi info` must list the device",
    ),
    "a wrong result": (
        State(torch_npu=SIMULATED + "interpreter.tl.rsqrt = lambda x: x\n"),
        "kernel",
        "docs/ascend.md says how to send the report",
    ),
}


@pytest.mark.parametrize(("state", "check", "cure"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_state_is_named_with_its_cure(start, tmp_path, state, check, cure):
    done = start(state, "-m", "liger_ops", "--npu")
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    found = outcomes(done.stdout)
    assert found.keys() == checks.CHECKS.keys()
    failed = [name for name, (state, _) in found.items() if state == checks.FAILED]
    # The cause is the first failure; without CANN there is no compiler either.
    assert failed == ([check] if state.home else [check, "bishengir-compile"]), done.stdout
    assert all(part in found[check][1] for part in cure.split(" ... "))
    report = json.loads((tmp_path / "work" / "report.json").read_text())
    assert [c["name"] for c in report["checks"] if c["state"] == checks.FAILED] == failed


@pytest.mark.parametrize(
    ("header", "passed", "fits"),
    [
        ("#if !defined(_MSC_VER) && __cplusplus < 202002L", "-std=c++17", False),
        ("    (!defined(_MSC_LANG) && __cplusplus < 202002L)", "-std=c++20", True),
        ("#if !defined(_MSC_VER) && __cplusplus < 201703L", "-std=c++17", True),
        # The header says nothing: torch's version decides.
        ("", "-std=c++17", torch.__version__.split(".")[:2] < ["2", "14"]),
    ],
)
def test_the_launchers_standard_is_compared_with_the_headers(
    tmp_path, monkeypatch, header, passed, fits
):
    backend, aten = tmp_path / "triton/backends/ascend", tmp_path / "torch/include/ATen"
    for folder in (backend, aten):
        folder.mkdir(parents=True)
    (backend / "utils.py").write_text(f'cc_cmd += ["{passed}", "-shared"]')
    (aten / "ATen.h").write_text(header)
    monkeypatch.setattr(checks, "folder_of", lambda package: tmp_path / package)
    monkeypatch.setenv("CC", sys.executable)
    if fits:
        assert "triton-ascend compiles its launcher as C++" in checks.launcher_compiles()
    else:
        with pytest.raises(checks.Failed, match="as C..17, torch needs C..20") as failed:
            checks.launcher_compiles()
        assert failed.value.cure == cures.standard()


NO_CANN = BROKEN["no CANN"][0]
REASON = f"torch_npu does not load: ImportError: {NO_HCCL}. Run `source /usr/local/Ascend/cann"


def test_a_description_says_why_nothing_imports(start):
    done = start(BROKEN["no pybind11"][0], "-m", "liger_ops")
    assert done.returncode == 0, done.stderr
    count = len([n for n, op in library.OPS.items() if op.definition.__module__ in sys.modules])
    assert f"npu: 0 of {count} ops (No module named 'pybind11'. Run `pip install" in done.stdout


def test_a_description_counts_the_kernels_that_import(start):
    done = start(State(), "-m", "liger_ops", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["best_device"] == "npu"
    assert report["kernels"]["npu"] == list(report["ops"])
    assert report["kernels"]["cuda"] == []
    assert report["without_kernels"] == {"cuda": "triton-ascend is installed in place of triton"}


def test_a_description_survives_a_torch_that_fails_to_load_torch_npu(start):
    done = start(NO_CANN, "-m", "liger_ops")
    assert done.returncode == 0, done.stderr
    assert REASON in done.stdout


def test_torch_alone_does_not_survive_it(start):
    """Otherwise the test above would pass without `liger_ops.ascend.autoload`."""
    done = start(NO_CANN, "-c", "import torch")
    assert done.returncode == 1
    assert "Failed to load the backend extension: torch_npu" in done.stderr


def test_the_bench_says_why_torch_npu_fails(start):
    done = start(NO_CANN, "-m", "liger_ops.bench", "--device", "npu")
    assert done.returncode == 2
    assert done.stderr.startswith(f"python -m liger_ops.bench: {REASON}")
    assert done.stderr.count("\n") == 1


def test_infer_device_says_why_torch_npu_fails(start):
    code = "import liger_ops; liger_ops.infer_device()"
    done = start(NO_CANN, "-c", code, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert done.returncode == 1
    assert REASON in done.stderr.splitlines()[-1]


def test_a_first_call_says_why_its_kernels_do_not_import(start):
    code = "from liger_ops import library; library.load('npu')"
    done = start(State(fails=NO_LANGUAGE), "-c", code)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert f"the import of the kernels for npu failed: {NO_LANGUAGE}. Run `pip uninstall" in last


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--npu", "--json"], "--npu goes with --report alone"),
        (["--report", "x.json"], "--report goes with --npu alone"),
    ],
    ids=str,
)
def test_options_that_do_not_go_together_are_refused(tmp_path, arguments, sentence):
    done = subprocess.run(
        [sys.executable, "-m", "liger_ops", *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and sentence in done.stderr
    assert not [*tmp_path.iterdir()]


def test_a_report_has_no_secrets() -> None:
    given = {
        "ASCEND_HOME_PATH": "/a",
        "ASCEND_TOKEN": "secret",
        "HF_TOKEN": "secret",
        "LD_LIBRARY_PATH": "/b",
        "PATH": os.pathsep.join(["/usr/bin", "/usr/local/Ascend/cann/bin", "/home/me/bin"]),
    }
    kept = checks.variables(given)
    assert kept == {
        "ASCEND_HOME_PATH": "/a",
        "LD_LIBRARY_PATH": "/b",
        "PATH": "/usr/local/Ascend/cann/bin",
    }


@pytest.mark.parametrize(
    ("words", "arguments", "is_ours"),
    [
        (["python", "-m", "liger_ops", "--npu"], ["-m", "--npu"], True),
        (["python", "-m", "liger_ops.bench"], ["-m"], True),
        (["python", "-mliger_ops"], ["-m"], True),
        (["python", "-m", "pytest", "x"], ["-m", "x"], False),
        (["python", "train.py", "liger_ops"], ["train.py", "liger_ops"], False),
        (["python", "-c", "import liger_ops"], ["-c"], False),
    ],
    ids=str,
)
def test_autoload_is_off_for_this_packages_programs_alone(words, arguments, is_ours):
    assert autoload.runs_this_package(words, arguments) is is_ours


def test_an_error_without_a_known_cause_has_no_cure() -> None:
    assert cures.explained(ValueError("boom\nmore")) == "ValueError: boom"
    assert cures.cure_of("No module named 'decorator'") == "Run `pip install decorator`."
    chained = RuntimeError("Failed to load the backend extension: torch_npu. You can disable ...")
    chained.__cause__ = ImportError("libascend_hal.so: cannot open shared object file")
    assert cures.explained(chained).startswith("ImportError: libascend_hal.so")
    assert cures.explained(chained).endswith(cures.driver())
