"""Train a model on the same batches untouched and with liger_ops, and compare."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import library
from ..device import MIB, events_of, spread

# The largest difference between two loss curves that passes, up to step EARLY_STEPS and after it.
# Training amplifies differences in rounding. Measured with examples/train_llama.py, tiny: float32
# on a CPU 1e-6 to step 100 and 1e-3 to step 200 at a constant rate; bfloat16 on an H200 1e-2 and
# 2e-2. llama-3.2-1b there: 2e-2.
EARLY_STEPS = 100
LOSS_BOUND = {torch.float32: (1e-4, 5e-2), torch.bfloat16: (5e-2, 2e-1)}


@dataclass(frozen=True)
class Training:
    """The record of a training run."""

    # Of each step; the first step includes compilation.
    losses: Tensor
    milliseconds: list[float]
    # The liger ops that a step runs.
    ops: Counter[str]
    # Of a step, above parameters and optimizer state.
    peak_bytes: int

    def __str__(self) -> str:
        text = f"loss {self.losses[0]:.3f} to {self.losses[-1]:.3f}"
        first, *rest = self.milliseconds
        text += f", first step {first / 1e3:.1f} s"
        if rest:
            text += f", then {spread(rest).p50:.1f} ms a step"
        return text


def ops_run(step: Callable[[], Any]) -> Counter[str]:
    """Return the liger ops that a step runs.

    The step must be compiled already, because tracing also runs every op.
    """
    names = (event.name().split("::") for event in events_of(step, memory=False))
    return Counter(name[1] for name in names if name[0] == library.NAMESPACE)


@dataclass(frozen=True)
class Comparison:
    untouched: Training
    changed: Training

    @property
    def difference(self) -> Tensor:
        return (self.untouched.losses - self.changed.losses).abs()

    @property
    def forward(self) -> Counter[str]:
        return self.changed.ops - self.backward

    @property
    def backward(self) -> Counter[str]:
        ops = self.changed.ops.items()
        return Counter({op: count for op, count in ops if op.endswith("_backward")})

    def rows(self) -> dict[str, str]:
        """Return the printed comparison: row name -> text."""
        untouched, changed = (run.peak_bytes / MIB for run in (self.untouched, self.changed))
        peaks = f"{untouched:,.1f} MiB untouched, {changed:,.1f} with liger_ops"
        return {
            "forward graph": counted(self.forward),
            "backward graph": counted(self.backward),
            "untouched": str(self.untouched),
            "with liger_ops": str(self.changed),
            "peak memory": f"{peaks}, beside parameters and optimizer",
            "difference": f"at most {self.difference.max():.1e}",
        }

    def checks(self, forward: Counter[str], dtype: torch.dtype) -> dict[str, bool]:
        """Return a dictionary: sentence -> whether it holds. The sentences are that the graphs run
        the ops in `forward` and their gradients, and that losses differ by at most the bound."""
        bounds = torch.where(torch.arange(len(self.difference)) < EARLY_STEPS, *LOSS_BOUND[dtype])
        names = {op: f"{op.removesuffix('_forward')}_backward" for op in forward}
        gradients = Counter({names[op]: count for op, count in forward.items()})
        return {
            f"the forward graph must hold {counted(forward)} and no other liger op": (
                self.forward == forward
            ),
            "the backward graph must hold the gradient of each once and no other liger op": (
                self.backward == gradients
            ),
            "the loss curves must not differ by more than the bound": bool(
                (self.difference <= bounds).all()
            ),
        }

    def plot(self, path: Path) -> None:
        """Plot both loss curves, and below them their difference."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 6), layout="constrained")
        curves, differences = figure.subplots(2, sharex=True, height_ratios=(2, 1))
        curves.plot(self.untouched.losses, linewidth=5, alpha=0.5, label="untouched")
        curves.plot(self.changed.losses, label="liger_ops")
        curves.set_ylabel("loss")
        curves.legend()
        # A logarithmic axis omits steps where the two losses are bitwise equal.
        differences.plot(self.difference, ".")
        if self.difference.any():
            differences.set_yscale("log", nonpositive="mask")
        differences.set(xlabel="step", ylabel="|difference|")
        figure.savefig(path, dpi=150)


def counted(ops: Counter[str]) -> str:
    return ", ".join(f"{count} x liger.{op}" for op, count in sorted(ops.items())) or "no liger op"


def reported(rows: Mapping[str, object], checks: Mapping[str, bool], program: str) -> int:
    """Print the rows, and the failed checks to standard error; return the exit status."""
    print("\n".join(f"{name:16}{value}" for name, value in rows.items()))
    failures = [sentence for sentence, holds in checks.items() if not holds]
    for sentence in failures:
        print(f"{program}: {sentence}", file=sys.stderr)
    return 1 if failures else 0


def inductor_works() -> bool:
    """Return whether Inductor can build C++ code for the CPU here."""
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    return bool(shutil.which(compiler)) and Path(sysconfig.get_path("include"), "Python.h").exists()
