"""What ops a rewritten graph of traced code calls, for `fuse`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from torch import fx

from ...library import COMPOSED, OPS
from .report import Report


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


def reason_for_none(report: Report, rewrites: Collection[str]) -> str:
    """Why rewrites found none of their ops in a graph: the first near miss, if there is one."""
    reasons = [f"{one.op}: {one.reason}" for one in report.findings if not one.used]
    *names, last = rewrites
    none = f"none of {', '.join(names)} and {last}" if names else f"no {last}"
    return reasons[0] if reasons else f"it computes {none}"
