"""`Call`, the registry of spellings, and the helpers that spellings are written with."""

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

from ..report import bound, op_of


class Call(NamedTuple):
    """An operation and its arguments: nodes, other calls, constants, and tuples of those.

    One call may stand for several nodes, such as `linear` for a product with a transposed weight.
    `through` has these nodes, except for the last.
    """

    op: str
    args: tuple[Any, ...]
    through: tuple[fx.Node, ...] = ()


# The types of an operator, and of the name of operators that differ in their arguments.
OpOverload = type(torch.ops.aten.add.Tensor)
OpOverloadPacket = type(torch.ops.aten.add)

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
# Cache: node -> its canonical call. It is an attribute of a graph while that does not change,
# because a node's call depends on the nodes that it uses. Matching asks for each call a hundred
# times.
Known = dict[fx.Node, "Call | None"]
_CACHE = "_liger_ops_calls"
FUNCTIONS: dict[Any, Spelling] = {}
METHODS: dict[str, Spelling] = {}


def value(argument: Any) -> Any:
    """Return the example value of an argument from tracing: a fake tensor, or a number."""
    return argument.meta.get("example_value") if isinstance(argument, fx.Node) else argument


def is_tensor(argument: Any, dim: int | None = None) -> bool:
    """Return whether an argument is a tensor, of `dim` dimensions if that is given."""
    example = value(argument)
    return isinstance(example, Tensor) and (dim is None or example.dim() == dim)


def is_real(argument: Any) -> bool:
    return is_tensor(argument) and not value(argument).is_complex()


@contextlib.contextmanager
def unchanged(graph: fx.Graph, known: Known) -> Iterator[None]:
    """Cache the calls of `graph` in `known`. The body must not change the graph."""
    before = getattr(graph, _CACHE, None)
    setattr(graph, _CACHE, known)
    try:
        yield
    finally:
        setattr(graph, _CACHE, before)


def never_changed(graph: fx.Graph) -> None:
    """Cache the calls of a graph that will not change any more."""
    setattr(graph, _CACHE, {})


def canonical(node: Any) -> Call | None:
    """Return the canonical call of a node; None if it is no node, or has no spelling."""
    if isinstance(node, Call):
        return node
    if not isinstance(node, fx.Node):
        return None
    cache: Known | None = getattr(node.graph, _CACHE, None)
    if cache is None:
        return _canonical(node)
    if node not in cache:
        cache[node] = _canonical(node)
    return cache[node]


def _canonical(node: fx.Node) -> Call | None:
    if (op := op_of(node)) is not None:
        ((_, named),) = bound([node])
        return Call(f"liger.{op}", tuple(named.values()))
    function = FUNCTIONS.get(node.target) if node.op == "call_function" else None
    spelling = function or METHODS.get(_method(node))
    if spelling is None:
        return None
    try:
        return spelling(*arguments(node), **node.kwargs)
    except TypeError:
        # Python cannot bind the arguments to the spelling's signature.
        return None


def written_value(node: fx.Node) -> Call | None:
    """Return the canonical call whose result a method in place, such as `add_`, writes."""
    name = str(node.target)
    spelling = METHODS.get(name.removesuffix("_"))
    if node.op != "call_method" or not name.endswith("_") or spelling is None:
        return None
    try:
        return spelling(*node.args, **node.kwargs)
    except TypeError:
        return None


def arguments(node: fx.Node) -> tuple[Any, ...]:
    """Return the arguments of a node, without the name of a property that it reads."""
    return node.args[:1] if node.target is getattr else node.args


