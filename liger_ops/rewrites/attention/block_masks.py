"""Emit block masks into a graph, one for all layers that share a mask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ..engine.canonical import value
from ..engine.insertion import Emitter, Refused
from ..engine.maps.algebra import Condition, Size, always_true, axes_of, disjunction
from .mask.blocks import AXES, BATCH, HEADS, Visible, block_lists, unseen_queries
from .mask.predicate import inlined, predicate, read_tensors
from .mask.scopes import Scope
from .mask.unseen import is_unseen

# The sizes of scores by axis, each a number or a node.
ScoreSizes = Mapping[int, Any]


@dataclass(frozen=True)
class BlockMaskNodes:
    """The nodes of one graph that are a block mask.

    Attributes:
        lists: the tensors of a `BlockMask`, by name.
        predicate: the mask's condition as a graph of (b, h, i, j) and `data`.
        data: the tensors that the predicate reads.
        unseen: with `shows_unseen`, a boolean node (B or 1, H or 1, S or 1): the queries that see
            no key by the condition itself.
    """

    lists: Mapping[str, fx.Node]
    predicate: fx.GraphModule
    data: tuple[fx.Node, ...]
    unseen: fx.Node | None = None

    def in_scope(self, scope: Scope) -> BlockMaskNodes:
        """Return the block mask in the graph of `scope`, which is called with its nodes."""
        lists = {name: scope.inward(node) for name, node in self.lists.items()}
        unseen = None if self.unseen is None else scope.inward(self.unseen)
        data = tuple(map(scope.inward, self.data))
        return BlockMaskNodes(lists, self.predicate, data, unseen)


@dataclass
class BlockMasks:
    """Cache of emitted block masks: (mask, code of the predicate, shows_unseen) -> nodes.

    A block mask is computed after its mask, in the graph that computes the mask.
    """

    _emitted: dict[tuple[fx.Node, str, bool], BlockMaskNodes] = field(default_factory=dict)

    def get_or_emit(
        self, condition: Condition, mask: fx.Node, scope: Scope, shape: tuple[Size, ...],
        shows_unseen: bool = False,
    ) -> BlockMaskNodes:  # fmt: skip
        """Return the block mask of a condition on `mask`, a node of `scope`, emitted once.

        `shape` is the shape of the scores. With `shows_unseen`, a query that sees no key by the
        condition sees all of them.

        Raises:
            Refused: the mask is an input of the outermost graph, or a size of the scores is not
                known where the mask is computed.
        """
        home, origin = scope.home(mask)
        if origin.op == "placeholder":
            raise Refused(f"its mask {origin.name} is an input of the graph, a dense tensor")
        key = origin, predicate(condition).code, shows_unseen
        # A rewrite that is refused erases the nodes that it inserted, also those cached here.
        if key not in self._emitted or any(
            node._erased for node in self._emitted[key].lists.values()
        ):
            emit = Emitter(origin.next, value(origin))
            sizes = {
                axis: size if isinstance(size, int) else _size_node(emit, origin, axis, size)
                for axis, size in enumerate(shape, start=-4)
            }
            device = value(origin).device
            self._emitted[key] = emit_block_mask(emit, condition, sizes, home, device, shows_unseen)
        return self._emitted[key].in_scope(scope)


def emit_block_mask(
    emit: Emitter, condition: Condition, sizes: ScoreSizes, scope: Scope, device: torch.device,
    shows_unseen: bool = False,
) -> BlockMaskNodes:  # fmt: skip
    """Emit the block mask of a condition on nodes of `scope` or of scopes around it."""
    unseen = None
    if shows_unseen:
        used = {axis: sizes[axis] if axis in axes_of(condition) else 1 for axis in AXES}
        unseen = unseen_queries(emit, _inlined(emit, condition, scope), used, device)
        condition = disjunction(condition, is_unseen(unseen))
    # Rows of a batch, or heads, between which the mask does not differ share one list of blocks.
    shared = {axis: 1 for axis in (BATCH, HEADS) if axis not in axes_of(condition)}
    lists = block_lists(emit, _inlined(emit, condition, scope), {**sizes, **shared}, device)
    return BlockMaskNodes(lists, predicate(condition), _data(condition, scope), unseen)


def _inlined(emit: Emitter, condition: Condition, scope: Scope) -> Visible:
    """Return the condition as a function of nodes of the indices, which emits it in the graph."""
    module, data = predicate(condition), _data(condition, scope)
    return lambda *indices: inlined(emit, module.graph, *indices, *data)


def _data(condition: Condition, scope: Scope) -> tuple[fx.Node, ...]:
    return tuple(map(scope.inward, read_tensors(condition)))


def _size_node(emit: Emitter, mask: fx.Node, axis: int, size: Any) -> Any:
    """Return a node for a symbolic size of the scores, in the graph that computes the mask."""
    shape = value(mask).shape
    if -axis <= len(shape) and always_true(shape[axis] == size):
        return emit.size(mask, axis)
    for node in mask.graph.nodes:
        if isinstance(value(node), torch.SymInt) and always_true(value(node) == size):
            return node
        if node is mask:
            break
    raise Refused(f"the size {size} of its scores is not known where its mask is computed")
