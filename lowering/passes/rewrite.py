"""Put an op in the place of a match, where that changes nothing but the speed."""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from .canonical import IDENTITY, canonical, is_tensor, same, value
from .effects import is_plain
from .graph_state import GraphState, erase_unused, fake_mode_of
from .layout import noticed
from .pattern import CHEAP, Match, Pattern
from .report import Report
from .spelling import calls

# What a new node has from the one whose place it takes: where it comes from in the user's code.
_ORIGIN = ("stack_trace", "nn_module_stack", "source_fn_stack")

# Of a match, the op that takes its place and its arguments; Refused where there is none.
Replacement = Callable[[Match], tuple[Any, tuple[Any, ...]]]


class Refused(Exception):
    """Why a match is left alone: one clause."""


def replace_all(
    graph: fx.Graph,
    report: Report,
    name: str,
    spellings: Sequence[tuple[Pattern, Replacement]],
    by_rows: bool = False,
) -> None:
    """Replace every match of the first spelling that fits exactly.

    `by_rows` says of an op that its first argument's rows, along the last dimension, are computed
    each for itself: in whatever order they lie.
    """
    search = Search(graph, report, name)
    for match, replacement in search.matches(spellings):
        try:
            with attempt(graph), search.state.modes_of(match.root):
                target, args = replacement(match)
                new = (emit_by_rows if by_rows else emit)(match.root, target, args)
                search.replace((match, new))
        except Refused as refused:
            search.refuse(match, str(refused))
            continue
        search.used(new)
    search.finish()


class Search:
    """The matches of one rewrite in a graph, and what becomes of them."""

    def __init__(self, graph: fx.Graph, report: Report, name: str) -> None:
        self.graph, self.report, self.name = graph, report, name
        self.state = GraphState(graph)
        self._covered: set[fx.Node] = set()
        self._set_aside: set[fx.Node] = set()
        self._refused: list[tuple[Match, str]] = []
        self._used: list[fx.Node] = []

    def matches(self, spellings: Sequence[tuple[Pattern, Any]]) -> Iterator[tuple[Match, Any]]:
        """The exact matches, the last of the graph first: a pattern with a further operation is
        found before one without. A node is the last of one match at most."""
        for node in self.report.visiting(self.name, reversed(list(self.graph.nodes))):
            if node in self._covered or node in self._set_aside:
                continue
            call = canonical(node)
            if call is None or call.op == IDENTITY or self.state.transformed(node):
                continue
            if foreign([node]):
                continue
            close: list[tuple[Match, str]] = []
            for pattern, what in spellings:
                with self.state.modes_of(node):
                    match = pattern.match(node)
                if match is None:
                    continue
                reason = match.difference or obstacle(match, self.state)
                if reason is not None:
                    close.append((match, reason))
                    continue
                refused = len(self._refused)
                yield match, what
                if len(self._refused) == refused:
                    close = []
                    break
            self._refused += close

    def set_aside(self, match: Match) -> None:
        """Seek no other match that ends within this one, whatever becomes of it."""
        self._set_aside |= match.nodes

    def replace(self, *pairs: tuple[Match, fx.Node]) -> None:
        """Put each node in the place of its match, or raise Refused."""
        nodes = {node for match, _ in pairs for node in match.nodes}
        replace([(match.root, new) for match, new in pairs], nodes, self.state)
        self._covered |= nodes

    def used(self, node: fx.Node) -> None:
        self._used.append(node)

    def refuse(self, match: Match, reason: str) -> None:
        self._refused.append((match, reason))

    def finish(self) -> None:
        """Report, in the order of the graph."""
        for node in reversed(self._used):
            self.report.used(self.name, node)
        told = set(self._covered)
        refused = []
        for match, reason in self._refused:
            if not match.nodes & told:
                refused.append((match.root, reason))
                told |= match.nodes
        for root, reason in reversed(refused):
            self.report.refused(self.name, root, reason)


def obstacle(match: Match, state: GraphState) -> str | None:
    """Why an op in the place of `match` would not see, or not leave, what the nodes do."""
    computed = set()
    for node in match.nodes:
        call = canonical(node)
        if call is not None and call.op == IDENTITY:
            continue
        computed.add(node)
        if node is match.root or (call is not None and call.op in CHEAP):
            continue
        outside = [user for user in node.users if user not in match.nodes]
        if outside:
            return f"{node.name}, a value on the way, is used elsewhere, by {outside[0].name}"
    if not state.one_mode(computed):
        return "its operations run in different gradient or autocast modes"
    inputs = [v for v in match.values.values() if isinstance(v, fx.Node)]
    if reason := foreign(inputs):
        return reason
    first = min(match.nodes, key=state.order.__getitem__)
    if state.written([*match.nodes, *inputs], first, match.root):
        return "a tensor is written in place between its operations"
    return None


def foreign(inputs: Iterable[Any]) -> str | None:
    """Why the ops do not take the tensors among `inputs`: they are DTensors, or the like."""
    for one in inputs:
        known = value(one)
        if isinstance(known, Tensor) and not is_plain(known):
            return f"{one} is a {type(known).__name__}, not a plain dense tensor"
    return None


