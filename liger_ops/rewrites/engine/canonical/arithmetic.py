"""Elementwise arithmetic, and reductions over dimensions."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from .call import (
    IDENTITY,
    Call,
    calls,
    declared,
    dimensions,
    is_float32,
    operation,
    same,
    spelled,
    value,
)


@spelled(operator.add, torch.add, "add", "__add__", "__radd__")
def _add(input: Any, other: Any, *, alpha: Any = 1) -> Call | None:
    return Call("add", (input, other)) if alpha == 1 else None


@spelled(operator.sub, torch.sub, torch.subtract, "sub", "subtract")
def _sub(input: Any, other: Any, *, alpha: Any = 1) -> Call | None:
    return Call("sub", (input, other)) if alpha == 1 else None


@spelled(torch.rsub, "rsub", "__rsub__")
def _rsub(input: Any, other: Any, *, alpha: Any = 1) -> Call | None:
    return _sub(other, input, alpha=alpha)


@spelled(operator.mul, torch.mul, torch.multiply, "mul", "multiply", "__mul__", "__rmul__")
def _mul(input: Any, other: Any) -> Call:
    if _same_factor(input, other):
        return Call("square", (input,))
    for a, b in ((input, other), (other, input)):
        # Within a function mode, Dynamo records 1 / x as reciprocal(x) * 1.
        if type(b) in (int, float) and b == 1 and _is_reciprocal(a):
            return Call(IDENTITY, (a,))
        # x * sigmoid(x) is silu only in float32 and float64: in a narrower dtype this code rounds
        # the sigmoid before the product, and silu does not.
        if (gate := calls(b, "sigmoid")) and _same_factor(gate.args[0], a) and is_float32(a):
            return Call("silu", (a,), (b,))
    return Call("mul", (input, other))


def _is_reciprocal(x: Any) -> bool:
    return isinstance(x, fx.Node) and operation(x) == "reciprocal"


def _same_factor(a: Any, b: Any) -> bool:
    """Return whether two factors are the same tensor, or casts of one tensor to one dtype."""
    a, b = _without_identities(a), _without_identities(b)
    if a is b:
        return isinstance(a, fx.Node)
    a_cast, b_cast = calls(a, "cast"), calls(b, "cast")
    if a_cast is None or b_cast is None or a_cast.args[1] != b_cast.args[1]:
        return False
    return _without_identities(a_cast.args[0]) is _without_identities(b_cast.args[0])


def _without_identities(x: Any) -> Any:
    """Return the value that `x` is, behind operations that return their argument."""
    while identity := calls(x, IDENTITY):
        x = identity.args[0]
    return x


@spelled(
    operator.truediv, torch.div, torch.divide, torch.true_divide, "div", "divide", "true_divide"
)
def _div(input: Any, other: Any, *, rounding_mode: Any = None) -> Call | None:
    if rounding_mode is not None:
        return None
    root = calls(other, "sqrt")
    if root is not None and is_float32(other):
        # In a narrower dtype the root is rounded before the division, and in rsqrt it is not.
        inverse = Call("rsqrt", root.args, (other,))
        return inverse if same(input, 1) else Call("mul", (input, inverse))
    return Call("div", (input, other))


@spelled(torch.reciprocal, "reciprocal")
def _reciprocal(input: Any) -> Call | None:
    return _div(1, input)


@spelled(operator.pow, torch.pow, "pow", "__pow__")
def _pow(input: Any, exponent: Any) -> Call:
    if isinstance(exponent, (int, float)):
        if exponent == 2:
            return Call("square", (input,))
        if exponent == -0.5:
            return Call("rsqrt", (input,))
        if exponent == 0.5:
            return Call("sqrt", (input,))
    return Call("pow", (input, exponent))


for _name, _spellings in {
    "neg": (operator.neg, torch.negative, "negative", "__neg__"),
    "sqrt": (math.sqrt,), "tanh": (F.tanh,), "sigmoid": (F.sigmoid,),
    "square": (), "rsqrt": (), "exp": (), "cos": (), "sin": (),
}.items():  # fmt: skip
    declared(_name, "input", getattr(torch, _name), _name, *_spellings)


@spelled(torch.clamp, torch.clip, "clamp", "clip")
def _clamp(input: Any, min: Any = None, max: Any = None) -> Call:
    if min in (None, -math.inf) and max in (None, math.inf):
        # Models write clamp(-inf, inf) for "no limit".
        return Call(IDENTITY, (input,))
    return Call("clamp", (input, min, max))


@spelled(torch.mean, "mean")
def _mean(input: Any, dim: Any = None, keepdim: Any = False, *, dtype: Any = None) -> Call | None:
    if dtype is not None and not same(dtype, getattr(value(input), "dtype", None)):
        return None
    return Call("mean", (input, dimensions(input, dim), bool(keepdim)))


@spelled(torch.var, "var")
def _var(
    input: Any, dim: Any = None, unbiased: Any = True,
    keepdim: Any = False, *, correction: Any = None,
) -> Call | None:  # fmt: skip
    correction = int(bool(unbiased)) if correction is None else correction
    return Call("var", (input, dimensions(input, dim), correction, bool(keepdim)))
