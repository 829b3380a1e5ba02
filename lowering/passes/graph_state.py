"""What surrounds the nodes of a graph: their order, writes among them, the modes they run in."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from .canonical import value

_OPERATORS = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"),
    *("and", "or", "xor", "lshift", "rshift"),
)
_IN_PLACE = {operator.setitem, *(getattr(operator, f"i{name}") for name in _OPERATORS)}
# Where functions of torch.nn.functional have `inplace` among their arguments.
_INPLACE_POSITION = {"dropout": 3, "silu": 1, "relu": 1, "leaky_relu": 2, "hardtanh": 3, "elu": 2}


class _Order(dict[fx.Node, int]):
    """Where nodes stand; of one that came into the graph since, read again."""

    def __init__(self, read: Callable[[], None]) -> None:
        self._read = read

    def __missing__(self, node: fx.Node) -> int:
        self._read()
        return self.get(node, -1)


class GraphState:
    """A reading of a graph, that stays good while nodes are put into it."""

    def __init__(self, graph: fx.Graph) -> None:
        self.order = _Order(lambda: self._read(graph))
        self._read(graph)

    def _read(self, graph: fx.Graph) -> None:
        self.order.clear()
        self._modes: dict[fx.Node, tuple[Any, ...]] = {}
        # The storages that are written to, and where.
        self._writes: list[tuple[int, set[int]]] = []
        module = graph.owning_module
        # What a subgraph is called under is not known here.
        is_part = module is not None and module.meta.get("is_subgraph", False)
        grad: Any = "the caller's" if is_part else torch.is_grad_enabled()
        entered: list[fx.Node] = []
        for position, node in enumerate(graph.nodes):
            self.order[node] = position
            self._modes[node] = (grad, *entered)
            if written := _written(node):
                self._writes.append((position, written))
            if node.op != "call_function":
                continue
            name = getattr(node.target, "__name__", "")
            if name == "_set_grad_enabled":
                grad = node.args[0]
            elif name.startswith("_enter_") or name == "_vmap_increment_nesting":
                entered.append(node)
            elif name.startswith("_exit_"):
                entered = [other for other in entered if other not in node.args]
            elif name == "_vmap_decrement_nesting" and entered:
                entered.pop()

    def one_mode(self, nodes: Iterable[fx.Node]) -> bool:
        """Whether all run in the same gradient mode, autocast and function transform."""
        return len({self._modes_of(node) for node in nodes}) <= 1

    def _modes_of(self, node: fx.Node) -> tuple[Any, ...]:
        assert self.order[node] >= 0
        return self._modes[node]

    def written(self, tensors: Iterable[fx.Node], first: fx.Node, last: fx.Node) -> bool:
        """Whether one of `tensors`, or a view of it, is written between two nodes."""
        between = range(self.order[first], self.order[last] + 1)
        storages = {key for node in tensors for key in _storages(node)}
        return any(position in between and keys & storages for position, keys in self._writes)

    @contextlib.contextmanager
    def modes_of(self, node: fx.Node) -> Iterator[None]:
        """The autocast that `node` runs under, on top of the ambient one."""
        with contextlib.ExitStack() as stack:
            for entered in self._modes_of(node)[1:]:
                if getattr(entered.target, "__name__", "") == "_enter_autocast":
                    device, dtype, enabled, cache = entered.args
                    stack.enter_context(
                        torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cache)
                    )
            yield


def eliminate_dead_code(graph: fx.Graph) -> None:
    """Drop what nothing uses. fx's own takes every method for pure, `copy_` among them."""
    graph.eliminate_dead_code(is_impure_node=lambda node: node.is_impure() or writes(node))


def fake_mode_of(values: Iterable[Any]) -> contextlib.AbstractContextManager[Any]:
    """The mode of the fake tensors among `values`: it is not the one that is active while a backend
    runs."""
    for one in values:
        if isinstance(one, FakeTensor):
            return one.fake_mode
    return contextlib.nullcontext()


def writes(node: fx.Node) -> bool:
    """Whether `node` writes to one of its arguments."""
    return bool(_targets(node))


def _written(node: fx.Node) -> set[int]:
    """The storages that `node` writes to."""
    return {key for target in pytree.tree_leaves(_targets(node)) for key in _storages(target)}


def _targets(node: fx.Node) -> list[Any]:
    """The arguments that `node` writes to."""
    if node.op not in ("call_function", "call_method"):
        return []
    if isinstance(node.target, torch._ops.OpOverload):
        written = [
            (i, argument.name)
            for i, argument in enumerate(node.target._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        given = [node.args[i] for i, _ in written if i < len(node.args)]
        return given + [node.kwargs[name] for _, name in written if name in node.kwargs]
    targets = [] if node.kwargs.get("out") is None else [node.kwargs["out"]]
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    in_place = node.target in _IN_PLACE or (
        # `operator.and_` has its underscore for another reason.
        name.endswith("_") and not name.endswith("__") and not hasattr(operator, name)
    )
    position = _INPLACE_POSITION.get(name, len(node.args))
    if in_place or node.kwargs.get("inplace") or any(node.args[position : position + 1]):
        targets += node.args[:1]
    return targets


def _storages(node: Any) -> set[int]:
    known = value(node)
    values = known if isinstance(known, (tuple, list)) else (known,)
    return {
        one.untyped_storage()._cdata
        for one in values
        if isinstance(one, Tensor) and one.layout is torch.strided
    }
