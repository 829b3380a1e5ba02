"""Measure how a model's loss and gradients change when its graph is rewritten.

The model runs three times on one batch, forward and backward: unchanged, rewritten, and unchanged
with all arithmetic in a wider dtype. The third run is the truth that both others are compared with.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from ...torch_private import aot_eager
from . import rewrite
from .padding import assume_what_is_seen
from .wider import Wide

# Allowed difference of sums in another order, in units of float32's epsilon.
SUMS = 8
# A gradient that is zero up to rounding, such as that of a key's bias, is measured relative to this
# share of the norm of all gradients.
SMALLEST_SHARE = 1e-3
# Allowed difference without a truth, in units of the dtype's epsilon.
ROUNDINGS = 64

Run = Callable[..., Any]


@dataclass(frozen=True)
class Difference:
    """How far a value moved, as the norm of the difference divided by the norm of the value.

    Attributes:
        name: "loss", or the name of the parameter or input whose gradient it is.
        difference: between the rewritten and the unchanged model.
        error: between the rewritten model and the truth; None without a truth.
        own_error: between the unchanged model and the truth, which is the error of its dtype.
        eps: the epsilon of the narrowest dtype in the graphs.
    """

    name: str
    difference: float
    error: float | None
    own_error: float | None
    eps: float

    @property
    def agrees(self) -> bool:
        """Whether the error is at most twice that of the unchanged model, plus a rounding.

        Without a truth: whether the difference is within ROUNDINGS of the unchanged model.
        """
        if self.error is None or self.own_error is None:
            return self.difference <= ROUNDINGS * self.eps
        return self.error <= 2 * self.own_error + self.eps + SUMS * torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class Verification:
    """The measurement that `explain(verify=True)` makes.

    Attributes:
        differences: those of the loss and of each gradient, the largest first.
        truth: the dtype of the truth, or None.
        why_no_truth: the reason if it is None, one clause.
    """

    differences: tuple[Difference, ...]
    truth: torch.dtype | None
    why_no_truth: str = ""

    @property
    def agrees(self) -> bool:
        """Whether the loss and every gradient agree."""
        return all(one.agrees for one in self.differences)

    def __str__(self) -> str:
        verdict = "agree" if self.agrees else "DO NOT AGREE"
        lines = [f"loss and {len(self.differences) - 1} gradients {verdict}"]
        if self.truth is None:
            lines.append(f"  no run in a wider dtype to compare with: {self.why_no_truth}")
        wrong = [one for one in self.differences if not one.agrees]
        loss = [one for one in self.differences if one.name == "loss" and one.agrees]
        for one in (*loss, *(wrong or [x for x in self.differences if x.name != "loss"][:3])):
            lines.append(f"  {one.name}: differs by {one.difference:.1e} from the unchanged model")
            if one.error is not None:
                lines[-1] += f"; from {self.truth} by {one.error:.1e}, before {one.own_error:.1e}"
            lines[-1] += f"; eps {one.eps:.1e}"
        return "\n".join(lines)


def verify(model: Run, args: Sequence[Any], kwargs: dict[str, Any], kept: Any) -> Verification:
    """Measure a model on a batch; `kept(model)` is a context that restores its state."""
    return _Runs(model, args, kwargs, kept).compared()


class _Runs:
    """Runs of one model on one batch."""

    def __init__(self, model: Run, args: Sequence[Any], kwargs: dict[str, Any], kept: Any) -> None:
        self.model, self.args, self.kwargs, self.kept = model, args, kwargs, kept
        self.is_random = False
        self.narrowest = torch.float64

    def compared(self) -> Verification:
        before, after = self.measured(aot_eager), self.measured(self.rewritten)
        eps = torch.finfo(self.narrowest).eps
        why = "the model draws random numbers" if self.is_random else "it is of float64"
        for dtype in () if self.is_random else (torch.float64, torch.float32):
            if torch.finfo(self.narrowest).bits >= torch.finfo(dtype).bits:
                continue
            try:
                truth = self.measured(functools.partial(Wide, dtype))
                return Verification(_compared(before, after, truth, eps), dtype)
            except Exception as error:
                why = f"{type(error).__name__} in {dtype}: {str(error).strip().splitlines()[0]}"
        return Verification(_compared(before, after, None, eps), None, why)

    def measured(self, backend: Run) -> dict[str, Tensor]:
        torch.compiler.reset()
        with self.kept(self.model):
            random = _random_state()
            compiled = torch.compile(self.model, backend=backend)
            results = _results(self.model, compiled, self.args, self.kwargs)
            self.is_random = not all(map(torch.equal, random, _random_state()))
        return results

    def rewritten(self, module: fx.GraphModule, inputs: list[Any]) -> Run:
        found = [self.narrowest, *_dtypes(module)]
        self.narrowest = min(found, key=lambda dtype: torch.finfo(dtype).bits)
        assume_what_is_seen(module, inputs)
        rewrite(module)
        return aot_eager(module, inputs)


def _dtypes(module: fx.GraphModule) -> set[torch.dtype]:
    """The floating-point dtypes of the values in a graph."""
    values = [
        pytree.tree_leaves(node.meta.get("example_value"))
        for part in module.modules()
        if isinstance(part, fx.GraphModule)
        for node in part.graph.nodes
    ]
    tensors = [x for leaves in values for x in leaves if isinstance(x, Tensor)]
    return {x.dtype for x in tensors if x.is_floating_point()}


def _random_state() -> list[Tensor]:
    states = [torch.get_rng_state()]
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        states.append(torch.get_device_module(accelerator).get_rng_state())
    return states


def _results(
    model: Run, run: Run, args: Sequence[Any], kwargs: dict[str, Any]
) -> dict[str, Tensor]:
    """The loss, and its gradient for every leaf that it depends on."""
    with torch.enable_grad():
        loss = _loss(run(*args, **kwargs))
    names = _names(model, args, kwargs)
    leaves = {names.get(id(leaf), f"leaf {i}"): leaf for i, leaf in enumerate(_leaves(loss))}
    gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    found = {"loss": loss.detach()}
    found.update({name: dx for name, dx in zip(leaves, gradients, strict=True) if dx is not None})
    return found


def _loss(output: Any) -> Tensor:
    """The output's `loss`, the output itself if scalar, or a weighted sum of its tensors."""
    named = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(named, Tensor):
        return named
    tensors = [x for x in pytree.tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]
    if not tensors:
        raise ValueError("explain: verify=True needs an output with a gradient, and there is none")
    if len(tensors) == 1 and tensors[0].dim() == 0:
        return tensors[0]
    total = torch.zeros((), dtype=torch.float64, device=tensors[0].device)
    for x in tensors:
        steps = torch.arange(x.numel(), device=x.device, dtype=torch.float64)
        total = total + (x.double() * torch.sin(1 + steps).reshape(x.shape)).sum().to(total.device)
    return total


