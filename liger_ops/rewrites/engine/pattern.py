"""Patterns: plain PyTorch functions that are searched for in a graph.

A `Pattern` is code as models contain it. It is traced, its operations are brought into the same
canonical form as the graph's, and both are unified from the last operation upwards. A parameter of
the function matches any value, and the same value at each of its uses.

Matching takes two steps. First the pattern is traced in float32, where its casts do nothing, and
the casts of the graph are ignored: this finds candidate values for the parameters. Then the pattern
is traced again with those values, in their dtypes and sizes, and must agree with the graph in
everything, casts included. A match of the first step that fails the second almost matched;
`Match.difference` says why it does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, fx
from torch.nn import functional

from ...torch_private import native_linear
from .canonical import COMMUTATIVE, IDENTITY, Call, calls, canonical, never_changed, same, value
from .casts import dtype_of, has_arithmetic, rounding, sources
from .replay import fake_mode_of, replay

# With more different constants than this, the code is another computation, not a near miss.
MOST_DIFFERENCES = 1
# Views and casts of an input. Their results may also be used elsewhere, because they are cheap.
CHEAP = {
    "cast", "chunk", "contiguous", "expand", "flatten", "repeat_interleave", "slice", "split",
    "transpose", "unsqueeze", "view",
}  # fmt: skip


@dataclass(frozen=True)
class Match:
    """The values of a pattern's parameters, and the nodes of the graph that it covers."""

    root: fx.Node
    values: Mapping[str, Any]
    nodes: frozenset[fx.Node]
    difference: str | None = None

    def __getitem__(self, parameter: str) -> Any:
        return self.values[parameter]


@dataclass(frozen=True)
class _State:
    values: Mapping[str, Any]
    nodes: frozenset[fx.Node]
    differences: tuple[str, ...] = ()


class Matcher(Protocol):
    """What finds a match that ends with a node: a pattern, or a reader of code."""

    op: str | None

    def match(self, node: fx.Node) -> Match | None: ...


class Pattern:
    """A function of tensors and numbers to search for in a graph.

    `examples` has a value to trace each parameter with: for a tensor its sizes as a tuple, for a
    number any number. Sizes must differ where equal sizes would change the function's meaning.
    """

    def __init__(self, function: Callable[..., Any], **examples: Any) -> None:
        self._graph = fx.Graph()
        tracer = fx.proxy.GraphAppendingTracer(self._graph)
        given = {name: fx.Proxy(self._graph.placeholder(name), tracer) for name in examples}
        with torch_linear():
            self._graph.output(function(**given).node)
        self._examples = {
            name: torch.empty(example, device="meta") if isinstance(example, tuple) else example
            for name, example in examples.items()
        }
        self._instances: dict[Any, fx.Node | None] = {}
        root = self._traced(self._examples)
        assert root is not None
        self._root = root
        self._tensors = {n for n, v in self._examples.items() if isinstance(v, Tensor)}
        self.op = last_operation(root)
        assert self.op is not None, f"{function}: its last operation is unknown"

    def match(self, node: fx.Node) -> Match | None:
        """Match the pattern with `node` as its last operation; None if not even a near miss."""
        if not isinstance(value(node), Tensor) or last_operation(node) != self.op:
            return None
        close: Match | None = None
        empty = _State({}, frozenset())
        for state in _Unifier(self._tensors, exact=False).unify(self._root, node, empty):
            match = Match(node, state.values, state.nodes)
            if not state.differences:
                exact = self._exact(node, state)
                if exact is not None:
                    return exact
                match = replace(match, difference=_of_casts(match))
            else:
                match = replace(match, difference=state.differences[0])
            if close is None or state.differences == ():
                close = match
        return close

    def _exact(self, node: fx.Node, found: _State) -> Match | None:
        root = self._instance({name: _values(v) for name, v in found.values.items()})
        if root is None:
            return None
        start = _State(found.values, frozenset())
        for state in _Unifier(self._tensors, exact=True).unify(root, node, start):
            return Match(node, state.values, state.nodes)
        return None

    def _instance(self, values: Mapping[str, Any]) -> fx.Node | None:
        """The pattern traced with `values`, cached by their dtypes, sizes and devices."""
        keys = [_key(values[name]) for name in sorted(values)]
        if None in keys:
            return self._traced({**self._examples, **values})
        key = (*keys, *_autocast_state(values))
        if key not in self._instances:
            self._instances[key] = self._traced({**self._examples, **values})
        return self._instances[key]

    def _traced(self, values: Mapping[str, Any]) -> fx.Node | None:
        """The last node of the pattern's graph, with example values for `values`.

        None if the function does not accept them.
        """
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        result = graph.graph_copy(self._graph, copies)
        known: dict[fx.Node, Any] = {}
        try:
            with torch.no_grad(), fake_mode_of(values.values()):
                for original in self._graph.nodes:
                    if original.op == "output":
                        break
                    out = _value_of(original, values, known)
                    known[original] = copies[original].meta["example_value"] = out
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):
            return None
        never_changed(graph)
        return result if isinstance(result, fx.Node) else None


