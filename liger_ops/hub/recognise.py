"""Find out which options of an op compute what a model's own class computes.

The kernels hub replaces the forward of a module by its name, such as "RMSNorm". Modules of one name
may compute different things: they round at other places, add 1 to the weight, or split a projection
another way. Before a layer of the hub first runs for a module, the module's own code and the op
compute the same small example on the CPU, and the op is used with the options that agree.
"""

from __future__ import annotations

import contextlib
import math
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..torch_private import disable_current_modes

Options = tuple[tuple[str, Any], ...]
# The parts of a module that an example has in place of the module's own.
Parts = dict[str, nn.Module | nn.Parameter]


class LayerKind(NamedTuple):
    """A kind of layer.

    compute(module, *args, **options) calls the op. candidates are the options that are compared.
    example(module, *form) returns the parts of a small module, and arguments for several calls.
    own(module, *args) runs the module's own code.
    """

    compute: Callable[..., Any]
    candidates: Sequence[Options]
    example: Callable[..., tuple[Parts, Sequence[tuple[Any, ...]]]]
    own: Callable[..., Any]


KINDS: dict[str, LayerKind] = {}
# The largest relative difference of two float32 computations that compute the same.
NEAR = 1e-5
# Roundings to the arguments' dtype that the own code may make and the op does not, or the reverse.
ROUNDINGS = 8

_found: weakref.WeakKeyDictionary[nn.Module, dict[Any, Options | None]]
_found = weakref.WeakKeyDictionary()


def own_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run the forward of the module's class, in whose place a layer of the hub runs."""
    return type(module).forward(module, *args, **kwargs)


def run(
    kind: str, module: nn.Module, args: tuple[Any, ...], form: tuple[Any, ...] = (), **kwargs: Any
) -> Any:
    """Compute the layer by its op, or by the module's own code if that computes something else.

    Args:
        kind: a key of KINDS.
        module: the model's module.
        args: the arguments of its forward.
        form: the dtypes of the tensors, which decide where the result is rounded, and whatever else
            of the module and the call decides the options. Dynamo compiles a module again if one
            of these differs, and uses the graph of one module for others of its class if not.
        kwargs: what the module's own forward is given beside args, and the op does not read.
    """
    options = options_of(kind, module, *form)
    if options is None:
        return KINDS[kind].own(module, *args, **kwargs)
    return KINDS[kind].compute(module, *args, **dict(options))


def identity_of(activation: Any) -> Any:
    """Return what says which activation a module calls: a function, or the class of a module."""
    return type(activation) if isinstance(activation, nn.Module) else activation


# Dynamo calls it while it traces, and takes the result for a constant.
@torch.compiler.assume_constant_result
def options_of(kind: str, module: nn.Module, *form: Any) -> Options | None:
    """Return the options with which the op computes what the module's own code does, or None.

    The first call for a module and this form, as of `run`, computes the examples. If no options
    agree, it warns.
    """
    known = _found.setdefault(module, {})
    key = (kind, form)
    if key not in known:
        with (
            disable_current_modes(), torch.no_grad(), torch.device("cpu"),
            torch.autocast("cpu", enabled=False),
        ):  # fmt: skip
            known[key] = _options(kind, module, form)
    return known[key]


def _options(kind: str, module: nn.Module, form: tuple[Any, ...]) -> Options | None:
    wide = tuple(torch.float32 if isinstance(d, torch.dtype) else d for d in form)
    try:
        agreeing = _agreeing(kind, module, KINDS[kind].candidates, wide, NEAR)
        if agreeing and form != wide:
            eps = max(torch.finfo(d).eps for d in (*form, *wide) if isinstance(d, torch.dtype))
            agreeing = _agreeing(kind, module, list(agreeing), form, ROUNDINGS * eps)
        if agreeing:
            return min(agreeing, key=lambda options: agreeing[options])
        reason = "its forward computes something else"
    except Exception as error:
        reason = f"its forward cannot be compared: {type(error).__name__}: {error}"
    warnings.warn(
        f"liger_ops: {type(module).__name__} keeps its own forward, which is not the layer {kind}:"
        f" {reason}",
        stacklevel=3,
    )
    return None


def _agreeing(
    kind: str, module: nn.Module, candidates: Sequence[Options], form: tuple[Any, ...],
    tolerance: float,
) -> dict[Options, float]:  # fmt: skip
    """Return the options with which the op's results have the shapes and dtypes of the own code's,
    with the largest difference of both, relative to the largest number."""
    parts, calls = KINDS[kind].example(module, *form)
    small = _with_parts(module, parts)
    expected = [KINDS[kind].own(small, *args) for args in calls]
    agreeing = {}
    for options in candidates:
        # An op refuses tables or a gate of another form.
        with contextlib.suppress(RuntimeError, TypeError, ValueError):
            actual = [KINDS[kind].compute(small, *args, **dict(options)) for args in calls]
            distance = max(map(_distance, actual, expected))
            if distance <= tolerance:
                agreeing[options] = distance
    return agreeing


def _distance(actual: Any, expected: Any) -> float:
    if isinstance(expected, tuple):
        if not isinstance(actual, tuple) or len(actual) != len(expected):
            return math.inf
        return max(_distance(a, e) for a, e in zip(actual, expected, strict=True))
    if actual.shape != expected.shape or actual.dtype is not expected.dtype:
        return math.inf
    expected = expected.double()
    distance = ((actual.double() - expected).abs().max() / expected.abs().max()).item()
    return math.inf if math.isnan(distance) else distance


def _with_parts(module: nn.Module, parts: Parts) -> nn.Module:
    """Return a module of the same class and attributes, with other parameters and children."""
    cls = type(module)
    small: nn.Module = cls.__new__(cls)
    own = {name: value for name, value in vars(module).items() if name != "forward"}
    for name in ("_parameters", "_buffers", "_modules"):
        own[name] = dict(own[name])
    vars(small).update(own)
    for name, part in parts.items():
        setattr(small, name, part)
    return small


def numbers(*shape: int, dtype: torch.dtype = torch.float32, phase: float = 0.3) -> Tensor:
    """Return numbers between -1 and 1 that follow no simple rule. No random number is drawn."""
    return torch.sin(1.7 * torch.arange(math.prod(shape)) ** 1.1 + phase).view(shape).to(dtype)
