"""One form for the many spellings of an operation.

`canonical(node)` is a `Call` of a name and arguments, the same for a method, a function and an
operator, for a default that is written or not, for dimensions counted from either end. What it does
not know is None, and matches nothing.

A spelling is a Python function with the signature of what it stands for, so that Python binds the
arguments; a call that it cannot bind, or whose further arguments change the result, is unknown.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true


class Call(NamedTuple):
    """An operation: its arguments are nodes, other calls, constants, and tuples of those.

    Where one call stands for several nodes, `through` has those before the last.
    """

    op: str
    args: tuple[Any, ...]
    through: tuple[fx.Node, ...] = ()


COMMUTATIVE = {"add", "mul"}
# What gives its first argument again: the same elements, in the same dtype.
IDENTITY = "identity"

Spelling = Callable[..., "Call | None"]
FUNCTIONS: dict[Any, Spelling] = {}
METHODS: dict[str, Spelling] = {}


def value(argument: Any) -> Any:
    """What an argument was while the graph was traced: a tensor without data, or a number."""
    return argument.meta.get("example_value") if isinstance(argument, fx.Node) else argument


def is_tensor(argument: Any, dim: int | None = None) -> bool:
    known = value(argument)
    return isinstance(known, Tensor) and (dim is None or known.dim() == dim)


def canonical(node: Any) -> Call | None:
    if isinstance(node, Call):
        return node
    if not isinstance(node, fx.Node):
        return None
    if node.op == "call_function":
        spelling = FUNCTIONS.get(node.target)
    elif node.op == "call_method":
        spelling = METHODS.get(str(node.target))
    else:
        return None
    if spelling is None:
        return None
    try:
        return spelling(*node.args, **node.kwargs)
    except TypeError:
        return None


def same(a: Any, b: Any) -> bool:
    """Whether two constants, or two sizes, are known to be equal."""
    a, b = value(a), value(b)
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return a is b
    if isinstance(a, slice) and isinstance(b, slice):
        return same((a.start, a.stop, a.step), (b.start, b.stop, b.step))
    if isinstance(a, torch.SymFloat) or isinstance(b, torch.SymFloat):
        return _same_number(a, b)
    if isinstance(a, torch.SymInt) or isinstance(b, torch.SymInt):
        return a is b or (a is not None and b is not None and statically_known_true(a == b))
    return (
        type(a) in (int, float)
        and type(b) in (int, float)
        and a == b
        or a is b
        or (type(a) is type(b) and bool(a == b))
    )


def _same_number(a: Any, b: Any) -> bool:
    """Of numbers that Dynamo keeps symbolic with dynamic=True, math.pi among them. Where they are
    equal now, the compiled code is for equal ones, and compiled anew for others."""
    if not all(isinstance(one, (int, float, torch.SymFloat, torch.SymInt)) for one in (a, b)):
        return False
    hints = [one if isinstance(one, (int, float)) else one.node.hint for one in (a, b)]
    return None not in hints and hints[0] == hints[1] and bool(a == b)


def spelled(*targets: Any) -> Callable[[Spelling], Spelling]:
    """Declare what a spelling stands for: functions, and the names of methods."""

    def decorate(spelling: Spelling) -> Spelling:
        for target in targets:
            (METHODS if isinstance(target, str) else FUNCTIONS)[target] = spelling
        return spelling

    return decorate


def dimension(x: Any, dim: Any) -> Any:
    """A dimension of x counted from the end, so that -1 is always the last."""
    tensor = value(x)
    if isinstance(dim, int) and isinstance(tensor, Tensor):
        return dim - tensor.dim() if dim >= 0 else dim
    return dim


def dimensions(x: Any, dim: Any) -> Any:
    if isinstance(dim, (tuple, list)):
        return tuple(sorted(dimension(x, d) for d in dim))
    return dim if dim is None else (dimension(x, dim),)


def as_tuple(sizes: Any) -> Any:
    return tuple(sizes) if isinstance(sizes, (tuple, list)) else sizes


def is_float32(x: Any) -> bool:
    tensor = value(x)
    return isinstance(tensor, Tensor) and tensor.dtype in (torch.float32, torch.float64)


def calls(x: Any, op: str) -> Call | None:
    call = canonical(x)
    return call if call is not None and call.op == op else None
