"""Facts about a graph's nodes: their order, the writes among them, the modes they run in, and
whether the graph would observe that values have other strides than before.
"""

from __future__ import annotations

import contextlib
import copy
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from ...torch_private import HigherOrderOperator
from .canonical import OpOverload, OpOverloadPacket, same, value
from .effects import ANYWHERE, memory, writes, written
from .insertion import fake_mode_of, replay

Key = TypeVar("Key", bound=Hashable)

# Ends of the names of the functions with which Dynamo enters a transform of torch.func, and a level
# of forward-mode differentiation.
_TRANSFORM = "_increment_nesting"
_DUAL = "_enter_dual_level"
# Functions that change a setting for all nodes after them.
_SETTINGS = ("_set_fwd_grad_enabled", "_saved_tensors_hooks_disable", "_saved_tensors_hooks_enable")


def copy_of(graph: fx.Graph) -> fx.Graph:
    """Copy a graph, with what Dynamo notes about its inputs beside their `meta`: where they come
    from. AOTAutograd does not compile Dynamo's graph without it, and PyTorch does not copy it."""
    copied = copy.deepcopy(graph)
    inputs = (one.find_nodes(op="placeholder") for one in (graph, copied))
    for node, other in zip(*inputs, strict=True):
        vars(other).update({name: x for name, x in vars(node).items() if not hasattr(other, name)})
    return copied


class _Order(dict[fx.Node, int]):
    """The position of each node. A lookup of a newly inserted node reads the graph again."""

    def __init__(self, read: Callable[[], None]) -> None:
        self._read = read

    def __missing__(self, node: fx.Node) -> int:
        self._read()
        return self.get(node, -1)


