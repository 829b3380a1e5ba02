"""Whether a graph can observe that values have other strides than before."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, fx
from torch.utils import _pytree as pytree

from ...torch_private import HigherOrderOperator, OpOverload, OpOverloadPacket
from .canonical import same, value
from .effects import writes
from .graph_state import GraphState
from .memory import ANYWHERE, memory
from .replay import fake_mode_of, replay

_BY_MEMORY = {"as_strided", "as_strided_scatter", "data_ptr", "storage", "untyped_storage"}
_NAMESPACES = {"aten", "liger", "prims"}


def noticed(results: Mapping[fx.Node, Tensor], state: GraphState) -> str | None:
    """How the graph would observe that nodes have the strides of `results`; None if it would not.

    The nodes that depend on them run again on fake tensors, until their strides are the same as
    before. None of these may be returned, be written to, or fail. A view may become a copy and a
    copy a view, which makes no difference without writes.
    """
    if not results:
        return None
    changed: dict[fx.Node, Any] = dict(results)
    for node in state.order:
        if not any(one in changed for one in node.all_input_nodes):
            continue
        if node.op == "output":
            return "which are returned"
        if _goes_by_memory(node) or writes(node):
            return f"which {node.name} would notice"
        arguments = fx.node.map_arg(
            (node.args, node.kwargs), lambda one: changed.get(one, value(one))
        )
        with state.modes_of(node):
            after = _run(node, *arguments)
        if after is None:
            return f"with which {node.name} would fail"
        before = value(node)
        if not _alike(before, after):
            return f"which would change the sizes of {node.name}"
        is_view = _shares(before, map(value, node.all_input_nodes)) or _shares(after, arguments)
        if is_view or not _same_strides(before, after):
            changed[node] = after
    return "and its memory is written to" if state.ever_written(changed) else None


def _goes_by_memory(node: fx.Node) -> bool:
    """Whether a node's result may depend on the strides of its inputs.

    That of a custom operator may, whatever it declares.
    """
    if isinstance(node.target, (OpOverload, OpOverloadPacket)):
        name = str(node.target)
        return name.partition(".")[0] not in _NAMESPACES or "as_strided" in name
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name in _BY_MEMORY or isinstance(node.target, HigherOrderOperator)


def _run(node: fx.Node, args: Any, kwargs: Any) -> Any:
    try:
        with fake_mode_of(pytree.tree_leaves((args, kwargs))):
            return replay(node, args, kwargs)
    except (RuntimeError, TypeError, ValueError, IndexError):
        return None


def _shares(result: Any, arguments: Iterable[Any]) -> bool:
    """Whether a result may share memory with the arguments."""
    keys = memory([result])
    return ANYWHERE in keys or bool(keys & memory(arguments))


def _alike(before: Any, after: Any) -> bool:
    pairs = list(zip(pytree.tree_leaves(before), pytree.tree_leaves(after), strict=False))
    return len(pytree.tree_leaves(before)) == len(pytree.tree_leaves(after)) and all(
        same(tuple(one.shape), tuple(other.shape)) and one.dtype == other.dtype
        if isinstance(one, Tensor) and isinstance(other, Tensor)
        else same(one, other)
        for one, other in pairs
    )


def _same_strides(before: Any, after: Any) -> bool:
    pairs = zip(pytree.tree_leaves(before), pytree.tree_leaves(after), strict=True)
    return all(
        same(one.stride(), other.stride()) for one, other in pairs if isinstance(one, Tensor)
    )
