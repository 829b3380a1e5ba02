"""Read the ops that a graph calls."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from torch import fx

from ...library import COMPOSED, OPS
from .report import Report


def op_of(node: fx.Node) -> str | None:
    """Return the name of the op of liger_ops that a node calls, or None."""
    is_op = getattr(node.target, "namespace", None) == "liger"
    return node.target._opname if is_op else None  # type: ignore[union-attr]


def bound(nodes: Iterable[fx.Node]) -> Iterator[tuple[fx.Node, dict[str, Any]]]:
    """Yield the nodes that call ops, each with all its arguments by name."""
    for node in list(nodes):
        if name := op_of(node):
            call = inspect.signature(definition_of(name)).bind(*node.args, **node.kwargs)
            call.apply_defaults()
            yield node, dict(call.arguments)


def definition_of(name: str) -> Callable[..., Any]:
    """Return the definition of an op, which may be composed of other ops."""
    return COMPOSED[name] if name in COMPOSED else OPS[name].definition


def reason_for_none(report: Report, rewrites: Collection[str]) -> str:
    """Return why rewrites found no op in a graph: the first near miss, if there is one."""
    reasons = [f"{finding.op}: {finding.reason}" for finding in report.findings if not finding.used]
    *names, last = rewrites
    none = f"none of {', '.join(names)} and {last}" if names else f"no {last}"
    return reasons[0] if reasons else f"it computes {none}"
