"""Replace matches by ops where that changes nothing but speed and memory.

A `Search` goes through a graph from its end, and hands each match to the rewrite. The rewrite
inserts the op (`emit`) and replaces the match (`Search.replace`), or raises `Refused`, with a
reason. `obstacle` checks the match before: no intermediate value may be used elsewhere, all
operations run in the same modes, and no tensor is written in place between them. `check_results`
checks that the op's result has the same dtype, device and sizes, and the same strides where the
graph observes them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from .canonical import IDENTITY, Known, calls, canonical, is_tensor, same, unchanged, value
from .casts import dtype_of, has_arithmetic, mark, modes_of, represents
from .effects import is_plain
from .graph_state import GraphState, erase_unused, needed_by, noticed
from .insertion import Refused, derive, insert, run
from .pattern import CHEAP, Match, Matcher, Pattern, last_operation
from .report import Report

# Function that returns the op that replaces a match, and the op's arguments, or raises Refused.
Replacement = Callable[[Match], tuple[Any, tuple[Any, ...]]]


@dataclasses.dataclass(frozen=True)
class InDtypesOfInputs:
    """A replacement whose op runs in the dtypes of its inputs under autocast too."""

    replacement: Replacement

    def __call__(self, match: Match) -> tuple[Any, tuple[Any, ...]]:
        return self.replacement(match)


def replace_all(
    graph: fx.Graph, report: Report, name: str,
    spellings: Sequence[tuple[Pattern, Replacement]], by_rows: bool = False,
) -> None:  # fmt: skip
    """Replace every match by the op of the first spelling that matches exactly.

    `by_rows` says that the op computes each row of its first argument, along the last dimension, on
    its own, so that the order of the rows does not matter.
    """

    def put(match: Match, replacement: Replacement, search: Search) -> fx.Node:
        outside = runs_outside(match, replacement)
        with modes_of(match.root, search.state, outside) as is_outside:
            target, args = replacement(match)
            require_unwritten_sources(args, match, search.state)
            new = (emit_by_rows if by_rows else emit)(match.root, target, args)
            search.replace((match, new))
        if is_outside:
            mark(new)
        return new

    put_all(graph, report, name, spellings, put)


def put_all(
    graph: fx.Graph, report: Report, name: str, spellings: Sequence[tuple[Matcher, Any]],
    put: Callable[[Match, Any, Search], fx.Node],
) -> None:  # fmt: skip
    """Replace every match by `put`, with the first spelling that it does not refuse.

    `put(match, data, search)` replaces a match, and returns the op's node. `spellings` are pairs of
    a matcher and this data.
    """
    search = Search(graph, report, name)
    for match, data in search.matches(spellings):
        search.attempt(match, put, data, search)
    search.finish()


@contextlib.contextmanager
def reported(graph: fx.Graph, report: Report, op: str, node: fx.Node) -> Iterator[None]:
    """Try to replace `node` by an op in the body; report it if the body raises Refused."""
    try:
        with attempt(graph):
            yield
    except Refused as refused:
        report.refused(op, node, str(refused))


def runs_outside(match: Match, replacement: Replacement) -> bool:
    """Return whether the op must run outside autocast, which would cast its inputs to float32.

    The code that it replaces computes with the inputs as they are.
    """
    if not isinstance(replacement, InDtypesOfInputs):
        return False
    dtypes = {value(x).dtype for x in match.values.values() if is_tensor(x)}
    return bool(dtypes & {torch.bfloat16, torch.float16})


def require_unwritten_sources(args: tuple[Any, ...], match: Match, state: GraphState) -> None:
    """Raise Refused if the op would read the source of a cast that was written after the cast."""
    inputs = {x for x in match.values.values() if isinstance(x, fx.Node)}
    # Arguments that are neither: a replacement took the source of an input that is a cast.
    for source in {x for x in args if isinstance(x, fx.Node)} - inputs - match.nodes:
        casts = [x for x in inputs if source in x.all_input_nodes]
        if any(state.written([source], cast, match.root) for cast in casts):
            raise Refused(f"{source.name}, which it casts, is written in place afterwards")


class Search:
    """The matches of one rewrite in a graph: which were used, which were refused, and why.

    `shared` are targets of calls whose results may also be used outside of a match: it is the
    rewrite that decides about these.
    """

    def __init__(
        self, graph: fx.Graph, report: Report, name: str, shared: Collection[Any] = ()
    ) -> None:
        self.graph, self.report, self.name, self.shared = graph, report, name, shared
        self.state = GraphState(graph)
        self._covered: set[fx.Node] = set()
        self._set_aside: set[fx.Node] = set()
        self._refused: list[tuple[Match, str]] = []
        self._used: list[fx.Node] = []
        self._calls: Known = {}

    def matches(self, spellings: Sequence[tuple[Matcher, Any]]) -> Iterator[tuple[Match, Any]]:
        """Yield the exact matches, with the second item of their spelling, from the graph's end on.

        In this order a pattern with one more operation at its end is found before the pattern
        without. A node is the last of at most one match that is not refused.
        """
        for node in self.report.visiting(self.name, reversed(list(self.graph.nodes))):
            if node in self._covered or node in self._set_aside:
                continue
            with unchanged(self.graph, self._calls):
                call = canonical(node)
                op = last_operation(node) if is_tensor(node) else None
            if call is None or call.op == IDENTITY or self.state.transformed(node):
                continue
            if foreign([node]):
                continue
            near_misses: list[tuple[Match, str]] = []
            for pattern, data in spellings:
                if pattern.op != op:
                    continue
                with self.state.modes_of(node), unchanged(self.graph, self._calls):
                    match = pattern.match(node)
                if match is None:
                    continue
                reason = match.difference or match_obstacle(match, self.state, self.shared)
                if reason is not None:
                    near_misses.append((match, reason))
                    continue
                refused_before = len(self._refused)
                yield match, data
                # The rewrite may have changed the graph.
                self._calls.clear()
                if len(self._refused) == refused_before:
                    near_misses = []
                    break
            self._refused += near_misses

    def set_aside(self, match: Match) -> None:
        """Look for no further matches that end within this one, whether it is used or not."""
        self._set_aside |= match.nodes

    def replace(self, *pairs: tuple[Match, fx.Node]) -> None:
        """Replace each match by the node beside it, or raise Refused."""
        nodes = {node for match, _ in pairs for node in match.nodes}
        replace([(match.root, new) for match, new in pairs], nodes, self.state)
        self._covered |= nodes

    def attempt(self, match: Match, put: Callable[..., fx.Node], *args: Any) -> None:
        """Let `put(match, *args)` replace a match by an op; record the op, or why it is refused."""
        try:
            with attempt(self.graph):
                self.used(put(match, *args))
        except Refused as refused:
            self.refuse(match, str(refused))

    def used(self, node: fx.Node) -> None:
        self._used.append(node)

    def refuse(self, match: Match, reason: str) -> None:
        self._refused.append((match, reason))

    def finish(self) -> None:
        """Report the uses and refusals, in the order of the graph.

        Of several near misses that share nodes the last in the graph is reported, and none that
        shares nodes with a match that was used.
        """
        for node in reversed(self._used):
            self.report.used(self.name, node)
        reported = set(self._covered)
        refused = []
        for match, reason in self._refused:
            if not match.nodes & reported:
                refused.append((match.root, reason))
                reported |= match.nodes
        for root, reason in reversed(refused):
            self.report.refused(self.name, root, reason)


def obstacle(
    roots: Collection[fx.Node], nodes: Collection[fx.Node], values: Iterable[Any],
    state: GraphState, shared: Collection[Any] = (), writers: Collection[fx.Node] = (),
) -> str | None:  # fmt: skip
    """Return why `nodes`, which compute `roots` from `values`, cannot be replaced, or None.

    An intermediate value is used elsewhere, unless its target is in `shared`; or the nodes run in
    several modes; or an input is no plain tensor; or a tensor is written in place between them, by
    a node that is not in `writers`.
    """
    computed = set()
    for node in nodes:
        call = canonical(node)
        # The result of an identity is an input or a value that is checked itself.
        if call is not None and call.op == IDENTITY:
            continue
        computed.add(node)
        if node in roots or (call is not None and call.op in CHEAP):
            continue
        reason = used_elsewhere(node, nodes)
        if reason is not None and node.target not in shared:
            return reason
    if not state.one_mode(computed):
        return "its operations run in different gradient or autocast modes"
    inputs = [x for x in values if isinstance(x, fx.Node)]
    if reason := foreign(inputs):
        return reason
    # The op reads its inputs where the last node stands, and the code reads them from the first on.
    first, *_, last = sorted((*nodes, *roots), key=state.order.__getitem__)
    if state.written([*nodes, *inputs], first, last, apart_from=writers):
        return "a tensor is written in place between its operations"
    return None


def match_obstacle(match: Match, state: GraphState, shared: Collection[Any] = ()) -> str | None:
    """Return the `obstacle` to replacing a match, or None."""
    return obstacle([match.root], match.nodes, match.values.values(), state, shared)


def used_elsewhere(node: fx.Node, matched: Collection[fx.Node]) -> str | None:
    """Return why an intermediate value has to be computed still, or None if it has not."""
    outside = next((user for user in node.users if user not in matched), None)
    if outside is None:
        return None
    return f"{node.name}, a value on the way, is used elsewhere, by {outside.name}"


def foreign(inputs: Iterable[Any]) -> str | None:
    """Return why the ops do not accept one of `inputs`, such as a DTensor, or None."""
    for x in inputs:
        example = value(x)
        if isinstance(example, Tensor) and not is_plain(example):
            return f"{x} is a {type(example).__name__}, not a plain dense tensor"
    return None


@contextlib.contextmanager
def attempt(graph: fx.Graph) -> Iterator[None]:
    """Erase the nodes that the body inserted if it raises Refused."""
    before = set(graph.nodes)
    try:
        yield
    except Refused:
        for node in reversed(list(graph.nodes)):
            if node not in before:
                graph.erase_node(node)
        raise


def replace(
    pairs: Sequence[tuple[fx.Node, fx.Node]], matched: Collection[fx.Node], state: GraphState
) -> None:
    """Replace the first node of each pair by the second; erase matched nodes that become unused.

    Raises:
        Refused: a new value has another dtype, device or sizes, or other strides that the graph
            would observe; or a node that is kept shares memory with an old value. Then nothing is
            changed.
    """
    check_results({root: value(new) for root, new in pairs}, state)
    for root, _ in pairs:
        if other := _sharing(root, matched, state):
            raise Refused(f"{other.name}, which is used elsewhere, shares the result's memory")
    for root, new in pairs:
        root.replace_all_uses_with(new)
    for root, _ in pairs:
        erase_unused(root, matched)


def check_results(results: Mapping[fx.Node, Any], state: GraphState) -> None:
    """Raise Refused if new results differ in dtype, device or sizes, or observably in strides."""
    for node, after in results.items():
        for name in ("dtype", "shape", "device"):
            if not same(getattr(after, name), getattr(value(node), name)):
                raise Refused(
                    f"the result would have the {name} {getattr(after, name)}, "
                    f"not {getattr(value(node), name)}"
                )
    restrided = {n: y for n, y in results.items() if not same(y.stride(), value(n).stride())}
    if reason := noticed(restrided, state):
        node, after = next(iter(restrided.items()))
        raise Refused(
            f"the result would have the strides {after.stride()}, not {value(node).stride()},"
            f" {reason}"
        )


def _sharing(root: fx.Node, matched: Collection[fx.Node], state: GraphState) -> fx.Node | None:
    """Return a node that shares memory with `root`, is kept, and is not computed from `root`.

    The op's result is new memory, which such a node would not share.
    """
    order = state.order
    for node in state.sharing(root):
        is_kept = any(user not in matched for user in node.users)
        if is_kept and root not in needed_by(node, end=lambda n: order[n] <= order[root]):
            return node
    return None


def emit(root: fx.Node, target: Any, args: tuple[Any, ...]) -> fx.Node:
    """Insert a call of `target` before `root`, which it is to replace.

    Raises:
        Refused: the op does not accept the arguments; the text is the op's own message.
    """
    return insert(root, target, args, run(target, args))


def emit_by_rows(root: fx.Node, target: Any, args: tuple[Any, ...]) -> fx.Node:
    """Insert a call of an op by rows, on x with its dimensions in the order of memory.

    x and the old result may be transposed, as the heads of a projection viewed as (B, heads, S, D)
    are. The op's result is contiguous: computed from x as it is, it would have other strides.
    """
    x, before = args[0], value(root)
    swapped = next(
        (
            pair
            for pair in itertools.combinations(range(before.dim() - 1), 2)
            if before.transpose(*pair).is_contiguous() and value(x).transpose(*pair).is_contiguous()
        ),
        None,
    )
    if before.is_contiguous() or swapped is None:
        return emit(root, target, args)
    rows = derive(root, torch.transpose, x, *swapped)
    op = emit(root, target, (rows, *args[1:]))
    return derive(root, torch.transpose, op, *swapped)


def number(argument: Any) -> Any:
    """Return a number as an op takes it: a float, or a node whose value is a symbolic number."""
    known = value(argument)
    if isinstance(known, bool) or not isinstance(known, (int, float, torch.SymFloat, torch.SymInt)):
        raise Refused(f"{argument} is not a number that is known at compile time")
    return float(known) if isinstance(known, int) else argument


def before_widening(argument: Any) -> Any:
    """Return the source of a cast to float32 that changes no value, or the argument itself.

    It is for an op that computes in float32 anyhow.
    """
    call = calls(argument, "cast")
    source = None if call is None else dtype_of(call.args[0])
    if call is None or source is None or not has_arithmetic(source):
        return argument
    is_exact = call.args[1] is torch.float32 and represents(torch.float32, source)
    return call.args[0] if is_exact else argument


def require_same_shape(a: Any, b: Any) -> None:
    """Raise Refused if two tensors are broadcast against each other."""
    shapes = [tuple(value(x).shape) if is_tensor(x) else x for x in (a, b)]
    if not same(*shapes):
        raise Refused(f"{shapes[0]} and {shapes[1]} are broadcast against each other")
