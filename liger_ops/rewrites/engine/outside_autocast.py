"""Ops in the dtypes of their inputs, under autocast too.

Autocast casts the inputs of norms to float32, and so those of the ops. Code that is written out
runs in the dtypes of its inputs, also under autocast. An op that replaces it is marked, and after
all rewrites each marked op gets a region of its own in the graph, in which autocast is off.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import fx

from ...torch_private import enter_autocast, exit_autocast
from .canonical import value
from .graph_state import GraphState

_MARK = "outside_autocast"


@contextlib.contextmanager
def modes_of(node: fx.Node, state: GraphState, outside: bool = False) -> Iterator[bool]:
    """Enter the autocast modes of `node`, without autocast if `outside` or if `node` is marked.

    Yields whether that turned an autocast off, so that the op has to be marked.
    """
    device = _device_of(node)
    with state.modes_of(node), contextlib.ExitStack() as stack:
        is_off = (outside or is_marked(node)) and torch.is_autocast_enabled(device)
        if is_off:
            stack.enter_context(torch.autocast(device, enabled=False))
        yield is_off


def is_marked(node: fx.Node) -> bool:
    return _MARK in node.meta


def mark(node: fx.Node) -> None:
    """Mark an op, or the op of which `node` is a view."""
    while getattr(node.target, "namespace", None) != "liger":
        (node,) = node.all_input_nodes
    node.meta[_MARK] = True


def enter(graph: fx.Graph) -> None:
    """Turn autocast off around each marked op."""
    for node in list(graph.nodes):
        if not node.meta.pop(_MARK, False):
            continue
        device = _device_of(node)
        with graph.inserting_before(node):
            mode = graph.call_function(enter_autocast, (device, None, False, True))
        with graph.inserting_after(node):
            graph.call_function(exit_autocast, (mode,))


def _device_of(node: fx.Node) -> str:
    known = value(node)
    return str((known[0] if isinstance(known, (tuple, list)) else known).device.type)
