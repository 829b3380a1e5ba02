"""Gated activations: the code between the projections of a gated MLP becomes one op.

A gated MLP computes down(act(gate(x), up(x))), or the same with one projection for gate and up. A
gated activation of diffusers (GEGLU, SwiGLU) has that one projection, and none after it. The new
forward calls the same children, which may be any modules: linear layers, quantised or with
adapters, wrapped before `fuse` or after it.
"""

from __future__ import annotations

import inspect
import math
import operator
import re
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from ...rewrites.engine.canonical import calls, value
from ...rewrites.engine.insertion import derive
from ...rewrites.engine.report import Report, bound, op_of
from ...rewrites.engine.rewrite import before_widening
from ...rewrites.layers import activations
from .. import classes
from ..lora.linear import below_gated
from ..probing import NotAnOp, dtype_name
from ..trace import ANY_SIZES, unchanged
from .installed import ModuleFacts
from .kind import Kind, argument_obstacle, has_state, obstacle, state_obstacle, width_of
from .module_trace import Case, Traced, names_of
from .program import Program

# Names of classes that a reader expects in the report: gated activations (not "Glue"), and MLPs.
GATED_NAME = re.compile(r"GLU|[Gg]lu(?!e)")
MLP_NAME = re.compile(r"mlp|feedforward|ffn", re.IGNORECASE)

# Width of the input and of all projections if a projection has no in_features or out_features.
ANY_WIDTH = 48


class Gated(Kind):
    """Gated activations, which are the same op in bfloat16, float16 and float32, in training and in
    evaluation."""

    title = "gated activation"
    rewrites = ("swiglu", "geglu", "clamped_swiglu", "relu_squared")
    functions = ("chunk", "mul")

    def rewrites_to_compare(self, program: Program) -> Collection[str]:
        # swiglu of an interleaved gate and up is written as clamped_swiglu without a limit.
        op = program.ops[0].name
        return ("swiglu", "clamped_swiglu") if op == "clamped_swiglu" else (op,)

    def cases(self, module: nn.Module, form: Any) -> Iterator[Case]:
        (name,) = names_of(getattr(module, self.method))
        width, widths = (
            _widths(_projections(module)) if self.called_children(module) else (ANY_WIDTH, {})
        )

        def case(dtype: torch.dtype, training: bool, **how: Any) -> Case:
            rows = [ANY_SIZES[n] for n in ((2, 3) if training else (4, 5))]
            columns = {child: (*rows, size) for child, size in widths.items()}
            shapes, dtypes = {name: (*rows, width)}, {name: dtype}
            return Case(shapes, dtypes, dtype, columns, dtype, training, **how)

        yield case(torch.bfloat16, False)
        for dtype in (torch.bfloat16, torch.float32, torch.float16):
            yield case(dtype, True)
        for training in (True, False):
            yield case(torch.float64, training, tolerates=NotAnOp)

    def options(self, program: Program) -> dict[str, Any]:
        found = super().options(program)
        return {} if found == {"gate_multiplier": 1.0, "down_multiplier": 1.0} else found

    def check(self, traced: Traced) -> None:
        tensors = [traced.result, *pytree.tree_leaves(list(traced.calls.values()))]
        for y in tensors:
            if isinstance(y, Tensor) and y.dtype is not traced.case.dtype:
                raise NotAnOp(
                    f"it returns {dtype_name(y.dtype)} for projections of"
                    f" {dtype_name(traced.case.dtype)}"
                )

    def rewrite_graph(self, traced: Traced, names: Collection[str]) -> Report:
        report = super().rewrite_graph(traced, names)
        if "clamped_swiglu" in names:
            activations.rewrite_unlimited(traced.graph.graph, report)
        for node, given in bound(traced.graph.graph.nodes):
            if "up" in given and given["up"] is not None:
                _pass_packed(node, given)
        return report