class GraphState:
    """The order, writes and modes of a graph's nodes, valid also after nodes are inserted.

    Attributes:
        order: the position of each node in the graph.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.order = _Order(lambda: self._read(graph))
        # Cached per node, because a node's value does not change.
        self._memory: dict[fx.Node, set[int]] = {}
        self._read(graph)

    def _read(self, graph: fx.Graph) -> None:
        self.order.clear()
        self._modes: dict[fx.Node, tuple[Any, ...]] = {}
        # Nodes that write, with their positions and the keys of the memory that they write to.
        self._writes: list[tuple[int, fx.Node, set[int]]] = []
        self._sharing: dict[int, list[fx.Node]] = defaultdict(list)
        module = graph.owning_module
        # A subgraph does not show the gradient mode of its caller.
        is_subgraph = module is not None and module.meta.get("is_subgraph", False)
        grad: Any = "the caller's" if is_subgraph else torch.is_grad_enabled()
        settings: dict[str, Any] = {}
        entered: list[fx.Node] = []
        for position, node in enumerate(graph.nodes):
            self.order[node] = position
            self._modes[node] = (grad, *settings.items(), *entered)
            if keys := written(node):
                self._writes.append((position, node, keys))
            for key in self._memory_of(node):
                self._sharing[key].append(node)
            if node.op != "call_function":
                continue
            name = getattr(node.target, "__name__", "")
            if name == "_set_grad_enabled":
                grad = node.args[0]
            elif name in _SETTINGS:
                settings[name] = node.args
            elif name.endswith("_decrement_nesting"):
                _leave(entered, _TRANSFORM)
            elif name == "_exit_dual_level":
                _leave(entered, _DUAL)
            elif name.startswith("_enter_") or name.endswith(_TRANSFORM):
                entered.append(node)
            elif name.startswith("_exit_"):
                # The node that entered the context is an argument.
                entered = [other for other in entered if other not in node.args]

    def _memory_of(self, node: fx.Node) -> set[int]:
        if node not in self._memory:
            self._memory[node] = memory([node])
        return self._memory[node]

    def sharing(self, node: fx.Node) -> list[fx.Node]:
        """Return the other nodes whose values are known to share memory with that of `node`."""
        keys = self._memory_of(node) - {ANYWHERE}
        return [other for key in keys for other in self._sharing[key] if other is not node]

    def one_mode(self, nodes: Iterable[fx.Node]) -> bool:
        """Return whether all nodes run in the same gradient mode, autocast and transforms."""
        return len({self.modes(node) for node in nodes}) <= 1

    def transformed(self, node: fx.Node) -> bool:
        """Return whether `node` runs inside of vmap, grad or another torch.func transform."""
        return any(
            isinstance(mode, fx.Node) and _name(mode).endswith((_TRANSFORM, _DUAL))
            for mode in self.modes(node)
        )

    def modes(self, node: fx.Node) -> tuple[Any, ...]:
        """Return the modes that `node` runs in: the gradient mode, settings, entered contexts.

        A context, such as autocast, is the node that enters it.
        """
        assert self.order[node] >= 0
        return self._modes[node]

    def written(
        self, tensors: Iterable[fx.Node], first: fx.Node, last: fx.Node,
        apart_from: Collection[fx.Node] = (),
    ) -> bool:  # fmt: skip
        """Return whether one of `tensors`, or a view of it, is written between two nodes.

        A write by `first` or by `last` counts, one by a node of `apart_from` does not.
        """
        return any(node not in apart_from for node in self.writers(tensors, first, last))

    def ever_written(self, tensors: Iterable[fx.Node]) -> bool:
        """Return whether one of `tensors`, or a view of it, is written anywhere in the graph."""
        return any(self._writers(memory(tensors), 0, len(self.order)))

    def writers(
        self, tensors: Iterable[fx.Node], first: fx.Node, last: fx.Node
    ) -> Iterator[fx.Node]:
        """Yield the nodes from `first` to `last` that write to `tensors` or to a view of these."""
        return self._writers(memory(tensors), self.order[first], self.order[last])

    def _writers(self, keys: set[int], first: int, last: int) -> Iterator[fx.Node]:
        for position, node, targets in self._writes:
            if first <= position <= last and (
                keys & targets or ANYWHERE in keys or ANYWHERE in targets
            ):
                yield node

    @contextlib.contextmanager
    def modes_of(self, node: fx.Node) -> Iterator[None]:
        """Enter the autocast modes of `node`."""
        with contextlib.ExitStack() as stack:
            for mode in self.modes(node)[1:]:
                if isinstance(mode, fx.Node) and _name(mode) == "_enter_autocast":
                    device, dtype, enabled, cache = (value(x) for x in mode.args)
                    stack.enter_context(
                        torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cache)
                    )
            yield


def reached(starts: Iterable[Key], further: Callable[[Key], Iterable[Key]]) -> Iterator[Key]:
    """Yield `starts`, the values that `further` returns for these, and so on, each once."""
    waiting, seen = list(starts), set()
    while waiting:
        key = waiting.pop()
        if key not in seen:
            seen.add(key)
            yield key
            waiting += further(key)


def needed_by(*nodes: fx.Node, end: Callable[[fx.Node], bool] = lambda node: False) -> set[fx.Node]:
    """Return nodes and all that they are computed from, back to nodes for which `end` is true."""
    return set(reached(nodes, lambda node: () if end(node) else node.all_input_nodes))


def erase_unused(node: fx.Node, among: Collection[fx.Node]) -> None:
    """Erase `node` if it is unused, then its inputs that become unused, and so on.

    Only nodes in `among` are erased: nodes that a rewrite matched, which have no side effects. The
    dead code elimination of fx is not used, because in subgraphs it also removes methods that write
    in place.
    """
    waiting = [node]
    while waiting:
        unused = waiting.pop()
        if unused.users or unused not in among or unused._erased or unused.op == "placeholder":
            continue
        waiting += unused.all_input_nodes
        unused.graph.erase_node(unused)


def _leave(entered: list[fx.Node], name: str) -> None:
    """Remove the last node of `entered` whose name ends with `name`."""
    for i in reversed(range(len(entered))):
        if _name(entered[i]).endswith(name):
            del entered[i]
            return


def _name(node: fx.Node) -> str:
    return getattr(node.target, "__name__", "")


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