def _of_casts(match: Match) -> str:
    """How a match differs from the op that has all of its operations."""
    tensors = [*map(value, match.values.values()), value(match.root)]
    known = {one.dtype for one in tensors if isinstance(one, Tensor)}
    casts = (node for node in match.nodes if calls(node, "cast"))
    rounded = [dtype for dtype in map(rounding, casts) if dtype and dtype not in known]
    if rounded:
        return f"a value on the way is rounded to {rounded[0]}, and the op does not round it"
    return "its casts or sizes are not the op's"


def last_operation(node: fx.Node) -> str | None:
    """The name of the operation of `node`, ignoring casts and copies of its result."""
    call = canonical(skip(node, {"cast", "contiguous", IDENTITY})[0])
    return None if call is None else call.op


def _values(found: Any) -> Any:
    return [_values(v) for v in found] if isinstance(found, (tuple, list)) else value(found)


def _value_of(node: fx.Node, values: Mapping[str, Any], known: Mapping[fx.Node, Any]) -> Any:
    if node.op == "placeholder":
        return values[str(node.target)]
    return replay(node, *fx.map_arg((node.args, node.kwargs), known.__getitem__))


def _key(known: Any) -> Any:
    """The part of a parameter's value that the trace of a pattern depends on.

    None for a symbolic value, whose trace cannot be used for others.
    """
    if isinstance(known, Tensor):
        if any(isinstance(size, torch.SymInt) for size in known.shape):
            return None
        return known.dtype, tuple(known.shape), known.device
    if isinstance(known, (torch.SymInt, torch.SymFloat)):
        return None
    if isinstance(known, (tuple, list)):
        parts = tuple(_key(part) for part in known)
        return None if None in parts else parts
    return type(known), known


def _autocast_state(values: Mapping[str, Any]) -> tuple[Any, ...]:
    devices = {v.device.type for v in values.values() if isinstance(v, Tensor)}
    return tuple(
        (device, torch.get_autocast_dtype(device))
        for device in sorted(devices)
        if torch.is_autocast_enabled(device)
    )