class GatedMLPs(Gated):
    """Modules that call projections, with a gated activation between them."""

    name = "gated MLP"

    def is_expected(self, name: str, module: nn.Module) -> bool:
        return _looks_gated(module)

    def obstacle(self, module: nn.Module) -> str | None:
        count = len(_projections(module))
        if count not in (2, 3) and not (count == 1 and _looks_gated(module)):
            return f"it has {count} children that may be projections"
        reason = obstacle(module) or state_obstacle(module)
        return reason or argument_obstacle(module, takes_one_argument)

    def called_children(self, module: nn.Module) -> Collection[str]:
        return _projections(module)

    @classmethod
    def methods(cls, base: Any, facts: ModuleFacts) -> dict[str, Any]:
        made = super().methods(base, facts)
        return made | {cls.method: below_gated(made[cls.method], facts)}

    def check(self, traced: Traced) -> None:
        names = [name for name, _, _ in traced.calls.values()]
        is_alone = len(traced.case.columns) == 1
        if len(names) not in ((1,) if is_alone else (2, 3)) or len(set(names)) < len(names):
            wanted = "its projection once" if is_alone else "one or two projections and a third"
            raise NotAnOp(f"it calls {', '.join(names) or 'nothing'}, not {wanted}")
        for i, (name, args, kwargs) in enumerate(traced.called().values()):
            given = [
                unchanged(one) for one in (*args, *kwargs.values()) if isinstance(one, fx.Node)
            ]
            is_given_x = [one.target for one in given] == [traced.case.first]
            if i == len(names) - 1 and not is_alone:
                if is_given_x:
                    raise NotAnOp(f"it changes what {name} returns")
            elif not is_given_x:
                raise NotAnOp("it changes its input before it projects it")
        super().check(traced)


def takes_one_argument(parameters: list[inspect.Parameter]) -> bool:
    # diffusers' GEGLU takes any further arguments; a call with some reaches its own forward.
    rest = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    kinds = [parameter.kind for parameter in parameters if parameter.kind not in rest]
    return kinds == [inspect.Parameter.POSITIONAL_OR_KEYWORD]


def _pass_packed(node: fx.Node, given: dict[str, Any]) -> None:
    """If gate and up are two parts of one tensor, pass the op that tensor, or halves of it."""
    op = str(op_of(node))
    gate, up = (before_widening(given[name]) for name in ("gate", "up"))
    if gate.op != "placeholder" or up.op != "placeholder":
        packed, is_interleaved, gate_first = _packed(op, gate, up)
        is_plain = op == "swiglu" and given.get("gate_multiplier") == 1.0
        if is_interleaved and is_plain:
            node.target = torch.ops.liger.clamped_swiglu.default
            given = {"gate": packed, "up": None, "alpha": 1.0, "limit": math.inf, "up_offset": 0.0}
        elif is_interleaved and op != "clamped_swiglu":
            raise NotAnOp(f"it is {op} of neighbours, which the op does not take in one tensor")
        if is_interleaved:
            given["interleaved"] = True
        if gate_first:
            gate, up = packed, None
        else:
            # The op takes the gate first in a packed tensor: pass two halves.
            parts = derive(node, torch.chunk, packed, 2, -1)
            up, gate = (derive(node, operator.getitem, parts, i) for i in range(2))
    node.args, node.kwargs = tuple({**given, "gate": gate, "up": up}.values()), {}


def _packed(op: str, gate: Any, up: Any) -> tuple[Any, bool, bool]:
    """Return the tensor of which gate and up are parts, whether they are interleaved in it, and
    whether the gate is first.

    Raises:
        NotAnOp: gate and up are neither the halves nor the even and odd columns of one tensor.
    """
    first, second = calls(gate, "slice"), calls(up, "slice")
    if first is None or second is None:
        raise NotAnOp(f"it is {op}, and of other tensors than the projections")
    if first.args[0] is second.args[0]:
        packed = first.args[0]
        width = value(packed).shape[-1]
        parts = first.args[1:], second.args[1:]
        halves = (-1, 0, width // 2, 1), (-1, width // 2, width, 1)
        if parts in (halves, halves[::-1]):
            return packed, False, parts == halves
        if parts == ((-1, 0, width, 2), (-1, 1, width, 2)):
            return packed, True, True
    raise NotAnOp(f"it is {op}, and of other parts of its projection than gate and up")


def _projections(module: nn.Module) -> dict[str, nn.Module]:
    """Return the children that may be projections: those with parameters or buffers."""
    return {
        name: child
        for name, child in module._modules.items()
        if child is not None and has_state(child)
    }


def _looks_gated(module: nn.Module) -> bool:
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


def _widths(projections: dict[str, nn.Module]) -> tuple[int, dict[str, int]]:
    """Return the width of the input, and of each projection's output."""
    widths: dict[str, Any] = {name: width_of(child) for name, child in projections.items()}
    inputs = [width_of(child, "in_features") for child in projections.values()]
    if None not in (*widths.values(), *inputs):
        return inputs[0] or ANY_WIDTH, widths
    return ANY_WIDTH, dict.fromkeys(widths, ANY_WIDTH)
