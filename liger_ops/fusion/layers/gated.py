"""Gated MLPs: the activation between the projections becomes one op.

A gated MLP computes down(act(gate(x), up(x))), or the same with one projection of both. A gated
activation of diffusers (GEGLU, SwiGLU) has that one projection, and none after it. The class is
overridden with a forward that calls the same children and the op. The children may be anything:
linear layers, quantised or with adapters, wrapped before or after.
"""

from __future__ import annotations

import copy
import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from ... import library
from ...rewrites.engine.canonical import canonical
from .. import classes
from ..assumptions import Assumptions, Reads
from ..planning import Plan
from ..probing import NotAnOp, Probes, attributes_key, first_line, leaf_key, own_attributes
from ..trace import ANY_SIZES, UNCHANGED, Trace, unchanged
from .activation_trace import Activation, find

KIND = "gated MLP"

# Names of gated activations (but not "Glue") and of MLPs, which a reader expects in the report.
GATED_NAME = re.compile(r"GLU|[Gg]lu(?!e)")
MLP_NAME = re.compile(r"mlp|feedforward|ffn", re.IGNORECASE)

# Width of the input and of all projections if one of them does not tell its own.
ANY_WIDTH = 48


@dataclass(frozen=True)
class MLP:
    """The children that a gated MLP calls, in order, and its activation.

    down(activation(*projections(x))) * multiplier, or without down
    """

    projections: tuple[str, ...]
    activation: Activation
    down: str | None
    multiplier: float
    assumptions: Assumptions


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
    mlp = probes.once(_trace_key(module), lambda: _Copy(module).mlp())
    mlp.assumptions.check(module)
    return mlp


@classes.kind(KIND)
def methods(base: Any, mlp: MLP) -> dict[str, Callable[..., Any]]:
    """The methods of an overridden MLP: a forward whose argument has the same name as in `base`."""
    activation = functools.partial(
        library.OPS[mlp.activation.op].overload, **dict(mlp.activation.options)
    )
    gate_first, down, multiplier = mlp.activation.gate_first, mlp.down, mlp.multiplier
    first, second = mlp.projections[0], mlp.projections[-1]
    is_packed, hold = len(mlp.projections) == 1, mlp.assumptions.hold

    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or not hold(self, x):
            return base.forward(self, x, *args, **kwargs)
        projection = getattr(self, first)(x)
        if is_packed and gate_first:
            y = activation(projection)
        elif is_packed:
            up, gate = projection.chunk(2, -1)
            y = activation(gate, up)
        elif gate_first:
            y = activation(projection, getattr(self, second)(x))
        else:
            y = activation(getattr(self, second)(x), projection)
        if down is not None:
            y = getattr(self, down)(y)
        return y if multiplier == 1.0 else y * multiplier

    return {"forward": classes.in_place_of(base.forward, forward)}


def _projections(module: nn.Module) -> dict[str, nn.Module]:
    """The children with parameters or buffers, which may be projections; others are not."""
    return {
        name: child
        for name, child in module._modules.items()
        if child is not None
        and (any(True for _ in child.parameters()) or any(True for _ in child.buffers()))
    }


def _may_be_one(module: nn.Module) -> bool:
    return len(_projections(module)) in (2, 3) or _looks_gated(module)


def _looks_gated(module: nn.Module) -> bool:
    """Whether a reader of the report expects this module in it. It has no other effect."""
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


def _trace_key(module: nn.Module) -> Any:
    """Key of everything that a trace can depend on."""
    projections = _projections(module)
    children = tuple(
        (name, None if name in projections else leaf_key(child))
        for name, child in module._modules.items()
    )
    widths = tuple(_widths(projections)[1].items())
    return classes.class_of(module), attributes_key(module), children, widths


def _widths(projections: dict[str, nn.Module]) -> tuple[int, dict[str, int]]:
    """The width of the input, and of each projection's output."""
    widths: dict[str, Any] = {
        name: getattr(child, "out_features", None) for name, child in projections.items()
    }
    inputs = [getattr(child, "in_features", None) for child in projections.values()]
    if all(isinstance(width, int) for width in (*widths.values(), *inputs)):
        return inputs[0] or ANY_WIDTH, widths
    return ANY_WIDTH, dict.fromkeys(widths, ANY_WIDTH)


