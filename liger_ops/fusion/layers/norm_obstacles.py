"""Reasons that a norm's forward cannot be overridden, independent of what it computes."""

from __future__ import annotations

import inspect

import torch
from torch import nn
from torch.nn.utils import parametrize


def obstacle(module: nn.Module) -> str | None:
    """Reason that a module's forward cannot be overridden, whatever it computes, or None."""
    if parametrize.is_parametrized(module):
        return "it is parametrized"
    if isinstance(module, torch.jit.ScriptModule):
        return "it is a ScriptModule"
    if any(child is not None for child in module._modules.values()):
        return "it holds other modules"
    if "forward" in vars(module):
        return "the instance has a forward of its own"
    return _parameters_obstacle(module) or _forward_obstacle(module)


def _parameters_obstacle(module: nn.Module) -> str | None:
    if module._buffers:
        return f"it has buffers: {', '.join(module._buffers)}"
    unknown = [name for name in module._parameters if name not in ("weight", "bias")]
    if unknown:
        return f"it has other parameters than weight and bias: {', '.join(unknown)}"
    shapes = set()
    for name, parameter in module._parameters.items():
        if parameter is None:
            continue
        if type(parameter) is not nn.Parameter:
            return f"{name} is a {type(parameter).__name__}, not a plain Parameter"
        if not parameter.is_floating_point():
            return f"{name} is {parameter.dtype}"
        shapes.add(tuple(parameter.shape))
    if len(shapes) > 1 or any(len(shape) != 1 for shape in shapes):
        return f"its parameters have shapes {sorted(shapes)}, not one size"
    return None


def _forward_obstacle(module: nn.Module) -> str | None:
    try:
        arguments = list(inspect.signature(module.forward).parameters.values())
    except ValueError:
        return "its forward has no signature"
    gated = len(arguments) == 2 and arguments[1].name == "gate"
    if (len(arguments) == 1 or gated) and all(
        argument.kind in (argument.POSITIONAL_ONLY, argument.POSITIONAL_OR_KEYWORD)
        for argument in arguments
    ):
        return None
    names = (str(argument.replace(annotation=argument.empty)) for argument in arguments)
    return f"its forward takes ({', '.join(names)})"
