"""`Call`, the registry of spellings, and what spellings are written with."""

from __future__ import annotations

import ast
import contextlib
import operator
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ....torch_private import OpOverload, OpOverloadPacket
from ..recognise import bound, op_of


class Call(NamedTuple):
    """An operation. Its arguments are nodes, other calls, constants, and tuples of those.

    If one call stands for several nodes, `through` has all but the last of them.
    """

    op: str
    args: tuple[Any, ...]
    through: tuple[fx.Node, ...] = ()


COMMUTATIVE = {"add", "mul"}
# An operation that returns its first argument: the same elements in the same dtype.
IDENTITY = "identity"

OPERATORS = {
    operator.and_: "and",
    operator.or_: "or",
    operator.xor: "xor",
    operator.invert: "not",
    operator.getitem: "getitem",
}
# The properties of Tensor whose ATen operators have other names.
_PROPERTIES = {"numpy_T": "T", "matrix_H": "H"}

Spelling = Callable[..., "Call | None"]
# The calls of nodes, which depend on the nodes that they use: an attribute of a graph that does not
# change at the moment. Matching asks for each call a hundred times.
Known = dict[fx.Node, "Call | None"]
_KNOWN = "_liger_ops_calls"
FUNCTIONS: dict[Any, Spelling] = {}
METHODS: dict[str, Spelling] = {}


def value(argument: Any) -> Any:
    """The example value of an argument from tracing: a fake tensor, or a number."""
    return argument.meta.get("example_value") if isinstance(argument, fx.Node) else argument


def is_tensor(argument: Any, dim: int | None = None) -> bool:
    known = value(argument)
    return isinstance(known, Tensor) and (dim is None or known.dim() == dim)


def is_real(argument: Any) -> bool:
    return is_tensor(argument) and not value(argument).is_complex()


@contextlib.contextmanager
def unchanged(graph: fx.Graph, known: Known) -> Iterator[None]:
    """Look up the calls of `graph`, which the body does not change, in `known`."""
    before = getattr(graph, _KNOWN, None)
    setattr(graph, _KNOWN, known)
    try:
        yield
    finally:
        setattr(graph, _KNOWN, before)


def never_changed(graph: fx.Graph) -> None:
    setattr(graph, _KNOWN, {})


def canonical(node: Any) -> Call | None:
    if isinstance(node, Call):
        return node
    if not isinstance(node, fx.Node):
        return None
    known: Known | None = getattr(node.graph, _KNOWN, None)
    if known is None:
        return _canonical(node)
    if node not in known:
        known[node] = _canonical(node)
    return known[node]


def _canonical(node: fx.Node) -> Call | None:
    if (op := op_of(node)) is not None:
        ((_, given),) = bound([node])
        return Call(f"liger.{op}", tuple(given.values()))
    function = FUNCTIONS.get(node.target) if node.op == "call_function" else None
    spelling = function or METHODS.get(_method(node))
    if spelling is None:
        return None
    try:
        return spelling(*arguments(node), **node.kwargs)
    except TypeError:
        return None


def arguments(node: fx.Node) -> tuple[Any, ...]:
    """The arguments of a node, without the name of the property that it reads."""
    return node.args[:1] if node.target is getattr else node.args


def _method(node: fx.Node) -> str:
    """The name of the method of Tensor that a node calls, or of the property that it reads.

    Dynamo writes a property as `getattr` or, from torch 2.15 on, as its ATen operator; and within a
    function mode, such as that of torch.set_default_device, a method as a function of Tensor.
    """
    if node.op == "call_method":
        return str(node.target)
    if node.op != "call_function":
        return ""
    if node.target is getattr:
        name = str(node.args[1])
        return "" if callable(getattr(Tensor, name, None)) else name
    if isinstance(node.target, (OpOverload, OpOverloadPacket)):
        namespace, name = str(node.target).split(".")[:2]
        name = _PROPERTIES.get(name, name)
        return name if namespace == "aten" and hasattr(Tensor, name) else ""
    name = getattr(node.target, "__name__", "")
    return name if getattr(Tensor, name, None) is node.target else ""


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
        return same_number(a, b)
    if isinstance(a, torch.SymInt) or isinstance(b, torch.SymInt):
        return a is b or (a is not None and b is not None and statically_known_true(a == b))
    return (
        type(a) in (int, float)
        and type(b) in (int, float)
        and a == b
        or a is b
        or (type(a) is type(b) and bool(a == b))
    )