def _method(node: fx.Node) -> str:
    """Return the name of the Tensor method that a node calls, or of the property that it reads.

    It is "" for other nodes. Dynamo writes a property as `getattr` or, from torch 2.15 on, as its
    ATen operator. Within a function mode, such as that of torch.set_default_device, it writes a
    method as a function of Tensor.
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
    """Return whether two constants, or two sizes, are known to be equal.

    A tensor is equal only to itself. Comparing symbolic sizes adds no guard; see `same_number` for
    symbolic floats.
    """
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
    """Return whether two numbers are equal, of which at least one is symbolic.

    With dynamic=True Dynamo makes even constants such as math.pi symbolic. If the numbers of the
    traced call are equal, comparing them adds a guard, and the code is compiled again for others.
    """
    if not all(isinstance(x, (int, float, torch.SymFloat, torch.SymInt)) for x in (a, b)):
        return False
    # The hints are the numbers of the traced call. They are compared first, because a comparison of
    # symbols adds a guard in either case.
    hints = [x if isinstance(x, (int, float)) else x.node.hint for x in (a, b)]
    return None not in hints and hints[0] == hints[1] and bool(a == b)


def spelled(*targets: Any) -> Callable[[Spelling], Spelling]:
    """Register a spelling for `targets`: functions, and names of Tensor's methods."""

    def decorate(spelling: Spelling) -> Spelling:
        for target in targets:
            (METHODS if isinstance(target, str) else FUNCTIONS)[target] = spelling
        return spelling

    return decorate


def declared(op: str, signature: str, *targets: Any) -> None:
    """Register a spelling whose canonical form has the arguments of `signature`, in their order.

    `signature` lists the parameters, each as "name" or "name=default". A mark behind the name says
    what becomes of the argument: name? changes no number, and is left out of the canonical form;
    name! must have its default, or there is no canonical form; name+ is one dimension or several.
    """
    pattern = re.compile(r"(\w+)([?!+]?)(?:=(\S+))?")
    parameters = [parameter.groups() for parameter in pattern.finditer(signature)]
    marks = {name: mark for name, mark, _ in parameters}
    defaults = {name: ast.literal_eval(text) for name, _, text in parameters if text}
    fixed = [(name, defaults[name]) for name, mark in marks.items() if mark == "!"]
    kept = [
        (name, dimensions if mark else _CONVERTED.get(name, _unconverted))
        for name, mark in marks.items()
        if mark in ("", "+")
    ]

    @spelled(*targets)
    def spelling(*args: Any, **kwargs: Any) -> Call | None:
        values = {**defaults, **dict(zip(marks, args, strict=False)), **kwargs}
        if values.keys() != marks.keys() or len(args) > len(marks):
            raise TypeError(f"{op} takes {signature}")
        if any(values[name] != default for name, default in fixed):
            return None
        x = values[parameters[0][0]]
        return Call(op, tuple([convert(x, values[name]) for name, convert in kept]))


def _unconverted(x: Any, argument: Any) -> Any:
    return argument


def dimension(x: Any, dim: Any) -> Any:
    """Return the dimension `dim` of x, counted from the end: a negative number."""
    tensor = value(x)
    if isinstance(dim, int) and isinstance(tensor, Tensor):
        return dim - tensor.dim() if dim >= 0 else dim
    return dim


def dimensions(x: Any, dim: Any) -> Any:
    """Return one dimension or several as a sorted tuple, counted from the end; None stays None."""
    if isinstance(dim, (tuple, list)):
        return tuple(sorted(dimension(x, d) for d in dim))
    return dim if dim is None else (dimension(x, dim),)


def as_tuple(sizes: Any) -> Any:
    return tuple(sizes) if isinstance(sizes, (tuple, list)) else sizes


# Name of an argument -> function of the call's first argument and this one, which returns the
# argument's canonical form.
_CONVERTED: dict[str, Callable[[Any, Any], Any]] = {
    **dict.fromkeys(("dim", "start_dim", "end_dim"), dimension),
    "normalized_shape": lambda x, sizes: as_tuple(sizes),
    "keepdim": lambda x, keepdim: bool(keepdim),
    "dtype": lambda x, dtype: value(dtype),
}


def is_float32(x: Any) -> bool:
    """Return whether x is of float32 or float64: its operations need no wider dtype."""
    tensor = value(x)
    return isinstance(tensor, Tensor) and tensor.dtype in (torch.float32, torch.float64)


def calls(x: Any, op: str) -> Call | None:
    """Return the canonical call of x if that is a call of `op`."""
    call = canonical(x)
    return call if call is not None and call.op == op else None


def operation(node: fx.Node) -> str | None:
    """Return the name of the method, property or PyTorch function that a node calls, or None."""
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
