"""Patterns: plain PyTorch functions that are searched for in a graph.

A `Pattern` is code as models contain it. It is traced, its operations are brought into the same
canonical form as the graph's, and the two are unified from the last operation to the first. A
parameter of the function matches any value, and the same value at each of its uses.

Matching takes two steps. First the pattern is traced in float32, where its casts do nothing, and
the casts of the graph are ignored: this finds candidate values for the parameters. Then the pattern
is traced again with those values, in their dtypes and sizes, and must agree with the graph in
everything, casts included. Code that passes the first step and fails the second is a near miss:
`Match.difference` says how it differs.
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
from .insertion import fake_mode_of, replay
from .maps.index_maps import VIEWS

# Code with more different constants than this is another computation, not a near miss.
MOST_DIFFERENCES = 1
# Views and casts of an input. Code outside a match may also use their results: the op does not need
# them, and to compute them is cheap.
CHEAP = VIEWS | {"cast", "chunk", "split"}


@dataclass(frozen=True)
class Match:
    """The values of a pattern's parameters, and the nodes of the graph that the op replaces.

    Attributes:
        root: the last node, whose value the op returns.
        difference: how the code of a near miss differs from the pattern, one clause; None for a
            match.
    """

    root: fx.Node
    values: Mapping[str, Any]
    nodes: frozenset[fx.Node]
    difference: str | None = None

    def __getitem__(self, parameter: str) -> Any:
        return self.values[parameter]


@dataclass(frozen=True)
class _Binding:
    """The parameters that are bound so far, the nodes matched, and the differences met."""

    values: Mapping[str, Any]
    nodes: frozenset[fx.Node]
    differences: tuple[str, ...] = ()


class Matcher(Protocol):
    """An object that finds a match ending at a node: a `Pattern`, or rope's `Reader`.

    `op` is the canonical name of the last operation of its matches.
    """

    op: str | None

    def match(self, node: fx.Node) -> Match | None: ...


class Pattern:
    """A function of tensors and numbers to search for in a graph.

    `examples` has a value with which each parameter is traced: for a tensor its sizes as a tuple,
    for a number any number. Sizes must differ where equal sizes would change what the function
    computes.
    """

    def __init__(self, function: Callable[..., Any], **examples: Any) -> None:
        self._graph = fx.Graph()
        tracer = fx.proxy.GraphAppendingTracer(self._graph)
        proxies = {name: fx.Proxy(self._graph.placeholder(name), tracer) for name in examples}
        with torch_linear():
            self._graph.output(function(**proxies).node)
        self._examples = {
            name: torch.empty(example, device="meta") if isinstance(example, tuple) else example
            for name, example in examples.items()
        }
        self._instances: dict[Any, fx.Node | None] = {}
        root = self._trace(self._examples)
        assert root is not None
        self._root = root
        self._tensors = {n for n, v in self._examples.items() if isinstance(v, Tensor)}
        self.op = last_operation(root)
        assert self.op is not None, f"{function}: its last operation is unknown"

    def match(self, node: fx.Node) -> Match | None:
        """Match the pattern with `node` as its last operation.

        Returns a match; else a near miss, with a difference; else None.
        """
        if not isinstance(value(node), Tensor) or last_operation(node) != self.op:
            return None
        near_miss: Match | None = None
        empty = _Binding({}, frozenset())
        for state in _Unifier(self._tensors, exact=False).unify(self._root, node, empty):
            match = Match(node, state.values, state.nodes)
            if not state.differences:
                exact = self._exact(node, state)
                if exact is not None:
                    return exact
                match = replace(match, difference=_cast_difference(match))
            else:
                match = replace(match, difference=state.differences[0])
            # A near miss that differs in casts alone is reported rather than another constant.
            if near_miss is None or state.differences == ():
                near_miss = match
        return near_miss

    def _exact(self, node: fx.Node, first: _Binding) -> Match | None:
        root = self._instance({name: _values_of(v) for name, v in first.values.items()})
        if root is None:
            return None
        start = _Binding(first.values, frozenset())
        for state in _Unifier(self._tensors, exact=True).unify(root, node, start):
            return Match(node, state.values, state.nodes)
        return None

    def _instance(self, values: Mapping[str, Any]) -> fx.Node | None:
        """Trace the pattern with `values`, with a cache by their dtypes, sizes and devices."""
        keys = [_trace_key(values[name]) for name in sorted(values)]
        if None in keys:
            return self._trace({**self._examples, **values})
        key = (*keys, *_autocast_state(values))
        if key not in self._instances:
            self._instances[key] = self._trace({**self._examples, **values})
        return self._instances[key]

    def _trace(self, values: Mapping[str, Any]) -> fx.Node | None:
        """Trace the pattern with `values`, and return the last node of its graph.

        None if the function does not accept the values.
        """
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        result = graph.graph_copy(self._graph, copies)
        results: dict[fx.Node, Any] = {}
        try:
            with torch.no_grad(), fake_mode_of(values.values()):
                for original in self._graph.nodes:
                    if original.op == "output":
                        break
                    out = _evaluate(original, values, results)
                    results[original] = copies[original].meta["example_value"] = out
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):
            return None
        never_changed(graph)
        return result if isinstance(result, fx.Node) else None


def _cast_difference(match: Match) -> str:
    """Return how a near miss differs from the pattern, all of whose operations it has."""
    tensors = [*map(value, match.values.values()), value(match.root)]
    dtypes = {x.dtype for x in tensors if isinstance(x, Tensor)}
    casts = (node for node in match.nodes if calls(node, "cast"))
    rounded = [dtype for dtype in map(rounding, casts) if dtype and dtype not in dtypes]
    if rounded:
        return f"a value on the way is rounded to {rounded[0]}, and the op does not round it"
    return "its casts or sizes are not the op's"


def last_operation(node: fx.Node) -> str | None:
    """Return the name of the operation of `node`, behind casts and copies of its result."""
    call = canonical(skip(node, {"cast", "contiguous", IDENTITY})[0])
    return None if call is None else call.op


def _values_of(x: Any) -> Any:
    return [_values_of(v) for v in x] if isinstance(x, (tuple, list)) else value(x)


def _evaluate(node: fx.Node, values: Mapping[str, Any], results: Mapping[fx.Node, Any]) -> Any:
    if node.op == "placeholder":
        return values[str(node.target)]
    return replay(node, *fx.map_arg((node.args, node.kwargs), results.__getitem__))


def _trace_key(example: Any) -> Any:
    """Return a cache key for what the trace of a pattern depends on in a parameter's value.

    None for a value with symbols: its trace cannot be used for other values.
    """
    if isinstance(example, Tensor):
        if any(isinstance(size, torch.SymInt) for size in example.shape):
            return None
        return example.dtype, tuple(example.shape), example.device
    if isinstance(example, (torch.SymInt, torch.SymFloat)):
        return None
    if isinstance(example, (tuple, list)):
        keys = tuple(_trace_key(item) for item in example)
        return None if None in keys else keys
    return type(example), example


def _autocast_state(values: Mapping[str, Any]) -> tuple[Any, ...]:
    devices = {v.device.type for v in values.values() if isinstance(v, Tensor)}
    return tuple(
        (device, torch.get_autocast_dtype(device))
        for device in sorted(devices)
        if torch.is_autocast_enabled(device)
    )


class _Unifier:
    """Unifies a pattern's calls with a graph's: the first step of matching, or the `exact` one.

    `tensors` are the names of the parameters that are tensors.
    """

    def __init__(self, tensors: set[str], exact: bool) -> None:
        self.tensors, self.exact = tensors, exact
        self.skipped = {IDENTITY, "contiguous"} if exact else {IDENTITY, "contiguous", "cast"}

    def unify(
        self, pattern: Any, actual: Any, state: _Binding, op: str = "an argument"
    ) -> Iterator[_Binding]:
        """Yield the state after each way to unify `pattern` with `found`, an argument of `op`."""
        if isinstance(pattern, fx.Node) and pattern.op == "placeholder":
            yield from self._bind(str(pattern.target), actual, state)
        elif isinstance(pattern, (fx.Node, Call)):
            if isinstance(pattern, fx.Node) and not _is_computed(value(pattern)):
                yield from self._constant(value(pattern), actual, state, "a size")
            else:
                yield from self._operation(pattern, actual, state)
        elif isinstance(pattern, tuple):
            if isinstance(actual, (tuple, list)) and len(actual) == len(pattern):
                yield from self._all(pattern, tuple(actual), state, op)
        else:
            yield from self._constant(pattern, actual, state, op)

    def _operation(self, pattern: Any, actual: Any, state: _Binding) -> Iterator[_Binding]:
        pattern, _ = skip(pattern, self.skipped)
        if isinstance(pattern, fx.Node) and pattern.op == "placeholder":
            yield from self._bind(str(pattern.target), actual, state)
            return
        actual, passed = skip(actual, self.skipped)
        wanted, call = canonical(pattern), canonical(actual)
        if wanted is None or call is None or wanted.op != call.op:
            return
        if self.exact and not _same_dtype(pattern, actual):
            return
        if len(wanted.args) != len(call.args):
            return
        if isinstance(actual, fx.Node):
            passed = (*passed, actual)
        state = self._covering(state, (*passed, *call.through))
        yield from self._all(wanted.args, call.args, state, call.op)
        if wanted.op in COMMUTATIVE:
            # Of two orders that both unify here, perhaps only one agrees with the rest of the code.
            yield from self._all(wanted.args, call.args[::-1], state, call.op)

    def _all(
        self, patterns: tuple[Any, ...], actual: tuple[Any, ...], state: _Binding, op: str
    ) -> Iterator[_Binding]:
        if not patterns:
            yield state
            return
        first = patterns[0]
        if isinstance(first, (fx.Node, Call, tuple)):
            states = self.unify(first, actual[0], state, op)
        else:
            states = self._constant(first, actual[0], state, op)
        for next_state in states:
            yield from self._all(patterns[1:], actual[1:], next_state, op)

    def _constant(self, wanted: Any, actual: Any, state: _Binding, op: str) -> Iterator[_Binding]:
        if isinstance(value(actual), Tensor):
            return
        if same(wanted, actual):
            yield state
        elif not self.exact:
            text = f"{op} has {_text(actual)} where the op has {_text(wanted)}"
            # The first step ignores sizes, because the pattern is traced with those of an example.
            # A difference counts once, however often its node is compared.
            if op in ("slice", "a size", "view", "expand") or text in state.differences:
                yield state
            elif len(state.differences) < MOST_DIFFERENCES:
                yield replace(state, differences=(*state.differences, text))

    def _bind(self, name: str, actual: Any, state: _Binding) -> Iterator[_Binding]:
        """Bind a parameter to `found`, or to a tensor that `found` is a copy or a cast of.

        The op takes that itself, because it accepts any strides, and any dtype with arithmetic. In
        an exact match only casts that change no value are skipped.
        """
        dtype = dtype_of(actual)
        for source, passed in sources(actual, any_casts=not self.exact):
            before = dtype_of(source)
            if before == dtype or not (dtype and dtype.is_floating_point) or has_arithmetic(before):
                yield from self._bound(name, source, self._covering(state, passed))

    def _bound(self, name: str, actual: Any, state: _Binding) -> Iterator[_Binding]:
        example = value(actual)
        if example is not None and isinstance(example, Tensor) != (name in self.tensors):
            return
        if name not in state.values:
            yield replace(state, values={**state.values, name: actual})
        elif state.values[name] is actual or (
            not isinstance(example, Tensor) and same(state.values[name], actual)
        ):
            yield state

    def _covering(self, state: _Binding, nodes: tuple[fx.Node, ...]) -> _Binding:
        return replace(state, nodes=state.nodes.union(nodes)) if nodes else state


def _same_dtype(pattern: Any, actual: Any) -> bool:
    """Return whether two operations compute in one dtype, as far as that is known.

    A call inside of another call has no example value. Under autocast the dtypes may differ, since
    the op may run outside autocast.
    """
    a, b = value(pattern), value(actual)
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return True
    return a.dtype == b.dtype or torch.is_autocast_enabled(b.device.type)


def _is_computed(example: Any) -> bool:
    """Return whether `example` is the result of an operation on tensors, not a size or a dtype."""
    if isinstance(example, (tuple, list)):
        return any(isinstance(item, Tensor) for item in example)
    return isinstance(example, Tensor)


def skip(node: Any, over: set[str]) -> tuple[Any, tuple[fx.Node, ...]]:
    """Follow `node` back through the operations `over`, to their first arguments.

    Returns the node that is reached, and the nodes that were passed.
    """
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
        return ", ".join(str(item) for item in constant)
    return str(constant)


@contextmanager
def torch_linear() -> Iterator[None]:
    """Restore PyTorch's own torch.nn.functional.linear within the context.

    DeepSpeed's `zero.Init` replaces it, for the rest of the process, by an autograd function, in
    which nothing is recognised.
    """
    current = functional.linear
    functional.linear = native_linear
    try:
        yield
    finally:
        functional.linear = current
