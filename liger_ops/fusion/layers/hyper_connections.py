"""Manifold-constrained hyper-connections: a module's forward becomes mhc_coeffs and mhc_pre.

In transformers it is a module with the parameters fn, base and scale, which returns the layer's
input and the weights of the streams after the layer. Those are mixed in the decoder layer's
forward, among other things, which `fuse` does not change.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ... import library
from ...nn import MHCCoeffs
from .. import classes, sharding
from ..planning import Plan
from ..probing import NotAnOp, Probes, attributes_key, leaf_key
from .hyper_connection_trace import Connection, Parameters, found

KIND = "hyper connection"

# Names of modules that a reader expects in the report.
NAME = re.compile(r"HyperConnection|HyperHead|mHC|MHC")

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def plan(model: nn.Module) -> Plan:
    """Override the forward of every hyper-connection of a model."""
    probes = Probes()

    def look(plan: Plan, name: str, module: nn.Module) -> None:
        if KIND in classes.overrides(module) or isinstance(module, MHCCoeffs):
            return
        try:
            parameters = _parameters(module)
            if reason := _obstacle(module):
                raise NotAnOp(reason)
            key = _key(module, parameters)
            connection = probes.once(key, lambda: found(module, parameters))
            connection.assumptions.check(module)
        except NotAnOp:
            if not NAME.search(classes.class_of(module).__name__) or not module._parameters:
                return
            raise
        plan.fuse(name, module, "mhc_coeffs", connection.options())
        plan.changes.append(lambda: classes.override(module, KIND, connection))

    return Plan(KIND, model, look)


@classes.kind(KIND)
def methods(base: Any, connection: Connection) -> dict[str, Callable[..., Any]]:
    coefficients = library.OPS["mhc_coeffs_forward"].overload
    collapse = library.OPS["mhc_pre"].overload
    of, options, hold = connection.parameters, connection.values, connection.assumptions.hold

    def forward(self: Any, x: Tensor) -> Any:
        if not hold(self, x):
            return base.forward(self, x)
        fn, base_, scale = (getattr(self, name) for name in (of.fn, of.base, of.scale))
        if not _is_usual(x, of, fn, base_, scale):
            return base.forward(self, x)
        h_pre, h_post, h_res = coefficients(x, fn.t(), base_, *scale.unbind(0), *options)[:3]
        given = {"h_pre": h_pre, "h_post": h_post, "h_res": h_res}
        if "y" in connection.results:
            given["y"] = collapse(x, h_pre)
        return tuple(given[name] for name in connection.results)

    return {"forward": classes.in_place_of(base.forward, forward)}


def _is_usual(x: Tensor, of: Parameters, *parameters: Tensor) -> bool:
    """Whether the ops compute what the code does, in the same dtypes.

    The code computes float64 in float32, and the ops do not. Under autocast the code returns the
    dtype of its parameters, and the ops float32.
    """
    if x.dim() != 4 or x.shape[2] != of.hc or x.shape[3] != of.hidden_size:
        return False
    if any(one.dtype not in FLOATS for one in (x, *parameters)):
        return False
    wide = all(one.dtype is torch.float32 for one in parameters[1:])
    return wide or not torch.is_autocast_enabled(x.device.type)


def _parameters(module: nn.Module) -> Parameters:
    """The parameters of a hyper-connection by their sizes, or NotAnOp."""
    own = {name: one for name, one in module._parameters.items() if one is not None}
    shapes = {name: tuple(one.shape) for name, one in own.items()}
    if len(shapes) == 3:
        scale, base, fn = sorted(shapes, key=lambda name: math.prod(shapes[name]))
        if len(shapes[fn]) == 2 and shapes[scale] == (3,) and shapes[base] == shapes[fn][:1]:
            hc = math.isqrt(shapes[base][0] + 1) - 1
            hidden_size, rest = divmod(shapes[fn][1], max(hc, 1))
            if hc >= 1 and hc * (hc + 2) == shapes[base][0] and rest == 0 and hidden_size >= 1:
                return Parameters(fn, base, scale, hc, hidden_size)
    text = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
    raise NotAnOp(
        f"its parameters are {text}, not those of mhc_coeffs: (hc * (hc + 2), hc * C),"
        " (hc * (hc + 2),) and (3,)"
    )


def _key(module: nn.Module, parameters: Parameters) -> Any:
    """Key of everything that a trace can depend on."""
    children = tuple((name, leaf_key(child)) for name, child in module._modules.items())
    return classes.class_of(module), parameters, attributes_key(module), children


def _obstacle(module: nn.Module) -> str | None:
    """Reason that a forward cannot be overridden, or None."""
    if isinstance(module, torch.jit.ScriptModule):
        return "it is a ScriptModule"
    if "forward" in vars(module):
        return "the instance has a forward of its own"
    if module._buffers:
        return f"it has buffers: {', '.join(module._buffers)}"
    for name, one in module._parameters.items():
        plain = sharding.is_held_by_fsdp(module) or type(one) is nn.Parameter
        if one is not None and not plain:
            return f"{name} is a {type(one).__name__}, not a plain Parameter"
        if one is not None and one.dtype not in FLOATS:
            return f"{name} is {one.dtype}"
    for name, child in module.named_modules():
        if child is module:
            continue
        if child._buffers or any(one is not None for one in child._parameters.values()):
            return f"{name} has parameters or buffers"
    return None
