"""The measurements of a report in their order, and the records that a run keeps of them."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...compile_cache import package_hash
from ...device import MeasuredDevice
from ..command_line import PACKAGES
from ..steps.model import FOR, README_WAYS, SHAPES
from ..steps.models import BATCHES
from ..workloads import ENTRIES

PARTS = ("steps", "curves", "heads", "kernels")
ON_A_CPU = "not measured on a CPU"

FAMILIES = (
    *("llama-3.2-1b", "qwen3", "gemma3", "gpt-oss", "qwen3-moe"),
    *("mistral", "gemma2", "llama4", "deepseek-v3", "gpt-neox-1b"),
)
WAYS = ("eager", "compile", "liger-kernel", "liger", "fused")
MASKED = BATCHES[1:]
# Under a mask, for the families of CURVES and for the others: the first way is compared with.
MASKED_WAYS, OTHER_MASKED_WAYS = ("compile", "liger-kernel", "liger", "fused"), ("compile", "liger")
# The families that are measured with the layers of the kernels hub, too.
HUB = FAMILIES[:2]
# The families whose loss curves are drawn, and the ways of each. The first two are untouched.
CURVES = FAMILIES[:4]
CURVE_WAYS = ("float32", "bfloat16", "fused", "liger")
HEADS = tuple(op for op in ENTRIES if op.startswith("linear_"))
HEAD_SHAPES = "llama-3.2-1b,qwen3-8b,gemma3-4b"
# The kernels of most models.
KERNELS = (
    *("rms_norm", "fused_add_rms_norm", "layer_norm", "swiglu", "geglu", "rope", "rms_norm_rope"),
    *("cross_entropy", "varlen_attention", "moe_experts", "log_prob", "embedding", "lora_linear"),
)
# The model whose shape an op is timed at, if it has one; otherwise at its first.
MODEL = "llama-3.1-8b"


class Measurement(NamedTuple):
    """A measurement: its part, and what is measured: of a step (shape, batch, way), of a curve
    (shape, way), of a head or kernel (op, shapes)."""

    part: str
    words: tuple[str, ...]
    quick: bool = False

    @property
    def name(self) -> str:
        words = "_".join((self.part, *self.words)).replace(",", "_")
        return f"quick_{words}" if self.quick else words

    def __str__(self) -> str:
        return " ".join((self.part, *self.words))

    @property
    def process(self) -> str:
        """Return the name of the process that makes it. Batches with a mask share one, and in a
        quick run, where most of the time is the start of a process, all but steps do."""
        if self.part == "steps":
            shape, batch, way = self.words
            return self.name if batch == "none" else f"steps_{shape}_masked_{way}"
        return "others" if self.quick else self.name


def _steps(
    shape: str, ways: Sequence[str], batches: Sequence[str] = BATCHES[:1], quick: bool = False
) -> list[Measurement]:
    return [
        Measurement("steps", (shape, batch, way), quick)
        for way in ways
        if shape in FOR.get(way, SHAPES)
        for batch in batches
    ]


def plan() -> list[Measurement]:
    """Return all measurements of a GPU, the most telling first."""
    first, *others = FAMILIES
    curves = [Measurement("curves", (family, way)) for family in CURVES for way in CURVE_WAYS]
    heads = [Measurement("heads", (op, HEAD_SHAPES)) for op in HEADS]
    kernels = [Measurement("kernels", (op, _shape(op))) for op in KERNELS]
    steps = [
        step
        for family in others
        for step in _steps(family, (*WAYS, "hub") if family in HUB else WAYS)
    ]
    masked = [
        step
        for family in FAMILIES
        for step in _steps(family, MASKED_WAYS if family in CURVES else OTHER_MASKED_WAYS, MASKED)
    ]
    one = len(CURVE_WAYS)
    return [
        *(*_steps(first, (*README_WAYS, "hub")), *curves[:one], *heads[:1], *kernels[:4], *steps),
        *(*curves[one:], *heads[1:], *kernels[4:], *masked),
    ]


def quick_plan(on_gpu: bool) -> list[Measurement]:
    """Return measurements of every part at tiny sizes. On a CPU, where a compilation of steps takes
    minutes, steps are eager."""
    step_ways = WAYS if on_gpu else ("eager", "fused")
    return [
        *_steps("tiny", step_ways, quick=True),
        *(Measurement("curves", (CURVES[0], way), True) for way in CURVE_WAYS),
        Measurement("heads", ("linear_cross_entropy", "16x16x32"), True),
        Measurement("kernels", ("rms_norm", "8x32"), True),
    ]


def _shape(op: str) -> str:
    entry = ENTRIES[op]
    shapes = (*entry.models.values(), *entry.figures, entry.small)
    return "x".join(map(str, entry.models.get(MODEL, shapes[0])))


@dataclass(frozen=True)
class Record:
    """A record: what came of a measurement, or `error`, the reason that nothing did; and where."""

    name: str
    result: dict[str, Any]
    error: str
    seconds: float
    device: str
    commit: str
    sources: str
    versions: dict[str, str]
    at: str


def record(
    measurement: Measurement, outcome: dict[str, Any], seconds: float, commit: str
) -> Record:
    """Return the record of an outcome, which has `error` if the measurement failed."""
    result = {name: value for name, value in outcome.items() if name != "error"}
    versions = {}
    for package in (*PACKAGES, "transformers", "nvidia-cudnn-frontend"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    at = time.strftime("%Y-%m-%d %H:%M:%S")
    here = (device_name(), commit, package_hash(), versions, at)
    return Record(measurement.name, result, str(outcome.get("error", "")), seconds, *here)


def store(folder: Path, stored: Record) -> None:
    """Write a record to a file with its name, which is never half a file."""
    path = folder / f"{stored.name}.json"
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(asdict(stored), indent=1) + "\n")
    os.replace(unfinished, path)


def load(folder: Path) -> dict[str, Record]:
    """Return the records of a folder by name.

    Raises:
        ValueError: a file has no record of this form, or the records are of several devices.
    """
    records = {}
    for path in sorted(folder.glob("*.json")):
        found = _read(path, path.read_text())
        records[found.name] = found
    devices = sorted({found.device for found in records.values()})
    if len(devices) > 1:
        raise ValueError(f"{folder} holds records of several devices: {', '.join(devices)}")
    return records


def read(folder: Path, name: str) -> Record | None:
    """Return the record of a measurement, if it was made."""
    path = folder / f"{name}.json"
    return _read(path, path.read_text()) if path.exists() else None


def save_all(file: Path, records: Mapping[str, Record]) -> None:
    """Write records to one file, a line each."""
    lines = (json.dumps(asdict(found)) for _, found in sorted(records.items()))
    file.write_text("".join(f"{line}\n" for line in lines))


def read_all(file: Path) -> list[Record]:
    """Return the records that `save_all` wrote.

    Raises:
        ValueError: a line has no record of this form.
    """
    return [_read(file, line) for line in file.read_text().splitlines()]


def _read(path: Path, text: str) -> Record:
    try:
        return Record(**json.loads(text))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} holds no record of a report: {error}") from None


def device_name() -> str:
    if torch.cuda.is_available():
        return MeasuredDevice("cuda").name
    return f"CPU ({platform.machine()})"


def is_cpu(device: str) -> bool:
    return device.startswith("CPU")


def commit_here() -> str:
    """Return the commit of this checkout, with a "+" if files of it are changed, or "" if the
    package is not in a checkout."""
    file = Path(__file__)

    def git(*words: str) -> str:
        command = ["git", "-C", str(file.parent), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", file.name)
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def batches_of(records: dict[str, Record], shapes: Sequence[str], quick: bool) -> list[str]:
    """Return the batches of which there is a record."""
    return [
        batch
        for batch in BATCHES
        if any(
            Measurement("steps", (shape, batch, way), quick).name in records
            for shape in shapes
            for way in README_WAYS
        )
    ]
