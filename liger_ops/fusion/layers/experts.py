"""Experts of mixture models: their `_apply_gate` becomes one op.

transformers keeps the weights of all experts of a layer in one module, and calls its method
`_apply_gate` with their projections, gate and up in one tensor.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from ... import library
from .. import classes
from ..assumptions import Assumptions, Reads
from ..planning import Plan
from ..probing import NotAnOp, Probes, attributes_key, first_line, leaf_key
from ..trace import ANY_SIZES, Trace
from .activation_trace import Activation, find

KIND = "experts"
METHOD = "_apply_gate"

# Width of the projections in a trace.
WIDTH = 48


def plan(model: nn.Module) -> Plan:
    """Override every `_apply_gate` of a model that computes an op."""
    probes = Probes()

    def look(plan: Plan, name: str, module: nn.Module) -> None:
        cls = classes.class_of(module)
        if KIND in classes.overrides(module):
            return
        if not inspect.isfunction(getattr(cls, METHOD, None)):
            if _looks_like_experts(module):
                raise NotAnOp(f"it has no {METHOD}: the activation is part of its forward")
            return
        obstacle = _obstacle(module)
        if obstacle is not None:
            raise NotAnOp(obstacle)
        children = tuple(leaf_key(child) for child in module._modules.values())
        key = cls, attributes_key(module), children
        activation, assumptions = facts = probes.once(key, lambda: _found(module))
        assumptions.check(module)
        plan.fuse(name, module, activation.op, dict(activation.options))
        plan.changes.append(lambda: classes.override(module, KIND, facts))

    return Plan("gated activation", model, look)


@classes.kind(KIND)
def methods(base: Any, facts: tuple[Activation, Assumptions]) -> dict[str, Callable[..., Any]]:
    activation, assumptions = facts
    original, hold = getattr(base, METHOD), assumptions.hold
    op = functools.partial(library.OPS[activation.op].overload, **dict(activation.options))

    def apply_gate(self: Any, gate_up: Tensor) -> Tensor:
        return op(gate_up) if hold(self, gate_up) else original(self, gate_up)

    return {METHOD: functools.wraps(original)(apply_gate)}


def _looks_like_experts(module: nn.Module) -> bool:
    """Whether a reader of the report expects this module in it. It has no other effect."""
    named = classes.class_of(module).__name__.endswith("Experts")
    return named and any("gate_up" in name for name in module._parameters)


def _obstacle(module: nn.Module) -> str | None:
    if METHOD in vars(module):
        return f"the instance has an {METHOD} of its own"
    config = getattr(module, "config", None)
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    is_eager = getattr(config, "_experts_implementation", None) == "eager"
    if is_eager and code is not None and METHOD not in code.co_names:
        return f"its experts_implementation is 'eager', which does not call {METHOD}"
    return None


def _found(module: nn.Module) -> tuple[Activation, Assumptions]:
    reads = Reads()
    copied: Any = object.__new__(classes.class_of(module))
    try:
        children = copy.deepcopy(module._modules)
    except Exception as error:
        raise NotAnOp(f"it cannot be copied: {first_line(error)}") from None
    vars(copied).update(vars(module), _modules=children, _parameters={}, _buffers={})

    def traced(dtype: torch.dtype, training: bool) -> fx.GraphModule:
        trace = Trace()
        rows = [ANY_SIZES[n] for n in ((2, 3) if training else (4, 5))]
        gate_up = trace.input("gate_up", (*rows, WIDTH), dtype)
        copied.train(training)
        try:
            with reads.of(copied), trace.running():
                y = getattr(copied, METHOD)(gate_up)
        except NotAnOp:
            raise
        except Exception as error:
            raise NotAnOp(f"its {METHOD} fails on fake tensors: {first_line(error)}") from None
        if not isinstance(y, Tensor):
            raise NotAnOp(f"its {METHOD} returns {type(y).__name__}, not a tensor")
        return trace.module(y)

    activation, dtypes = find(traced, ["gate_up"])
    return activation, reads.assumptions(module, dtypes)