@contextlib.contextmanager
def attempt(graph: fx.Graph) -> Iterator[None]:
    """Erase what is put into the graph meanwhile, where the rewrite is then refused."""
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
    """Put the second node of each pair in the place of the first, and erase of the nodes that were
    matched those that this leaves unused.

    Raises Refused, and changes nothing, where a value is not what was there: another dtype,
    device, sizes, strides that something would notice, or memory that something else shares.
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
    """Raise Refused where nodes would have other results than they have, apart from their elements:
    another dtype, device or sizes, or strides that something would notice."""
    for node, after in results.items():
        for what in ("dtype", "shape", "device"):
            if not same(getattr(after, what), getattr(value(node), what)):
                raise Refused(
                    f"the result would have the {what} {getattr(after, what)}, "
                    f"not {getattr(value(node), what)}"
                )
    moved = {n: y for n, y in results.items() if not same(y.stride(), value(n).stride())}
    if reason := noticed(moved, state):
        node, after = next(iter(moved.items()))
        raise Refused(
            f"the result would have the strides {after.stride()}, not {value(node).stride()},"
            f" {reason}"
        )


def _sharing(root: fx.Node, matched: Collection[fx.Node], state: GraphState) -> fx.Node | None:
    """A node that has the memory of `root` and stays, other than what is made from `root`."""
    for node in state.sharing(root):
        stays = any(user not in matched for user in node.users)
        if stays and not _is_made_from(node, root, state):
            return node
    return None


def _is_made_from(node: fx.Node, root: fx.Node, state: GraphState) -> bool:
    waiting, seen = [node], set()
    while waiting:
        one = waiting.pop()
        if one is root:
            return True
        if one not in seen and state.order[one] > state.order[root]:
            seen.add(one)
            waiting += one.all_input_nodes
    return False


def emit(root: fx.Node, target: Any, args: tuple[Any, ...]) -> fx.Node:
    """A call of `target` before `root`, whose place it is to take.

    What the op's own checks refuse is refused here with their sentence.
    """
    return insert(root, target, args, run(target, args))


def emit_by_rows(root: fx.Node, target: Any, args: tuple[Any, ...]) -> fx.Node:
    """The same for an op whose result is contiguous, also where x and the result are not: the heads
    of a projection, seen as (B, heads, S, D)."""
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


def run(target: Any, args: tuple[Any, ...]) -> Any:
    """What `target` makes of the values of `args`."""
    values = pytree.tree_map(value, args)
    try:
        with fake_mode_of(pytree.tree_leaves(values)):
            return target(*values)
    except (TypeError, ValueError) as error:
        raise Refused(str(error)) from None


def insert(before: fx.Node, target: Any, args: tuple[Any, ...], result: Any) -> fx.Node:
    """A node with a known result, before another and with its origin."""
    graph = before.graph
    with graph.inserting_before(before):
        new = graph.call_function(target, args)
    new.meta.update({key: before.meta[key] for key in _ORIGIN if key in before.meta})
    new.meta["example_value"] = result
    return new


def derive(before: fx.Node, target: Any, *args: Any) -> fx.Node:
    """A node for a view of what another node gives."""
    return insert(before, target, args, run(target, args))


def items(of: fx.Node, count: int) -> list[fx.Node]:
    """The first results of a node that has several, each a node after it."""
    results: list[fx.Node] = []
    after = of
    for i, result in enumerate(of.meta["example_value"][:count]):
        with of.graph.inserting_after(after):
            item = of.graph.call_function(operator.getitem, (of, i))
        item.meta.update({key: of.meta[key] for key in _ORIGIN if key in of.meta})
        item.meta["example_value"] = result
        results.append(item)
        after = item
    return results


def number(argument: Any) -> Any:
    """A number that an op takes as a float: a constant, or a node of one."""
    known = value(argument)
    if isinstance(known, bool) or not isinstance(known, (int, float, torch.SymFloat, torch.SymInt)):
        raise Refused(f"{argument} is not a number that is known while the graph is compiled")
    return float(known) if isinstance(known, int) else argument


def before_widening(argument: Any) -> Any:
    """What is cast to float32 for an op that computes in it anyhow."""
    call = calls(argument, "cast")
    return call.args[0] if call is not None and call.args[1] is torch.float32 else argument


def of_one_shape(a: Any, b: Any) -> None:
    """Raise Refused where two tensors are broadcast against each other."""
    shapes = [tuple(value(one).shape) if is_tensor(one) else one for one in (a, b)]
    if not same(*shapes):
        raise Refused(f"{shapes[0]} and {shapes[1]} are broadcast against each other")


def not_under_autocast(match: Match) -> None:
    """Raise Refused where an op that casts to float32 under autocast would not compute as this."""
    x = value(match["x"])
    if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float32:
        raise Refused("under autocast the op computes in float32, and this in x's dtype")


def put_loss(
    at: fx.Node, target: Any, args: tuple[Any, ...], matched: Collection[fx.Node], state: GraphState
) -> fx.Node:
    """Put a loss of the op's own dtype, float32, in the place of one of the logits' dtype."""
    with state.modes_of(at):
        new = op = emit(at, target, args)
    if value(op).dtype != value(at).dtype:
        new = derive(at, torch.Tensor.to, op, value(at).dtype)
    replace([(at, new)], matched, state)
    return op
