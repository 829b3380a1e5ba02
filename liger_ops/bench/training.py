"""Train a model on the same batches untouched and with liger_ops, and compare."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import library
from ..device import MIB, Effort, MeasuredDevice, events_of, spread

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


def drawn(text: bytes, size: tuple[int, int, int], seed: int, device: str) -> Tensor:
    """Draw batches from random positions of a text, whose bytes are the tokens. `size` and the
    result's shape are (steps, rows, tokens of a row)."""
    steps, rows, length = size
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().to(device)
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - length + 1, (steps, rows, 1), generator=generator)
    return tokens[(starts + torch.arange(length)).to(device)]


def train(
    model: torch.nn.Module,
    loss_of: Callable[[Tensor], Tensor],
    batches: Iterable[Tensor],
    steps: int,
    rate: float,
) -> tuple[list[float], list[float]]:
    """Train a model for `steps` batches with AdamW and a learning rate that rises, then falls to 0.
    Return the loss and the milliseconds of each step.

    The optimizer keeps float32 parameters: in bfloat16 a norm's weight, which starts at 1, would
    lose every update below 1/256. For a float32 model they are the model's own parameters.
    """
    parameters = list(model.parameters())
    masters = [parameter.detach().float() for parameter in parameters]
    optimizer = torch.optim.AdamW(masters, lr=rate, betas=(0.9, 0.95))
    share = lambda step: min((step + 1) / min(10, steps), 1) * (1 - step / steps)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share)
    losses: list[float] = []
    rest = iter(batches)

    def step() -> None:
        loss = loss_of(next(rest))
        loss.backward()
        for parameter, master in zip(parameters, masters, strict=True):
            gradient, parameter.grad = parameter.grad, None
            master.grad = None if gradient is None else gradient.float()
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            for parameter, master in zip(parameters, masters, strict=True):
                parameter.copy_(master)
        losses.append(loss.item())

    device = MeasuredDevice(parameters[0].device.type)
    return losses, device.times(step, Effort(steps, seconds=float("inf")))


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
