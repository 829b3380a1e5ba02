"""Compare a training step through the `liger` backend with the same step of the model itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed

import liger_ops
from compiled_models import Inner, aot_eager, loss_of, results

# Mode -> `use_reentrant` of its checkpoints. A plain step is compiled as a function that uses the
# logits only for the loss; with checkpoints the model itself is compiled.
MODES: dict[str, bool | None] = {"plain": None, "checkpointed": False, "reentrant": True}

# The relative difference that float32 sums in another order may make through a few layers. A lost
# or repeated term makes 1e-2 or more.
NEAR = 1e-4


@dataclass(frozen=True)
class Model:
    """Functions that make a model, always with the same weights, and a batch for it."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], dict[str, Any]]


@dataclass(frozen=True)
class Outcome:
    """The ops in the graphs of a mode, and the difference of its results from the model's own."""

    ops: Counter[str]
    difference: float


class CannotTrain(Exception):
    """The model itself fails, without rewrites."""


def randomized(model: nn.Module) -> nn.Module:
    """Set weights large enough that every part of the model matters, and training mode.

    A new norm's weight is all ones or zeros, which hides a wrong offset; a new projection's is so
    small that attention is nearly uniform, which hides a wrong mask or rotation.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            if parameter.dim() < 2:
                parameter.add_(0.3 * noise)
            else:
                convolution = parameter.dim() > 3
                inputs = parameter[0].numel() if convolution else parameter.shape[-1]
                parameter.copy_(noise * inputs**-0.5)
    return model.train()


def check(
    model: Model, mode: str, expected: dict[str, Tensor], run: Callable[..., Any] = aot_eager
) -> Outcome:
    """Train one step with the `liger` backend, whose graphs `run` compiles, and compare loss and
    gradients with `expected`, the model's own.

    If they differ, or the backend raises, they are compared with those of the model compiled
    without rewrites.

    Raises:
        AssertionError: the results differ, or the backend raises where the model itself does not.
        CannotTrain: the model itself cannot be compiled or trained in this mode.
    """
    inner = Inner(run)
    options = {"inner_backend": inner, "rewrites": "all", "strict": True}
    actual, problem = None, None
    try:
        actual = step(model, mode, backend=liger_ops.backend, options=options)
    except Exception as error:
        problem = error
    apart = difference(actual, expected)
    if apart > NEAR:
        try:
            compiled = step(model, mode, backend="aot_eager")
        except Exception as error:
            raise CannotTrain(one_line(error)) from error
        if problem is not None:
            raise AssertionError(one_line(problem)) from problem
        apart = difference(actual, compiled)
    assert apart <= NEAR, f"{apart:.1e} from the model as it is"
    return Outcome(sum(inner.counts, Counter()), apart)


def own_results(model: Model) -> dict[str, Tensor]:
    """Return the loss and gradients of the model itself, run eagerly.

    Raises:
        CannotTrain: the model raises, or its loss is missing or not finite.
    """
    try:
        eager = step(model, "plain")
    except Exception as error:
        raise CannotTrain(one_line(error)) from error
    if not all(bool(value.isfinite().all()) for value in eager.values()):
        raise CannotTrain("its loss or a gradient is not finite")
    return eager


def step(model: Model, mode: str, **how: Any) -> dict[str, Tensor]:
    """Return the loss and gradients of one step, compiled with the arguments `how`, or eager."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = randomized(model.build())
    loss = loss_of(module)
    use_reentrant = MODES[mode]
    if use_reentrant is not None:
        module.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        loss = loss_of(torch.compile(module, **how) if how else module)
    elif how:
        loss = torch.compile(loss, **how)
    return results(module, loss, model.batch())


def difference(actual: dict[str, Tensor] | None, expected: dict[str, Tensor]) -> float:
    """Return the largest relative difference of loss and gradients, infinite if one is missing.

    Differences are norms over tensors. A gradient that is zero up to rounding, such as that of a
    key's bias, is measured relative to a thousandth of the whole model's gradient.
    """
    if actual is None or actual.keys() != expected.keys():
        return float("inf")
    norms = [value.norm() for name, value in expected.items() if name != "loss"]
    whole = torch.stack(norms).norm()
    apart = [
        (actual[name] - value).norm() / max(value.norm(), 1e-3 * whole)
        for name, value in expected.items()
    ]
    return torch.stack(apart).nan_to_num(float("inf")).max().item()


def one_line(error: Exception) -> str:
    """Return the first line of an error; for an error of a backend, that of its cause."""
    while isinstance(error, BackendCompilerFailed):
        error = error.inner_exception
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:160]}" if lines else type(error).__name__