class _Unifier:
    def __init__(self, tensors: set[str], exact: bool) -> None:
        self.tensors, self.exact = tensors, exact
        self.overlooked = {IDENTITY, "contiguous"} if exact else {IDENTITY, "contiguous", "cast"}

    def unify(
        self, pattern: Any, found: Any, state: _State, op: str = "an argument"
    ) -> Iterator[_State]:
        """Yield each way to unify `pattern` with `found`, an argument of `op`, from `state` on."""
        if isinstance(pattern, fx.Node) and pattern.op == "placeholder":
            yield from self._bind(str(pattern.target), found, state)
        elif isinstance(pattern, (fx.Node, Call)):
            if isinstance(pattern, fx.Node) and not _is_computed(value(pattern)):
                yield from self._constant(value(pattern), found, state, "a size")
            else:
                yield from self._operation(pattern, found, state)
        elif isinstance(pattern, tuple):
            if isinstance(found, (tuple, list)) and len(found) == len(pattern):
                yield from self._all(pattern, tuple(found), state, op)
        else:
            yield from self._constant(pattern, found, state, op)

    def _operation(self, pattern: Any, found: Any, state: _State) -> Iterator[_State]:
        pattern, _ = skip(pattern, self.overlooked)
        if isinstance(pattern, fx.Node) and pattern.op == "placeholder":
            yield from self._bind(str(pattern.target), found, state)
            return
        found, passed = skip(found, self.overlooked)
        wanted, call = canonical(pattern), canonical(found)
        if wanted is None or call is None or wanted.op != call.op:
            return
        if self.exact and not _are_of_one_dtype(pattern, found):
            return
        if len(wanted.args) != len(call.args):
            return
        if isinstance(found, fx.Node):
            passed = (*passed, found)
        state = self._covering(state, (*passed, *call.through))
        yield from self._all(wanted.args, call.args, state, call.op)
        if wanted.op in COMMUTATIVE:
            yield from self._all(wanted.args, call.args[::-1], state, call.op)

    def _all(
        self, patterns: tuple[Any, ...], found: tuple[Any, ...], state: _State, op: str
    ) -> Iterator[_State]:
        if not patterns:
            yield state
            return
        first = patterns[0]
        if isinstance(first, (fx.Node, Call, tuple)):
            ways = self.unify(first, found[0], state, op)
        else:
            ways = self._constant(first, found[0], state, op)
        for way in ways:
            yield from self._all(patterns[1:], found[1:], way, op)

    def _constant(self, wanted: Any, found: Any, state: _State, op: str) -> Iterator[_State]:
        if isinstance(value(found), Tensor):
            return
        if same(wanted, found):
            yield state
        elif not self.exact:
            text = f"{op} has {_text(found)} where the op has {_text(wanted)}"
            # Sizes of the tracing example differ, and one node may be compared several times.
            if op in ("slice", "a size", "view", "expand") or text in state.differences:
                yield state
            elif len(state.differences) < MOST_DIFFERENCES:
                yield replace(state, differences=(*state.differences, text))

    def _bind(self, name: str, found: Any, state: _State) -> Iterator[_State]:
        """Bind a parameter to `found`, or to what that is a copy or a cast of, because the op takes
        any strides, and any dtype with arithmetic. In an exact match the cast changes no value."""
        dtype = dtype_of(found)
        for source, passed in sources(found, any_casts=not self.exact):
            before = dtype_of(source)
            if before == dtype or not (dtype and dtype.is_floating_point) or has_arithmetic(before):
                yield from self._bound(name, source, self._covering(state, passed))

    def _bound(self, name: str, found: Any, state: _State) -> Iterator[_State]:
        known = value(found)
        if known is not None and isinstance(known, Tensor) != (name in self.tensors):
            return
        if name not in state.values:
            yield replace(state, values={**state.values, name: found})
        elif state.values[name] is found or (
            not isinstance(known, Tensor) and same(state.values[name], found)
        ):
            yield state

    def _covering(self, state: _State, nodes: tuple[fx.Node, ...]) -> _State:
        return replace(state, nodes=state.nodes.union(nodes)) if nodes else state


def _are_of_one_dtype(pattern: Any, found: Any) -> bool:
    """Whether two operations compute in one dtype, as far as that is known: a call that stands for
    several nodes has no value, and within autocast an op may run outside of it."""
    a, b = value(pattern), value(found)
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return True
    return a.dtype == b.dtype or torch.is_autocast_enabled(b.device.type)


def _is_computed(known: Any) -> bool:
    """Whether `known` is the result of an operation on tensors, not a size or a dtype."""
    if isinstance(known, (tuple, list)):
        return any(isinstance(part, Tensor) for part in known)
    return isinstance(known, Tensor)


def skip(node: Any, over: set[str]) -> tuple[Any, tuple[fx.Node, ...]]:
    """Follow `node` back through operations named in `over`; also returns the nodes passed."""
    passed: tuple[fx.Node, ...] = ()
    while isinstance(node, fx.Node):
        call = canonical(node)
        if call is None or call.op not in over:
            break
        passed = (*passed, node)
        node = call.args[0]
    return node, passed


def _text(constant: Any) -> str:
    constant = value(constant)
    if isinstance(constant, tuple):
        return ", ".join(str(part) for part in constant)
    return str(constant)


@contextmanager
def torch_linear() -> Iterator[None]:
    """Within it, torch.nn.functional.linear is PyTorch's. DeepSpeed's `zero.Init` sets an autograd
    function there for the rest of the process, in which nothing is recognised."""
    current = functional.linear
    functional.linear = native_linear
    try:
        yield
    finally:
        functional.linear = current
