"""The block masks that a rewrite puts into a graph, one for all layers that share a mask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from .canonical import value
from .emitter import Emitter
from .mask.algebra import Condition, Size, known
from .mask.blocks import Blocks, Bounds
from .mask.predicate import predicate, read_tensors
from .mask.scopes import Scope
from .rewrite import Refused

# The sizes of scores by axis, each a number or a node.
Sizes = Mapping[int, Any]


@dataclass(frozen=True)
class BlockMaskNodes:
    """Nodes of one graph: the blocks, and the data that the predicate reads after its indices."""

    blocks: Blocks
    predicate: fx.GraphModule
    data: tuple[fx.Node, ...]


@dataclass
class BlockMasks:
    """The blocks that were emitted, by the mask that they stand for and the code of its predicate.

    They are computed after the mask, in the graph that computes it.
    """

    _made: dict[tuple[fx.Node, str], Blocks] = field(default_factory=dict)

    def of(
        self, condition: Condition, mask: fx.Node, scope: Scope, shape: tuple[Size, ...]
    ) -> BlockMaskNodes:
        """The block mask of a condition on `mask`, a node of `scope`, for scores of `shape`.

        Raises:
            Refused: it cannot be computed after the mask.
        """
        home, origin = scope.home(mask)
        if origin.op == "placeholder":
            raise Refused(f"its mask {origin.name} is an input of the graph, a dense tensor")
        module = predicate(condition)
        key = origin, module.code
        # A rewrite that is refused erases what it inserted.
        if key not in self._made or self._made[key].rows[0]._erased:
            self._made[key] = _blocks(condition, origin, home, shape)
        return _with_data(self._made[key].moved(scope.inward), module, condition, scope)


def before(node: fx.Node, condition: Condition, scope: Scope, sizes: Sizes) -> BlockMaskNodes:
    """The block mask of a condition that is no single mask, for the attention `node` alone."""
    tensors = {tensor: scope.inward(tensor) for tensor in read_tensors(condition)}
    emit = Emitter(node, value(node))
    blocks = Bounds(emit, sizes, tensors, value(node).device).blocks(condition)
    return _with_data(blocks, predicate(condition), condition, scope)


def _with_data(
    blocks: Blocks, module: fx.GraphModule, condition: Condition, scope: Scope
) -> BlockMaskNodes:
    data = tuple(scope.inward(tensor) for tensor in read_tensors(condition))
    return BlockMaskNodes(blocks, module, data)


def _blocks(condition: Condition, mask: fx.Node, home: Scope, shape: tuple[Size, ...]) -> Blocks:
    """Emit the block mask after `mask`, in the graph that computes it."""
    emit = Emitter(mask.next, value(mask))
    sizes = {
        axis: size if isinstance(size, int) else _symbolic(emit, mask, axis, size)
        for axis, size in enumerate(shape, start=-4)
    }
    tensors = {tensor: home.inward(tensor) for tensor in read_tensors(condition)}
    return Bounds(emit, sizes, tensors, value(mask).device).blocks(condition)


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
