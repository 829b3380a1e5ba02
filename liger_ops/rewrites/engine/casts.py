"""Casts that change values, and casts by autocast.

A chain of casts changes no value if each dtype in it has every value of the dtype that the chain
starts from.

Autocast casts the inputs of PyTorch's norms to float32, and therefore those of the norm ops too. A
norm that a model writes out, in elementwise operations, runs in the dtypes of its inputs. The op
that replaces such code is marked, and after all rewrites autocast is turned off around each marked
op in the graph.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from ...torch_private import enter_autocast, exit_autocast
from .canonical import IDENTITY, calls, canonical, value
from .graph_state import GraphState


class Limits(NamedTuple):
    """The limits of a dtype's numbers.

    `eps` is the distance from 1 to the next larger number, or 0 for integers; `smallest` is the
    smallest positive number.
    """

    lowest: float
    highest: float
    eps: float
    smallest: float


@functools.lru_cache
def represents(dtype: torch.dtype, source: torch.dtype) -> bool:
    """Return whether `dtype` has every value of `source`, so that a cast to it changes none."""
    if dtype == source:
        return True
    if source.is_complex and not dtype.is_complex:
        return False
    wide, narrow = _limits(dtype), _limits(source)
    if wide is None or narrow is None:
        return False
    if not (wide.lowest <= narrow.lowest and narrow.highest <= wide.highest):
        return False
    if not wide.eps:
        return not narrow.eps
    if not narrow.eps:
        # A floating-point dtype has all integers up to this one.
        return max(-narrow.lowest, narrow.highest) <= 2 / wide.eps
    # Of two dtypes with as many bits, each has values, such as infinity, that the other lacks.
    has_more = dtype.to_real().itemsize > source.to_real().itemsize
    same_reals = dtype.to_real() == source.to_real()
    return same_reals or (has_more and wide.eps <= narrow.eps and wide.smallest <= narrow.smallest)


def _limits(dtype: torch.dtype) -> Limits | None:
    """Return the limits of a dtype, of a complex one those of its parts; None if it has none."""
    if dtype is torch.bool:
        return Limits(0, 1, 0, 1)
    try:
        if dtype.is_floating_point or dtype.is_complex:
            info = torch.finfo(dtype)
            return Limits(info.min, info.max, info.eps, info.smallest_normal * info.eps)
        return Limits(torch.iinfo(dtype).min, torch.iinfo(dtype).max, 0, 1)
    except (TypeError, NotImplementedError):
        # PyTorch knows no limits for a dtype of bits, or with two numbers in a byte.
        return None


@functools.lru_cache
def has_arithmetic(dtype: torch.dtype | None) -> bool:
    """Return whether PyTorch computes in a floating-point dtype; it only stores those of 8 bits."""
    try:
        return bool(dtype and dtype.is_floating_point and torch.promote_types(dtype, torch.float32))
    except RuntimeError:
        return False


def dtype_of(node: Any) -> torch.dtype | None:
    """Return the dtype of a node's value, or None if that is no tensor."""
    known = value(node)
    return known.dtype if isinstance(known, Tensor) else None


def sources(node: Any, any_casts: bool = False) -> Iterator[tuple[Any, tuple[fx.Node, ...]]]:
    """Yield `node`, then the tensors of the same values that it is a copy or a cast of.

    The nearest comes first, each with the nodes that are passed on the way to it. A node that
    returns its argument is passed, and not yielded. With `any_casts`, tensors whose values a cast
    changed are yielded too.
    """
    passed: tuple[fx.Node, ...] = ()
    dtypes: set[torch.dtype] = set()
    while True:
        call = canonical(node) if isinstance(node, fx.Node) else None
        source = dtype_of(node)
        is_same = not dtypes or (source and all(represents(dtype, source) for dtype in dtypes))
        if (any_casts or is_same) and (call is None or call.op != IDENTITY):
            yield node, passed
        if call is None or call.op not in ("cast", "contiguous", IDENTITY):
            return
        if call.op == "cast":
            dtypes.add(call.args[1])
        passed, node = (*passed, node), call.args[0]


def through_casts(node: Any) -> tuple[Any, tuple[fx.Node, ...]]:
    """Return the farthest of the `sources` of `node`, with the nodes that are passed."""
    *_, farthest = sources(node)
    return farthest


def rounding(node: Any) -> torch.dtype | None:
    """Return the dtype of the last cast that changes values, if only exact ones follow; or None."""
    call = calls(through_casts(node)[0], "cast")
    return None if call is None else call.args[1]


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
