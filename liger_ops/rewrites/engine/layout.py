"""Find out whether a graph would observe that values have other strides than before."""

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

# Functions and methods whose results depend on the strides of their inputs.
_STRIDE_DEPENDENT = {"as_strided", "as_strided_scatter", "data_ptr", "storage", "untyped_storage"}
# Namespaces of the operators whose results are known not to depend on strides, as_strided aside.
_NAMESPACES = {"aten", "liger", "prims"}


def noticed(results: Mapping[fx.Node, Tensor], state: GraphState) -> str | None:
    """Return how the graph would observe that nodes have the strides of `results`, or None.

    The nodes that depend on them run again on fake tensors, as far as their strides differ from
    before. None of these nodes may be returned, be written to, or fail. A view may become a copy
    and a copy a view, which makes no difference without writes.
    """
    if not results:
        return None
    changed: dict[fx.Node, Any] = dict(results)
    for node in state.order:
        if not any(x in changed for x in node.all_input_nodes):
            continue
        if node.op == "output":
            return "which are returned"
        if _depends_on_strides(node) or writes(node):
            return f"which {node.name} would notice"
        arguments = fx.node.map_arg((node.args, node.kwargs), lambda x: changed.get(x, value(x)))
        with state.modes_of(node):
            after = _rerun(node, *arguments)
        if after is None:
            return f"with which {node.name} would fail"
        before = value(node)
        if not _same_but_strides(before, after):
            return f"which would change the sizes of {node.name}"
        is_view = _shares(before, map(value, node.all_input_nodes)) or _shares(after, arguments)
        # A view counts as changed even with the same strides as before: where it becomes a copy, or
        # a copy a view, that would show once it is written to or returned.
        if is_view or not _same_strides(before, after):
            changed[node] = after
    return "and its memory is written to" if state.ever_written(changed) else None


def _depends_on_strides(node: fx.Node) -> bool:
    """Return whether a node's values may depend on the strides of its inputs.

    Those of a custom operator may, whatever it declares.
    """
    if isinstance(node.target, (OpOverload, OpOverloadPacket)):
        name = str(node.target)
        return name.partition(".")[0] not in _NAMESPACES or "as_strided" in name
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name in _STRIDE_DEPENDENT or isinstance(node.target, HigherOrderOperator)


def _rerun(node: fx.Node, args: Any, kwargs: Any) -> Any:
    try:
        with fake_mode_of(pytree.tree_leaves((args, kwargs))):
            return replay(node, args, kwargs)
    except (RuntimeError, TypeError, ValueError, IndexError):
        return None


def _shares(result: Any, arguments: Iterable[Any]) -> bool:
    """Return whether a result may share memory with the arguments."""
    keys = memory([result])
    return ANYWHERE in keys or bool(keys & memory(arguments))


def _same_but_strides(before: Any, after: Any) -> bool:
    """Return whether two results agree in all but strides: sizes, dtypes and numbers."""
    pairs = list(zip(pytree.tree_leaves(before), pytree.tree_leaves(after), strict=False))
    return len(pytree.tree_leaves(before)) == len(pytree.tree_leaves(after)) and all(
        same(tuple(x.shape), tuple(y.shape)) and x.dtype == y.dtype
        if isinstance(x, Tensor) and isinstance(y, Tensor)
        else same(x, y)
        for x, y in pairs
    )


def _same_strides(before: Any, after: Any) -> bool:
    pairs = zip(pytree.tree_leaves(before), pytree.tree_leaves(after), strict=True)
    return all(same(x.stride(), y.stride()) for x, y in pairs if isinstance(x, Tensor))
