"""Run an op in the dtypes of its inputs where autocast would cast them.

Autocast casts the inputs of PyTorch's norms to float32, and therefore those of the norm ops too. A
norm that a model writes out, in elementwise operations, runs in the dtypes of its inputs. The op
that replaces such code is marked, and after all rewrites autocast is turned off around each marked
op in the graph.
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

    Yields whether an autocast was turned off, in which case the op has to be marked.
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
    """Mark the op that `node` calls, or the one whose result it is a view of."""
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
            # The arguments are the device, dtype, enabled and cache_enabled.
            mode = graph.call_function(enter_autocast, (device, None, False, True))
        with graph.inserting_after(node):
            graph.call_function(exit_autocast, (mode,))


def _device_of(node: fx.Node) -> str:
    known = value(node)
    return str((known[0] if isinstance(known, (tuple, list)) else known).device.type)