def _obstacle(module: nn.Module) -> str | None:
    """Reason that a forward cannot be overridden, or probed in a copy, or None."""
    count = len(_projections(module))
    if count not in (1, 2, 3):
        return f"it has {count} children that may be projections"
    if reason := classes.obstacle(module):
        return reason
    arguments = list(inspect.signature(module.forward).parameters.values())
    # diffusers' GEGLU takes any further arguments; a call with some reaches the original forward.
    rest = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    arguments = [argument for argument in arguments if argument.kind not in rest]
    if len(arguments) != 1 or arguments[0].kind is not arguments[0].POSITIONAL_OR_KEYWORD:
        names = (str(argument.replace(annotation=argument.empty)) for argument in arguments)
        return f"its forward takes ({', '.join(names)})"
    return None


class _Projection(nn.Module):
    """Stand-in for a projection in a copy: returns a chosen tensor, and records its input."""

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
        self.width, self.widths = _widths(_projections(module))
        self.is_alone = len(self.widths) == 1
        self.calls: list[tuple[str, Tensor]] = []
        self.module, self.reads = module, Reads(self.widths)
        self.copy = object.__new__(classes.class_of(module))
        try:
            children = {
                name: _Projection(name, self.calls) if name in self.widths else copy.deepcopy(child)
                for name, child in module._modules.items()
            }
        except Exception as error:
            raise NotAnOp(f"it cannot be copied: {first_line(error)}") from None
        vars(self.copy).update(vars(module), _modules=children)

    def mlp(self) -> MLP:
        self.traced(torch.bfloat16, False)
        projections = [name for name, _ in self.calls]
        down = None if self.is_alone else projections.pop()
        activation, dtypes = find(self.traced, projections)
        assumptions = self.reads.assumptions(self.module, dtypes)
        return MLP(tuple(projections), activation, down, self.multiplier, assumptions)

    def traced(self, dtype: torch.dtype, training: bool) -> fx.GraphModule:
        """The graph from the outputs of the first projections to the input of the last one."""
        trace = Trace()
        rows = [ANY_SIZES[n] for n in ((2, 3) if training else (4, 5))]
        x = trace.input("_input", (*rows, self.width), dtype)
        for name, width in self.widths.items():
            getattr(self.copy, name).value = trace.input(name, (*rows, width), dtype)
        self.calls.clear()
        before = own_attributes(self.copy.train(training))
        try:
            with self.reads.of(self.copy), trace.running():
                # `forward` is called directly, because a call of the module would run its hooks.
                result = self.copy.forward(x)
        except NotAnOp:
            raise
        except Exception as error:
            raise NotAnOp(f"it fails on fake tensors: {first_line(error)}") from None
        if list(map(id, before.values())) != list(map(id, own_attributes(self.copy).values())):
            raise NotAnOp("its forward changes its attributes")
        if not isinstance(result, Tensor):
            raise NotAnOp(f"it returns {type(result).__name__}, not a tensor")
        names = [name for name, _ in self.calls]
        if len(names) not in ((1,) if self.is_alone else (2, 3)) or len(set(names)) < len(names):
            wanted = (
                "its projection once" if self.is_alone else "one or two projections and a third"
            )
            raise NotAnOp(f"it calls {', '.join(names) or 'nothing'}, not {wanted}")
        projections = self.calls if self.is_alone else self.calls[:-1]
        if any(unchanged(trace.node(given)) is not trace.node(x) for _, given in projections):
            raise NotAnOp("it changes its input before it projects it")
        if self.is_alone:
            self.multiplier = 1.0
            return trace.module(result)
        down, y = self.calls[-1]
        multiplier = _taken_off(trace, result, getattr(self.copy, down).value)
        if multiplier is None:
            raise NotAnOp(f"it changes what {down} returns")
        self.multiplier = multiplier
        return trace.module(y)


def _taken_off(trace: Trace, result: Tensor, projected: Tensor) -> float | None:
    """Remove from a trace the operations between `projected` and the result, and return the factor.
    Only a product with a number is allowed there; anything else returns None."""
    node, last = trace.node(result), trace.node(projected)
    multiplier = 1.0
    while node is not last:
        call = canonical(node)
        if call is None or node.users:
            return None
        source, *rest = call.args
        if call.op == "mul" and multiplier == 1.0:
            source, rest = (
                (rest[0], [source]) if isinstance(source, (int, float)) else (source, rest)
            )
            multiplier = rest[0]
        elif call.op not in UNCHANGED:
            return None
        if not isinstance(source, fx.Node) or not isinstance(multiplier, (int, float)):
            return None
        trace.graph.erase_node(node)
        node = source
    return float(multiplier)
