"""Block masks and documents, emitted into a graph once for all layers that share a mask."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ...ops.attention.documents import Documents, packed_rows, padded_rows
from ..engine.canonical import value
from ..engine.insertion import Emitter, Refused
from ..engine.maps.algebra import Condition, Size, always_true
from .flex_attention import BlockMaskNodes, ScoreSizes, emit_block_mask, inlined_condition
from .mask.blocks import BATCH, KEYS
from .mask.evaluate import Scope
from .mask.predicate import predicate
from .sight import Sight


@dataclass
class MaskNodes:
    """Cache of what is emitted for a mask: block masks and documents, with their nodes.

    A block mask is computed after its mask, in the graph that computes the mask.
    """

    _emitted: dict[tuple[Any, ...], Any] = field(default_factory=dict)

    def block_mask(
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

        def emit_lists(emit: Emitter, sizes: ScoreSizes, home: Scope, device: torch.device) -> Any:
            return emit_block_mask(emit, condition, sizes, home, device, shows_unseen)

        nodes = self._once((condition, shows_unseen), mask, scope, shape, emit_lists)
        return nodes.in_scope(scope)

    def documents(
        self, seen: Sight, mask: fx.Node, scope: Scope, shape: tuple[Size, ...]
    ) -> Documents:
        """Return the documents that a mask shows, emitted once, as `block_mask` does."""

        def emit_rows(emit: Emitter, sizes: ScoreSizes, home: Scope, device: torch.device) -> Any:
            return emit_documents(emit, seen, sizes, home, device)

        kind = seen.of_tokens, "packed" if seen.is_packed else "padded"
        found = self._once(kind, mask, scope, shape, emit_rows)
        nodes: dict[str, Any] = {
            name: scope.inward(node)
            for name, node in found._asdict().items()
            if isinstance(node, fx.Node)
        }
        return Documents(**nodes)

    def _once(
        self, kind: tuple[Condition, bool | str], mask: fx.Node, scope: Scope,
        shape: tuple[Size, ...],
        emit_nodes: Callable[[Emitter, ScoreSizes, Scope, torch.device], Any],
    ) -> Any:  # fmt: skip
        home, origin = scope.home(mask)
        if origin.op == "placeholder":
            raise Refused(f"its mask {origin.name} is an input of the graph, a dense tensor")
        condition, option = kind
        # A mask of one row, or of all heads, serves scores of several sizes.
        key = origin, predicate(condition).code, option, *map(str, shape)
        # A rewrite that is refused erases the nodes that it inserted, also those cached here.
        if key not in self._emitted or _is_erased(self._emitted[key]):
            emit = Emitter(origin.next, value(origin))
            sizes = {
                axis: size if isinstance(size, int) else _size_node(emit, origin, axis, size)
                for axis, size in enumerate(shape, start=-4)
            }
            self._emitted[key] = emit_nodes(emit, sizes, home, value(origin).device)
        return self._emitted[key]


def emit_documents(
    emit: Emitter, seen: Sight, sizes: ScoreSizes, scope: Scope, device: torch.device
) -> Documents:
    """Emit the documents of rows: packed ones, or those between padding."""
    b, j = (
        emit(torch.Tensor.view, emit(torch.arange, sizes[axis], device=device), view)
        for axis, view in ((BATCH, (-1, 1)), (KEYS, (1, -1)))
    )
    of_tokens = inlined_condition(emit, seen.of_tokens, scope)(b, j, j, j)
    of_tokens = emit(torch.Tensor.expand, of_tokens, sizes[BATCH], sizes[KEYS])
    if seen.is_packed:
        return packed_rows(emit, of_tokens, device)
    return padded_rows(emit, of_tokens, sizes[BATCH], sizes[KEYS], device)


def _is_erased(nodes: Any) -> bool:
    return any(isinstance(leaf, fx.Node) and leaf._erased for leaf in pytree.tree_leaves(nodes))


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