def _leaves(loss: Tensor) -> list[Tensor]:
    found: dict[int, Tensor] = {}
    waiting, seen = [loss.grad_fn], set()
    while waiting:
        function = waiting.pop()
        if function is None or function in seen:
            continue
        seen.add(function)
        variable = getattr(function, "variable", None)
        if isinstance(variable, Tensor):
            found[id(variable)] = variable
        waiting += [one for one, _ in function.next_functions]
    return list(found.values())


def _names(model: Run, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[int, str]:
    """The names of leaves: parameter names from the module, argument names from the call."""
    modules = [model] if isinstance(model, nn.Module) else _enclosed(model)
    names = {id(p): name for module in modules for name, p in module.named_parameters()}
    return {**names, **{id(x): f"argument {key}" for key, x in [*enumerate(args), *kwargs.items()]}}


def _enclosed(function: Any) -> list[nn.Module]:
    """The modules that a function refers to, in its closure or globals."""
    function = getattr(function, "__func__", function)
    if not inspect.isfunction(function):
        return []
    variables = inspect.getclosurevars(function)
    return [
        one
        for one in (*variables.nonlocals.values(), *variables.globals.values())
        if isinstance(one, nn.Module)
    ]


def _compared(
    before: dict[str, Tensor], after: dict[str, Tensor],
    truth: dict[str, Tensor] | None, eps: float,
) -> tuple[Difference, ...]:  # fmt: skip
    if before.keys() != after.keys():
        missing = sorted(before.keys() ^ after.keys())
        raise RuntimeError(
            f"explain: the rewritten model lost or made the gradient of {missing[0]}"
        )
    wide = {name: value.double() for name, value in (truth or before).items()}
    whole = torch.stack([x.norm().cpu() for name, x in wide.items() if name != "loss"]).norm()
    found = []
    for name, exact in wide.items():
        scale = max(exact.norm().item(), SMALLEST_SHARE * whole.item(), 1e-300)

        def distance(x: Tensor, y: Tensor, scale: float = scale) -> float:
            apart = (x.double() - y.double()).norm().item() / scale
            return apart if apart == apart else float("inf")

        error, own = (distance(x[name], exact) if truth else None for x in (after, before))
        found.append(Difference(name, distance(after[name], before[name]), error, own, eps))
    return tuple(sorted(found, key=lambda one: -one.difference))
