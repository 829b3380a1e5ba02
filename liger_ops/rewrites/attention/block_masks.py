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
from .mask.algebra import Condition, Size, either, known
from .mask.blocks import Blocks, Bounds
from .mask.predicate import predicate, read_tensors
from .mask.scopes import Scope
from .mask.unseen import is_unseen, unseen_queries

# The sizes of scores by axis, each a number or a node.
Sizes = Mapping[int, Any]


@dataclass(frozen=True)
class BlockMaskNodes:
    """Nodes of one graph: the blocks, and the data that the predicate reads after its indices.

    Attributes:
        unseen: with `shows_unseen`, a boolean node (B or 1, H or 1, S or 1): the queries that see
            no key by the condition itself.
    """

    blocks: Blocks
    predicate: fx.GraphModule
    data: tuple[fx.Node, ...]
    unseen: fx.Node | None = None


@dataclass(frozen=True)
class _Made:
    condition: Condition
    blocks: Blocks
    unseen: fx.Node | None


@dataclass
class BlockMasks:
    """The blocks that were emitted, by the mask that they stand for and the code of its predicate.

    They are computed after the mask, in the graph that computes it.
    """

    _made: dict[tuple[fx.Node, str, bool], _Made] = field(default_factory=dict)

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
        if key not in self._made or self._made[key].blocks.rows[0]._erased:
            self._made[key] = _emitted(condition, origin, home, shape, shows_unseen)
        made = self._made[key]
        return _nodes(made.condition, made.blocks.moved(scope.inward), scope, made.unseen)


def before(node: fx.Node, condition: Condition, scope: Scope, sizes: Sizes) -> BlockMaskNodes:
    """The block mask of a condition that is no single mask, for the attention `node` alone."""
    tensors = {tensor: scope.inward(tensor) for tensor in read_tensors(condition)}
    emit = Emitter(node, value(node))
    blocks = Bounds(emit, sizes, tensors, value(node).device).blocks(condition)
    return _nodes(condition, blocks, scope)


def _nodes(
    condition: Condition, blocks: Blocks, scope: Scope, unseen: fx.Node | None = None
) -> BlockMaskNodes:
    data = tuple(scope.inward(tensor) for tensor in read_tensors(condition))
    unseen = None if unseen is None else scope.inward(unseen)
    return BlockMaskNodes(blocks, predicate(condition), data, unseen)


def _emitted(
    condition: Condition, mask: fx.Node, home: Scope, shape: tuple[Size, ...], shows_unseen: bool
) -> _Made:
    """Emit the block mask after `mask`, in the graph that computes it."""
    emit, device = Emitter(mask.next, value(mask)), value(mask).device
    sizes = {
        axis: size if isinstance(size, int) else _symbolic(emit, mask, axis, size)
        for axis, size in enumerate(shape, start=-4)
    }
    tensors = {tensor: home.inward(tensor) for tensor in read_tensors(condition)}
    unseen = None
    if shows_unseen:
        unseen = unseen_queries(emit, condition, sizes, tensors, device)
        tensors[unseen] = unseen
        condition = either(condition, is_unseen(unseen))
    return _Made(condition, Bounds(emit, sizes, tensors, device).blocks(condition), unseen)


def _symbolic(emit: Emitter, mask: fx.Node, axis: int, size: Any) -> Any:
    """A node for a symbolic size of the scores, in the graph that computes the mask."""
    shape = value(mask).shape
    if -axis <= len(shape) and known(shape[axis] == size):
        return emit.size(mask, axis)
    for node in mask.graph.nodes:
        if isinstance(value(node), torch.SymInt) and known(value(node) == size):
            return node
        if node is mask:
            break
    raise Refused(f"the size {size} of its scores is not known where its mask is computed")
