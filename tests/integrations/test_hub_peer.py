"""The hub's report with another repository's layers: what it runs, and how it tells the outcomes.

A stand-in has the place of the repository. Kernels are defined as for a device, which the other
tests' TRITON_INTERPRET=1 prevents: they run in a process of their own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import peer_checks
import peer_layers
import peer_stand_in

COMMIT = ["-c", "user.name=n", "-c", "user.email=e", "commit", "-qm", "layers"]


def run(*args: str) -> str:
    done = subprocess.run(
        [sys.executable, peer_checks.__file__, *args],
        capture_output=True, text=True, env={**os.environ, "TRITON_INTERPRET": "0"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def source(tmp_path: Path) -> Path:
    source = tmp_path / "clone" / "liger-kernels"
    peer_stand_in.write(source)
    for command in (["init", "-q"], ["add", "."], COMMIT):
        subprocess.run(["git", *command], cwd=source, check=True)
    return source


def test_launches_are_traced_and_interpreted() -> None:
    """Results and gradients are PyTorch's, and a graph knows which tensors its launches write."""
    run()


def test_a_repository_is_laid_out(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "liger-kernels"
    origin = peer_layers.lay_out(source, folder)
    variant = folder / "build" / "torch-cpu"
    copied = sorted(file.name for file in variant.iterdir())
    assert copied == ["__init__.py", "layers.py", "metadata.json"]
    metadata = json.loads((variant / "metadata.json").read_text())
    assert (metadata["name"], metadata["version"]) == ("liger-kernels", origin["version"])
    assert origin["commit"].startswith("commit ") and origin["version"] == 3


def test_the_outcomes_of_models(source: Path, tmp_path: Path) -> None:
    """The stand-in's norm writes dx over dy, which OLMo 2 adds to its residual's, and its rotation
    is wrong; its tiled MLP breaks a graph; its loss has another signature."""
    pytest.importorskip("kernels", reason="needs the package kernels, which is optional")
    pytest.importorskip("transformers", reason="the models are transformers'")
    folder = tmp_path / "liger-kernels"
    peer_layers.lay_out(source, folder)
    lines = run(str(folder), "LlamaForCausalLM", "Olmo2ForCausalLM").splitlines()
    cells = {name: rest for name, *rest in (line.split(" | ") for line in lines)}
    for name, norm in (("LlamaForCausalLM", "equal"), ("Olmo2ForCausalLM", "**wrong**: ")):
        starts = (
            norm, "**wrong**: ", "equal", "**wrong**: ", norm, "equal",
            "**fails**: Unsupported: ",
            "**fails**: TypeError: Forward signature of `liger-kernels`",
        )  # fmt: skip
        for way, cell, start in zip(peer_layers.WAYS, cells[name], starts, strict=True):
            assert cell.startswith(start), (name, way, cell)
        assert cells[name][3].endswith(", RMSNorm kept")


def test_the_second_table(monkeypatch: pytest.MonkeyPatch) -> None:
    report: Any = pytest.importorskip("hub_report", reason="it imports transformers")
    monkeypatch.setattr(peer_layers, "version", lambda package: f"{package}'s")
    known = {
        "LlamaForCausalLM": ["equal", "none", "equal", "equal, RMSNorm kept", "none", *"xyz"],
        "Olmo2ForCausalLM": ["**wrong**: 1.2e+00", "none", "equal", "own forward kept", *"wxyz"],
    }
    text = peer_layers.section(known, {"version": 3, "commit": "commit abc of 2026-01-01"})
    assert text.startswith(peer_layers.HEADING)
    assert report.rows(text, len(peer_layers.WAYS)) == known
    assert "- norms, eager: 1 equal, 1 wrong.\n" in text
    assert "- rotary, eager: 2 without such a layer.\n" in text
    assert "- norms and rotary, compiled: 1 equal, 1 own forward kept.\n" in text
    assert "kernels kernels's" in text and "commit abc of 2026-01-01" in text
