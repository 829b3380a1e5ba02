"""Gated MLPs: the activation between the projections becomes one op.

A gated MLP calls one or two projections of its input, and a third of what an activation makes of
those. Its class is overridden with a forward that calls the same children and the op. What the
children are does not matter: linear maps, quantised or with adapters, wrapped before or after.
"""

from __future__ import annotations

import copy
import functools
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from .. import library
from . import classes
from .activation_probe import Activation, find
from .planning import Plan
from .probing import (
    NotAnOp,
    Probes,
    attributes_key,
    first_line,
    has_hooks,
    leaf_key,
    numbers_of,
    own_attributes,
    uniform,
)

KIND = "gated MLP"

# What a reader of the report takes for a gated activation (and not "Glue"), and what may have one.
GATED_NAME = re.compile(r"GLU|[Gg]lu(?!e)")
MLP_NAME = re.compile(r"mlp|feedforward|ffn", re.IGNORECASE)

# Of all projections, and of the input, where one of them does not tell its own.
ANY_WIDTH = 48


@dataclass(frozen=True)
class MLP:
    """What a gated MLP computes: the children that it calls, in order, and the activation.

    down(activation(*projections(x))) * multiplier
    """

    projections: tuple[str, ...]
    activation: Activation
    down: str
    multiplier: float


def plan(model: nn.Module) -> Plan:
    """Override the forward of every gated MLP of a model."""
    probes = Probes()

    def look(plan: Plan, name: str, module: nn.Module) -> None:
        if KIND in classes.overrides(module) or not _may_be_one(module):
            return
        try:
            mlp = _found(probes, module)
        except NotAnOp:
            if not _looks_gated(module):
                return
            raise
        plan.fuse(name, module, mlp.activation.op, dict(mlp.activation.options))
        plan.changes.append(lambda: classes.override(module, KIND, mlp))

    return Plan("gated activation", model, look)


def _found(probes: Probes, module: nn.Module) -> MLP:
    obstacle = _obstacle(module)
    if obstacle is not None:
        raise NotAnOp(obstacle)
    return probes.once(_probe_key(module), lambda: _Copy(module).probe())


@classes.kind(KIND)
def methods(base: Any, mlp: MLP) -> dict[str, Callable[..., Any]]:
    """A forward like that of `base`, whose argument has the same name."""
    activation = functools.partial(
        library.OPS[mlp.activation.op].overload, **dict(mlp.activation.options)
    )
    gate_first, down, multiplier = mlp.activation.gate_first, mlp.down, mlp.multiplier
    first, second = mlp.projections[0], mlp.projections[-1]
    is_packed = len(mlp.projections) == 1

    def forward(self: Any, x: Tensor) -> Tensor:
        projection = getattr(self, first)(x)
        if is_packed:
            y = activation(projection)
        elif gate_first:
            y = activation(projection, getattr(self, second)(x))
        else:
            y = activation(getattr(self, second)(x), projection)
        y = getattr(self, down)(y)
        return y if multiplier == 1.0 else y * multiplier

    return {"forward": classes.in_place_of(base.forward, forward)}


def _projections(module: nn.Module) -> dict[str, nn.Module]:
    """The children that hold numbers, and may be projections. Others belong to the activation."""
    return {
        name: child
        for name, child in module._modules.items()
        if child is not None
        and (any(True for _ in child.parameters()) or any(True for _ in child.buffers()))
    }


def _may_be_one(module: nn.Module) -> bool:
    return len(_projections(module)) in (2, 3) or _looks_gated(module)


def _looks_gated(module: nn.Module) -> bool:
    """Whether a reader of the report expects to find the module there. It decides nothing else."""
    class_name = classes.class_of(module).__name__
    if GATED_NAME.search(class_name):
        return True
    if not MLP_NAME.search(class_name):
        return False
    projections = list(_projections(module).values())
    if len(projections) == 3 or any("gate" in name for name in module._modules):
        return True
    if len(projections) != 2:
        return False
    packed, down = projections
    width, halves = getattr(down, "in_features", None), getattr(packed, "out_features", None)
    return width is not None and halves == 2 * width


def _probe_key(module: nn.Module) -> Any:
    """What a probe can depend on."""
    projections = _projections(module)
    children = tuple(
        (name, None if name in projections else leaf_key(child))
        for name, child in module._modules.items()
    )
    widths = tuple(_widths(projections)[1].items())
    return classes.class_of(module), attributes_key(module), children, widths


def _widths(projections: dict[str, nn.Module]) -> tuple[int, dict[str, int]]:
    """Of the input and of what each projection returns."""
    widths: dict[str, Any] = {
        name: getattr(child, "out_features", None) for name, child in projections.items()
    }
    inputs = [getattr(child, "in_features", None) for child in projections.values()]
    if all(isinstance(width, int) for width in (*widths.values(), *inputs)):
        return inputs[0] or ANY_WIDTH, widths
    return ANY_WIDTH, dict.fromkeys(widths, ANY_WIDTH)


