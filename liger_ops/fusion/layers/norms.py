"""Norms: their forward becomes one op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from ... import library
from ...nn import FusedAddRMSNorm, GatedRMSNorm, GroupNorm, LayerNorm, RMSNorm
from .. import classes, sharding, tensor_parallel
from ..assumptions import Assumptions
from ..planning import Plan
from ..probing import NotAnOp, Probes, attributes_key
from . import modulated_norms
from .norm_obstacles import obstacle
from .norm_trace import Dtypes, Norm, norm_of

KIND = "norm"

FUSED_CLASSES = (RMSNorm, FusedAddRMSNorm, GatedRMSNorm, LayerNorm, GroupNorm)


def plan(model: nn.Module) -> Plan:
    """Override the forward of every norm of a model, and of every module that modulates norms."""
    probes = _Probes(model)
    modulated = modulated_norms.plan(model, probes.width)
    told = {finding.where for finding in modulated.findings}

    def look(plan: Plan, name: str, module: nn.Module) -> None:
        kinds = {KIND, modulated_norms.KIND}
        is_fused = isinstance(module, FUSED_CLASSES) or kinds & classes.overrides(module).keys()
        if is_fused or name in told or "parametrizations" in name.split("."):
            return
        try:
            norm, assumptions = probes.norm(module)
            facts = norm.op, tuple(norm.options.items()), norm.width, assumptions
        except NotAnOp:
            if not _looks_like_a_norm(name, module):
                return
            raise
        plan.fuse(name, module, norm.op, norm.options)
        plan.changes.append(lambda: _override(module, facts))

    plan = Plan(KIND, model, look)
    plan.findings += modulated.findings
    plan.changes += modulated.changes
    return plan


def _override(module: nn.Module, facts: Any) -> None:
    classes.override(module, KIND, facts)
    style = tensor_parallel.style_of(module)
    if style is not None:
        tensor_parallel.call_class(module, style)


@classes.kind(KIND)
def methods(base: Any, facts: Any) -> dict[str, Callable[..., Any]]:
    op, options, width, assumptions = facts
    norm = Norm(op, dict(options), width)
    overload, hold, original = library.OPS[op].overload, assumptions.hold, base.forward
    dim = 1 if op == "group_norm" else -1

    def forward(self: Any, *inputs: Any) -> Any:
        x, parameters = inputs[0], self._parameters
        weight, bias = parameters.get("weight"), parameters.get("bias")
        others = [one for one in (*inputs[1:], weight, bias) if one is not None]
        if torch.is_autocast_enabled(x.device.type):
            # The op's rule for autocast says what it casts.
            others = []
        is_usual = inputs[-1] is not None and (width is None or x.shape[dim] == width)
        if not is_usual or not hold(self, x, *others):
            return original(self, *inputs)
        return norm.computed_by(overload, inputs, weight, bias)

    return {"forward": classes.in_place_of(original, forward)}


class _Probes:
    """The probes of one call of `fuse`, on modules with the parameters that a forward sees."""

    def __init__(self, model: nn.Module) -> None:
        self.whole = sharding.whole_parameters(model)
        dtypes = {parameter.dtype for parameter in (*model.parameters(), *self.whole.values())}
        self.dtypes = [
            dtype for dtype in (torch.float32, torch.bfloat16, torch.float16) if dtype in dtypes
        ]
        self.probes = Probes()

    def norm(self, module: nn.Module) -> tuple[Norm, Assumptions]:
        if sharding.is_managed(module):
            module = sharding.with_whole_parameters(module, self.whole)
        reason = obstacle(module)
        if reason is not None:
            raise NotAnOp(reason)
        return self.probes.once(
            _probe_key(module), lambda: norm_of(module, self.mixed_dtypes(module))
        )

    def width(self, module: nn.Module) -> int | None:
        """The width of an rms_norm or layer_norm, None for any."""
        if isinstance(module, (RMSNorm, LayerNorm)):
            width: Any = module.hidden_size
            return None if width is None else int(width)
        norm, _ = self.norm(module)
        if norm.op not in ("rms_norm", "layer_norm"):
            raise NotAnOp(f"it is {norm.op}")
        return norm.width

    def mixed_dtypes(self, module: nn.Module) -> list[Dtypes]:
        """Pairs of an input dtype, from the model's other parameters, and the module's dtype."""
        own = {parameter.dtype for parameter in module.parameters()}
        return [(other, dtype) for dtype in own for other in self.dtypes if other is not dtype]


def _probe_key(module: nn.Module) -> Any:
    """Key of everything that a probe can depend on."""
    parameters = tuple(
        (name, None if parameter is None else (tuple(parameter.shape), parameter.dtype))
        for name, parameter in module._parameters.items()
    )
    return type(module), parameters, attributes_key(module)


def _looks_like_a_norm(name: str, module: nn.Module) -> bool:
    """Whether a reader of the report expects this module in it. It has no other effect."""
    class_name = classes.class_of(module).__name__
    if class_name.endswith(("RMSNorm", "LayerNorm", "GroupNorm")):
        return True
    is_leaf = all(child is None for child in module._modules.values())
    named = "norm" in f"{class_name}.{name.rpartition('.')[2]}".lower()
    has_weight = "Norm" in class_name and "weight" in module._parameters
    return (named and (is_leaf or parametrize.is_parametrized(module))) or has_weight
