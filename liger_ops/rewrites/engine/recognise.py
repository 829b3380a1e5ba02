"""Whether a whole graph is one op: the rewrites' own patterns, asked about traced code."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx

from ...library import COMPOSED, OPS
from .. import rewrite
from ..layers import clamped_swiglu
from .canonical import IDENTITY, canonical
from .pattern import CHEAP
from .rewrite import Refused


@dataclass(frozen=True)
class Recognised:
    """An op that a graph's result is, and its arguments by name, with their defaults.

    An argument is a constant or a node of the rewritten graph: one of its placeholders, or what
    the graph makes of one first.
    """

    op: str
    arguments: dict[str, Any]
    result: fx.Node


def recognise(
    module: fx.GraphModule, rewrites: Collection[str], through: Collection[str] = ()
) -> Recognised:
    """Run `rewrites` on `module`, in place, as the backend would, and say which op it is then.

    The graph is one of Dynamo's kind, whose only result is a tensor, or a tuple of tensors that one
    op returns. `through` names operations, such as views, that may be between the op and a result.

    Raises:
        Refused: its result is no op's, or it does more than compute its result; the text says why.
    """
    report = rewrite(module, rewrites, strict=True)
    if "clamped_swiglu" in rewrites:
        clamped_swiglu.rewrite_unlimited(module.graph, report)
    (output,) = (node for node in module.graph.nodes if node.op == "output")
    needed = needed_by(output)
    found = [node for node in needed if op_of(node)]
    results = output.args[0] if isinstance(output.args[0], (tuple, list)) else output.args
    if len(found) != 1 or not all(_is_result(one, found[0], through) for one in results):
        reasons = [f"{one.op}: {one.reason}" for one in report.findings if not one.used]
        if found:
            reasons.append(f"it is {op_of(found[0])} and more")
        raise Refused(reasons[0] if reasons else f"it computes {none_of(rewrites)}")
    for node in module.graph.nodes:
        if node not in needed and node.op != "placeholder" and not _is_cheap(node):
            raise Refused(f"it does more than compute its result: {node.name}")
    ((op, arguments),) = bound(found)
    return Recognised(str(op_of(op)), arguments, op)


def op_of(node: fx.Node) -> str | None:
    """The op of liger_ops that a node calls."""
    is_op = getattr(node.target, "namespace", None) == "liger"
    return node.target._opname if is_op else None  # type: ignore[union-attr]


def bound(nodes: Iterable[fx.Node]) -> Iterator[tuple[fx.Node, dict[str, Any]]]:
    """The ops among nodes, each with all its arguments by name."""
    for node in list(nodes):
        if name := op_of(node):
            given = inspect.signature(definition_of(name)).bind(*node.args, **node.kwargs)
            given.apply_defaults()
            yield node, dict(given.arguments)


def definition_of(name: str) -> Callable[..., Any]:
    """The definition of an op, composed of others or not."""
    return COMPOSED[name] if name in COMPOSED else OPS[name].definition


def needed_by(output: fx.Node) -> set[fx.Node]:
    needed, waiting = set(), [output]
    while waiting:
        node = waiting.pop()
        if node not in needed:
            needed.add(node)
            waiting += node.all_input_nodes
    return needed


def none_of(rewrites: Collection[str]) -> str:
    *names, last = rewrites
    return f"none of {', '.join(names)} and {last}" if names else f"no {last}"


def _is_cheap(node: fx.Node) -> bool:
    """Whether a node without users is a view or a cast, which have no effect."""
    call = canonical(node)
    return call is not None and call.op in {*CHEAP, IDENTITY}


def passed(node: Any, through: Collection[str]) -> Any:
    """The node that `node` is computed from by operations named in `through` alone."""
    while (call := canonical(node)) is not None and call.op in through:
        node = call.args[0]
    return node


def _is_result(node: Any, op: fx.Node, through: Collection[str]) -> bool:
    node = passed(node, through)
    return node is op or (getattr(node, "target", None) is operator.getitem and node.args[0] is op)