def same_number(a: Any, b: Any) -> bool:
    """Whether two numbers are equal, one of which Dynamo keeps symbolic with dynamic=True.

    Dynamo does that even to constants such as math.pi. Comparing them adds a guard: if they are
    equal now, the code is compiled again for numbers that are not.
    """
    if not all(isinstance(one, (int, float, torch.SymFloat, torch.SymInt)) for one in (a, b)):
        return False
    hints = [one if isinstance(one, (int, float)) else one.node.hint for one in (a, b)]
    return None not in hints and hints[0] == hints[1] and bool(a == b)


def spelled(*targets: Any) -> Callable[[Spelling], Spelling]:
    """Register a spelling for `targets`: functions, and names of methods."""

    def decorate(spelling: Spelling) -> Spelling:
        for target in targets:
            (METHODS if isinstance(target, str) else FUNCTIONS)[target] = spelling
        return spelling

    return decorate


def declared(op: str, signature: str, *targets: Any) -> None:
    """Register a spelling whose canonical form has the arguments of `signature`, in their order.

    Its parts are a parameter and its default. What name? stands for changes no number and is left
    out; name! has its default, or there is no canonical form; name+ is one dimension or several.
    """
    pattern = re.compile(r"(\w+)([?!+]?)(?:=(\S+))?")
    found = [part.groups() for part in pattern.finditer(signature)]
    names = {name: kind for name, kind, _ in found}
    defaults = {name: ast.literal_eval(text) for name, _, text in found if text}
    fixed = [(name, defaults[name]) for name, kind in names.items() if kind == "!"]
    kept = [
        (name, dimensions if kind else _CONVERTED.get(name, _as_it_is))
        for name, kind in names.items()
        if kind in ("", "+")
    ]

    @spelled(*targets)
    def spelling(*args: Any, **kwargs: Any) -> Call | None:
        given = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
        if given.keys() != names.keys() or len(args) > len(names):
            raise TypeError(f"{op} takes {signature}")
        if any(given[name] != default for name, default in fixed):
            return None
        x = given[found[0][0]]
        return Call(op, tuple([convert(x, given[name]) for name, convert in kept]))


def _as_it_is(x: Any, argument: Any) -> Any:
    return argument


def dimension(x: Any, dim: Any) -> Any:
    """The dimension `dim` of x, counted from the end."""
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


# The canonical form of the arguments with a name, of a call on x.
_CONVERTED: dict[str, Callable[[Any, Any], Any]] = {
    **dict.fromkeys(("dim", "start_dim", "end_dim"), dimension),
    "normalized_shape": lambda x, sizes: as_tuple(sizes),
    "keepdim": lambda x, keepdim: bool(keepdim),
    "dtype": lambda x, dtype: value(dtype),
}


def is_float32(x: Any) -> bool:
    tensor = value(x)
    return isinstance(tensor, Tensor) and tensor.dtype in (torch.float32, torch.float64)


def calls(x: Any, op: str) -> Call | None:
    call = canonical(x)
    return call if call is not None and call.op == op else None


def operation(node: fx.Node) -> str | None:
    """The name of the method, property or PyTorch function that a node calls; None for others."""
    if name := _method(node):
        name = name[2:-2] if name.startswith("__") and name.endswith("__") else name
        return "not" if name == "invert" else name
    if node.op != "call_function":
        return None
    if node.target in OPERATORS:
        return OPERATORS[node.target]
    name = getattr(node.target, "__name__", "")
    owners = (operator, torch, torch.nn.functional)
    return name if any(getattr(owner, name, None) is node.target for owner in owners) else None
