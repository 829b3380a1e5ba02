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
    if _alike(input, other):
        return Call("square", (input,))
    for a, b in ((input, other), (other, input)):
        # Dynamo records 1 / x so within a function mode.
        if type(b) in (int, float) and b == 1 and _is_reciprocal(a):
            return Call(IDENTITY, (a,))
        # In a narrower dtype this code rounds the sigmoid before the product, and silu does not.
        if (gate := calls(b, "sigmoid")) and _alike(gate.args[0], a) and is_float32(a):
            return Call("silu", (a,), (b,))
    return Call("mul", (input, other))


def _is_reciprocal(x: Any) -> bool:
    return isinstance(x, fx.Node) and operation(x) == "reciprocal"


def _alike(a: Any, b: Any) -> bool:
    """Whether two factors are the same tensor, or the same cast of one tensor."""
    a, b = _source(a), _source(b)
    if a is b:
        return isinstance(a, fx.Node)
    of, to = calls(a, "cast"), calls(b, "cast")
    if of is None or to is None or of.args[1] != to.args[1]:
        return False
    return _source(of.args[0]) is _source(to.args[0])


def _source(x: Any) -> Any:
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


for _name, _more in {
    "neg": (operator.neg, torch.negative, "negative", "__neg__"),
    "sqrt": (math.sqrt,), "tanh": (F.tanh,), "sigmoid": (F.sigmoid,),
    "square": (), "rsqrt": (), "exp": (), "cos": (), "sin": (),
}.items():  # fmt: skip
    declared(_name, "input", getattr(torch, _name), _name, *_more)


@spelled(torch.clamp, torch.clip, "clamp", "clip")
def _clamp(input: Any, min: Any = None, max: Any = None) -> Call:
    if min in (None, -math.inf) and max in (None, math.inf):
        # As models write that there is no limit.
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
