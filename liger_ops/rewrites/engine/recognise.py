"""Whether a whole graph is one op: the rewrites' own patterns, asked about traced code."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from torch import fx

from ...library import OPS
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
    needed: set[fx.Node] = set()
    waiting = [output]
    while waiting:
        node = waiting.pop()
        if node not in needed:
            needed.add(node)
            waiting += node.all_input_nodes
    found = [node for node in needed if getattr(node.target, "namespace", None) == "liger"]
    results = output.args[0] if isinstance(output.args[0], (tuple, list)) else output.args
    if len(found) != 1 or not all(_is_result(one, found[0], through) for one in results):
        reasons = [f"{one.op}: {one.reason}" for one in report.findings if not one.used]
        if found:
            reasons.append(f"it is {found[0].target._opname} and more")  # type: ignore[union-attr]
        raise Refused(reasons[0] if reasons else f"it computes {_none_of(rewrites)}")
    for node in module.graph.nodes:
        if node not in needed and node.op != "placeholder" and not _is_cheap(node):
            raise Refused(f"it does more than compute its result: {node.name}")
    (op,) = found
    name: str = op.target._opname  # type: ignore[union-attr]
    bound = inspect.signature(OPS[name].definition).bind(*op.args, **op.kwargs)
    bound.apply_defaults()
    return Recognised(name, dict(bound.arguments), op)


def _none_of(rewrites: Collection[str]) -> str:
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
