"""`python -m liger_ops` runs as a user runs it, and reports simulated machines correctly."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import liger_ops
from liger_ops import library
from liger_ops.__main__ import as_text
from liger_ops.environment import PACKAGES, describe

ROOT = Path(__file__).parents[2]


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "liger_ops", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])},
        capture_output=True,
        text=True,
    )


def op_names() -> list[str]:
    """The names of the package's own ops; other tests of this process may have defined more."""
    return [n for n, op in library.OPS.items() if op.definition.__module__.startswith("liger_ops.")]


def installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate torch.cuda of a machine with two GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU number {index}")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))


def test_text_names_versions_devices_and_what_works(tmp_path):
    done = run(tmp_path)
    assert done.returncode == 0, done.stderr
    facts = dict(line.split(maxsplit=1) for line in done.stdout.splitlines() if " " in line)
    assert facts["liger_ops"].startswith(f"{liger_ops.__version__}, sources ")
    versions = facts["versions"].split(", ")
    assert versions[0] == f"python {'.'.join(map(str, sys.version_info[:3]))}"
    for package, version in zip(PACKAGES, versions[1:], strict=True):
        assert version == f"{package} {installed(package) or 'is missing'}"
    assert facts["devices"].startswith("cpu:0 ")
    assert len(done.stdout.splitlines()) <= 10
    if not torch.cuda.is_available():
        assert f"all {len(op_names())} ops, by their definitions" in done.stdout
        assert facts["next"].startswith("python -c")


def test_json_is_what_describe_returns(tmp_path):
    done = run(tmp_path, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["versions"].keys() == {"python", *PACKAGES}
    assert report["versions"]["torch"] == installed("torch")
    assert list(report["ops"]) == op_names()
    assert report["kernels"].keys() == library.DEVICES.keys()
    assert report["problem"] is None
    assert report["liger_ops"]["folder"] == str(ROOT / "liger_ops")


@pytest.mark.parametrize("arguments", [["--jsn"], ["rms_norm"], ["--json", "x"]], ids=" ".join)
def test_an_unknown_argument_gets_a_sentence(tmp_path, arguments):
    done = run(tmp_path, *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert f"unrecognized arguments: {arguments[-1]}" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_gpu_is_listed_with_the_kernels_that_would_run(gpu):
    report = describe()
    assert report["best_device"] == "cuda"
    assert report["devices"]["cuda"] == [
        {"name": "GPU number 0", "capability": "9.0"},
        {"name": "GPU number 1", "capability": "9.0"},
    ]
    for name, op in library.OPS.items():
        assert report["ops"][name]["cpu"] == "definition"
        assert report["ops"][name]["cuda"] == library.implementation(op, "cuda")
    assert report["kernels"]["cuda"] == [n for n, op in library.OPS.items() if "cuda" in op.kernels]
    text = as_text(report)
    assert "cuda:1 GPU number 1 (9.0)" in text and len(text.splitlines()) <= 10
    assert "python -m liger_ops.bench step --model" in text
    assert report["ops"]["rms_norm"]["cuda"] == "lowering.cuda.norms.rms_norm"
    assert "lowering.cuda.norms.rms_norm" in as_text(report, ops=True).removeprefix(text)


def test_a_package_that_does_not_import_is_reported(tmp_path):
    (tmp_path / "torch_npu.py").write_text("raise ImportError('libascendcl.so: not found')\n")
    done = run(tmp_path)
    assert done.returncode == 0, done.stderr
    facts = dict(line.split(maxsplit=1) for line in done.stdout.splitlines() if " " in line)
    reason = "ImportError: torch_npu does not load: ImportError: libascendcl.so: not found. "
    assert facts["problem"].startswith(reason)
    assert "set_env.sh" in facts["problem"]
