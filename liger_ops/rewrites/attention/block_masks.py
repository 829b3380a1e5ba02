"""The block masks that a rewrite puts into a graph, one for all layers that share a mask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ..engine.canonical import value
from ..engine.emitter import Emitter
from ..engine.rewrite import Refused
from .mask.algebra import Condition, Size, always_true, axes_of, disjunction
from .mask.blocks import AXES, BATCH, HEADS, Visible, block_lists, unseen_queries
from .mask.predicate import inlined, predicate, read_tensors
from .mask.scopes import Scope
from .mask.unseen import is_unseen

# The sizes of scores by axis, each a number or a node.
Sizes = Mapping[int, Any]


@dataclass(frozen=True)
class BlockMaskNodes:
    """Nodes of one graph: a block mask, and the data that its predicate reads after its indices.

    Attributes:
        lists: the parts of a `BlockMask`, by name.
        unseen: with `shows_unseen`, a boolean node (B or 1, H or 1, S or 1): the queries that see
            no key by the condition itself.
    """

    lists: Mapping[str, fx.Node]
    predicate: fx.GraphModule
    data: tuple[fx.Node, ...]
    unseen: fx.Node | None = None

    def moved(self, scope: Scope) -> BlockMaskNodes:
        """The same block mask in a graph that is called with its nodes."""
        lists = {name: scope.inward(node) for name, node in self.lists.items()}
        unseen = None if self.unseen is None else scope.inward(self.unseen)
        data = tuple(map(scope.inward, self.data))
        return BlockMaskNodes(lists, self.predicate, data, unseen)


@dataclass
class BlockMasks:
    """The block masks that were emitted, by the mask and the code of the predicate.

    They are computed after the mask, in the graph that computes it.
    """

    _made: dict[tuple[fx.Node, str, bool], BlockMaskNodes] = field(default_factory=dict)

    def of(
        self, condition: Condition, mask: fx.Node, scope: Scope, shape: tuple[Size, ...],
        shows_unseen: bool = False,
    ) -> BlockMaskNodes:  # fmt: skip
        """The block mask of a condition on `mask`, a node of `scope`, for scores of `shape`.

        With `shows_unseen`, a query that sees no key by the condition sees all of them.

        Raises:
            Refused: it cannot be computed after the mask.
        """
        home, origin = scope.home(mask)
        if origin.op == "placeholder":
            raise Refused(f"its mask {origin.name} is an input of the graph, a dense tensor")
        key = origin, predicate(condition).code, shows_unseen
        # A rewrite that is refused erases what it inserted.
        if key not in self._made or any(one._erased for one in self._made[key].lists.values()):
            emit = Emitter(origin.next, value(origin))
            sizes = {
                axis: size if isinstance(size, int) else _symbolic(emit, origin, axis, size)
                for axis, size in enumerate(shape, start=-4)
            }
            device = value(origin).device
            self._made[key] = emitted(emit, condition, sizes, home, device, shows_unseen)
        return self._made[key].moved(scope)


def emitted(
    emit: Emitter, condition: Condition, sizes: Sizes, scope: Scope, device: torch.device,
    shows_unseen: bool = False,
) -> BlockMaskNodes:  # fmt: skip
    """Emit the block mask of a condition on nodes of `scope` or around it."""
    unseen = None
    if shows_unseen:
        used = {axis: sizes[axis] if axis in axes_of(condition) else 1 for axis in AXES}
        unseen = unseen_queries(emit, _inlined(emit, condition, scope), used, device)
        condition = disjunction(condition, is_unseen(unseen))
    shared = {axis: 1 for axis in (BATCH, HEADS) if axis not in axes_of(condition)}
    lists = block_lists(emit, _inlined(emit, condition, scope), {**sizes, **shared}, device)
    return BlockMaskNodes(lists, predicate(condition), _data(condition, scope), unseen)


def _inlined(emit: Emitter, condition: Condition, scope: Scope) -> Visible:
    module, data = predicate(condition), _data(condition, scope)
    return lambda *indices: inlined(emit, module.graph, *indices, *data)


def _data(condition: Condition, scope: Scope) -> tuple[fx.Node, ...]:
    return tuple(map(scope.inward, read_tensors(condition)))


def _symbolic(emit: Emitter, mask: fx.Node, axis: int, size: Any) -> Any:
    """A node for a symbolic size of the scores, in the graph that computes the mask."""
    shape = value(mask).shape
    if -axis <= len(shape) and always_true(shape[axis] == size):
        return emit.size(mask, axis)
    for node in mask.graph.nodes:
        if isinstance(value(node), torch.SymInt) and always_true(value(node) == size):
            return node
        if node is mask:
            break
    raise Refused(f"the size {size} of its scores is not known where its mask is computed")
