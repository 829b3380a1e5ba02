"""Swapping parts of a model for fused ones, and back.

Each fuser knows one kind of part and finds it by what it computes. It is a function of the model
that changes it in place, and returns what it fused and what it left.
"""

from __future__ import annotations

from torch import nn

from . import classes, loss, norms
from .report import Fused, FuseReport, Left

__all__ = ["FuseReport", "Fused", "Left", "fuse", "unfuse"]

FUSERS = (norms.fuse, loss.fuse)


def fuse(model: nn.Module) -> FuseReport:
    """Replace every norm of a model by the fused module that computes the same.

    What a norm computes decides, not its class: a copy of each module without children, and with no
    parameters but a weight and a bias of one size, runs on the CPU and is compared with `rms_norm`,
    `layer_norm` and `group_norm` under every offset, eps and casting mode: values in float32,
    bfloat16 and float16, and gradients. A norm of any class, from transformers or not, is replaced
    if it agrees, and left if it does not.

    The fused module has the same Parameter objects under the same names: optimizers, tied weights
    and the state dict, keys and values, do not notice. `requires_grad` and the training mode stay.
    A module in several places of the model remains one module. The model can then be copied,
    pickled, saved, moved, cast, loaded into and compiled. Nothing outside of the model changes, and
    the state of no random number generator.

    A norm is left, and the report says why, where replacing it could change what the model does: it
    computes something else (a gate, another dimension), or does something beside (hooks, a forward
    of its own on the instance, as accelerate sets it, parametrizations, buffers), or its parameters
    are no plain tensors (DTensor: fuse before sharding). A norm whose class returns the weight's
    dtype is left where the model's other parameters have another dtype than its weight.

    Norms that are fused already are passed over: a second call replaces nothing.

    Args:
        model: a transformers model, or any module. It is changed in place.

    Returns:
        A report: `report.fused` and `report.left` list modules, `str(report)` is a table,
        `len(report)` the number of modules replaced.

    Raises:
        TypeError: model is not a torch.nn.Module.

    Example:
        >>> print(liger_ops.fuse(torch.nn.Sequential(torch.nn.LayerNorm(8))))
        1 norm fused
          1 x LayerNorm -> layer_norm(eps=1e-05)  0
    """
    _check_module("fuse", model)
    fused: list[Fused] = []
    left: list[Left] = []
    for fuser in FUSERS:
        fused_here, left_here = fuser(model)
        fused += fused_here
        left += left_here
    return FuseReport(tuple(fused), tuple(left))


def unfuse(model: nn.Module) -> int:
    """Put back the modules that `fuse` replaced, with the parameters and training mode of now.

    The modules are the very objects that were there before. They get the Parameter objects that the
    fused modules hold by now, which loading or casting may have replaced. Hooks registered on a
    fused module go with it.

    Args:
        model: a module that was given to `fuse`, or a copy of one. It is changed in place.

    Returns:
        The number of modules put back.

    Raises:
        TypeError: model is not a torch.nn.Module.
    """
    _check_module("unfuse", model)
    return norms.unfuse(model) + classes.restore(model)


def _check_module(function: str, model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{function}: model must be a torch.nn.Module, got {type(model).__name__}")