def _obstacle(module: nn.Module) -> str | None:
    """Why a module's forward cannot be overridden, or its copy would not do what it does."""
    count = len(_projections(module))
    if count not in (2, 3):
        return f"it has {count} {'child' if count == 1 else 'children'} that may be projections"
    if isinstance(module, torch.jit.ScriptModule):
        return "it is a ScriptModule"
    if parametrize.is_parametrized(module):
        return "it is parametrized"
    if "forward" in vars(module):
        return "the instance has a forward of its own"
    own = [*module._parameters, *module._buffers]
    if own:
        return f"it has parameters or buffers of its own: {', '.join(own)}"
    for name, child in module.named_modules():
        if name.partition(".")[0] in _projections(module) or child is module:
            continue
        if has_hooks(child) or "forward" in vars(child):
            return f"{name}, which would not be called, has hooks or a forward of its own"
    arguments = list(inspect.signature(module.forward).parameters.values())
    if len(arguments) != 1 or arguments[0].kind is not arguments[0].POSITIONAL_OR_KEYWORD:
        names = (str(argument.replace(annotation=argument.empty)) for argument in arguments)
        return f"its forward takes ({', '.join(names)})"
    return None


class _Projection(nn.Module):
    """Stands in a copy for a projection: returns a chosen tensor, and notes what it was given."""

    def __init__(self, name: str, calls: list[tuple[str, Tensor]]) -> None:
        super().__init__()
        self.name = name
        self.calls = calls
        self.value = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(x, Tensor):
            raise NotAnOp(f"{self.name} is given {type(x).__name__}, not a tensor")
        self.calls.append((self.name, x))
        return self.value


class _Copy:
    """A copy of a module whose projections are stand-ins."""

    def __init__(self, module: nn.Module) -> None:
        self.numbers = numbers_of(module)
        self.width, self.widths = _widths(_projections(module))
        self.calls: list[tuple[str, Tensor]] = []
        self.copy = object.__new__(classes.class_of(module))
        try:
            children = {
                name: _Projection(name, self.calls) if name in self.widths else copy.deepcopy(child)
                for name, child in module._modules.items()
            }
        except Exception as error:
            raise NotAnOp(f"it cannot be copied: {first_line(error)}") from None
        vars(self.copy).update(vars(module), _modules=children)
        self.projections: tuple[str, ...] = ()
        self.down = ""
        self.multiplier = 1.0

    def probe(self) -> MLP:
        x = uniform((2, 3, self.width), seed=8)
        values = {name: uniform((2, 3, n), seed=9) for name, n in self.widths.items()}
        self.called(x, values, training=False)
        names = [name for name, _ in self.calls]
        if len(names) not in (2, 3) or len(set(names)) < len(names):
            raise NotAnOp(
                f"it calls {', '.join(names) or 'nothing'}, not one or two projections and a third"
            )
        *projections, self.down = names
        self.projections = tuple(projections)
        before = own_attributes(self.copy)
        activation = find(self.run, [self.widths[name] for name in projections], self.numbers)
        after = own_attributes(self.copy)
        if list(map(id, before.values())) != list(map(id, after.values())):
            raise NotAnOp("its forward changes its attributes")
        return MLP(self.projections, activation, self.down, self.multiplier)

    def run(self, projections: Sequence[Tensor], training: bool) -> Tensor:
        """What reaches the last projection, when the first return the given tensors."""
        rows, dtype = projections[0].shape[:-1], projections[0].dtype
        x = uniform((*rows, self.width), seed=8).to(dtype)
        values = dict(zip(self.projections, projections, strict=True))
        values[self.down] = uniform((*rows, self.widths[self.down]), seed=9).to(dtype)
        result = self.called(x, values, training)
        *before, (last, y) = self.calls
        if (*(name for name, _ in before), last) != (*self.projections, self.down):
            raise NotAnOp("it does not call its projections in one order")
        if not all(given.dtype is dtype and torch.equal(given, x) for _, given in before):
            raise NotAnOp("it changes its input before it projects it")
        for multiplier in (1.0, *self.numbers):
            expected = values[self.down] * multiplier
            if result.dtype is dtype and torch.equal(result, expected):
                self.multiplier = multiplier
                return y
        raise NotAnOp(f"it changes what {self.down} returns")

    def called(self, x: Tensor, values: dict[str, Tensor], training: bool) -> Tensor:
        self.calls.clear()
        for name, value in values.items():
            getattr(self.copy, name).value = value
        try:
            # Not called as a module: that would run its hooks.
            result = self.copy.train(training).forward(x)
        except NotAnOp:
            raise
        except Exception as error:
            raise NotAnOp(f"it fails on the CPU: {first_line(error)}") from None
        if not isinstance(result, Tensor):
            raise NotAnOp(f"it returns {type(result).__name__}, not a tensor")
        return result
