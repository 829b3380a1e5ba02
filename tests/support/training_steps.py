"""A step of training through the `liger` backend, held to the same step of the model as it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed

import liger_ops
from compiled_models import Inner, loss_of, results

# How a model is trained, and its `use_reentrant`. A plain step is compiled as a function, in which
# the logits go nowhere but into the loss; of one with checkpoints the model itself is compiled.
MODES: dict[str, bool | None] = {"plain": None, "checkpointed": False, "reentrant": True}

# The same sums in another order, in float32, through a few layers. What is lost or done twice shows
# from a hundredth on.
NEAR = 1e-4


@dataclass(frozen=True)
class Model:
    """How a model is made, with the same weights every time, and a batch of it."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], dict[str, Any]]


@dataclass(frozen=True)
class Outcome:
    """The ops that one mode's graphs held, and how far its results were from the model's own."""

    ops: Counter[str]
    difference: float


class CannotTrain(Exception):
    """The model as it is fails, without rewrites."""


def randomized(model: nn.Module) -> nn.Module:
    """The model for training, with weights large enough that every part of it matters.

    A new norm's weight is all ones or zeros, which hides a wrong offset; a new projection's are so
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


def check(model: Model, mode: str, expected: dict[str, Tensor]) -> Outcome:
    """Train for one step by the `liger` backend: loss and gradients are `expected`, the model's
    own.

    Where they are not, or the backend raises, they are held to those of the model compiled without
    rewrites.

    Raises:
        AssertionError: the results differ, or the backend raises where the model as it is does not.
        CannotTrain: the model as it is cannot be compiled or trained so.
    """
    inner = Inner()
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
    """The loss and gradients of the model as it is, run eagerly.

    Raises:
        CannotTrain: it raises, or gives no loss or one that is not finite.
    """
    try:
        found = step(model, "plain")
    except Exception as error:
        raise CannotTrain(one_line(error)) from error
    if not all(bool(value.isfinite().all()) for value in found.values()):
        raise CannotTrain("its loss or a gradient is not finite")
    return found


def step(model: Model, mode: str, **how: Any) -> dict[str, Tensor]:
    """The loss and gradients of one step, compiled as `how` says, or eager."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    made = randomized(model.build())
    loss = loss_of(made)
    use_reentrant = MODES[mode]
    if use_reentrant is not None:
        made.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        loss = loss_of(torch.compile(made, **how) if how else made)
    elif how:
        loss = torch.compile(loss, **how)
    return results(made, loss, model.batch())


def difference(actual: dict[str, Tensor] | None, expected: dict[str, Tensor]) -> float:
    """The largest of loss and gradients, relative, each as a norm; infinite where one is missing.

    A gradient that is zero but for rounding, such as that of a key's bias, is measured against a
    thousandth of the gradient of the whole model.
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
    """What an error says first; of one that a backend raised, what that one says."""
    while isinstance(error, BackendCompilerFailed):
        error = error.inner_exception
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:160]}" if lines else type(error).__name__
