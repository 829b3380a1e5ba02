"""Read sizes from the input of the head where the code reads them from logits.

Logits that only a `size` uses would still be computed.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import fx

from ..engine.canonical import same, value
from ..engine.graph_state import GraphState, erase_unused
from ..engine.insertion import derive
from .loss_chain import LogitsPath, select_positions
from .loss_head import LinearHead


@dataclass(frozen=True)
class LogitsSizes:
    """Nodes that read the sizes of logits.

    Attributes:
        sources: the logits, or views of them.
        readers: the nodes that read one size, each with a node of the same size of another tensor.
        shapes: the nodes that are whole shapes, from which `readers` take sizes.
    """

    sources: set[fx.Node]
    readers: dict[fx.Node, fx.Node]
    shapes: set[fx.Node]

    @property
    def nodes(self) -> set[fx.Node]:
        return {*self.readers, *self.shapes}

    def redirect(self, matched: Collection[fx.Node]) -> None:
        """Use the sizes of the other tensors, and erase nodes of `matched` that become unused."""
        for reader, size in self.readers.items():
            reader.replace_all_uses_with(size)
        for node in (*self.readers, *self.sources):
            erase_unused(node, {*matched, *self.nodes})


def sizes_of(
    matched: Collection[fx.Node], head: LinearHead, path: LogitsPath, state: GraphState
) -> LogitsSizes:
    """Return the nodes that read sizes of `matched`, the nodes from a head to its loss.

    Nodes are left out if no other tensor is known to have the size, or if they use a whole shape.
    """
    sizes = LogitsSizes(set(), {}, set())
    for source in sorted(matched, key=state.order.__getitem__):
        for user in source.users:
            if user.op != "call_method" or user.target != "size" or user.kwargs:
                continue
            is_whole_shape = len(user.args) == 1
            replacements = {}
            for reader in user.users if is_whole_shape else [user]:
                new = _size(source, reader.args[-1], head, path, reader, state)
                if new is None or (is_whole_shape and reader.target is not operator.getitem):
                    break
                replacements[reader] = new
            else:
                sizes.sources.add(source)
                sizes.readers.update(replacements)
                sizes.shapes.update([user] if is_whole_shape else [])
    return sizes


def _size(
    source: fx.Node, dim: object, head: LinearHead, path: LogitsPath, at: fx.Node, state: GraphState
) -> fx.Node | None:
    """Return the size of a dimension of `source`, read from the head's tensors before `at`."""
    leading = tuple(value(source).shape[:-1])
    if not isinstance(dim, int):
        return None
    if dim % (len(leading) + 1) == len(leading):
        return derive(at, torch.Tensor.size, head.weight, 0)
    slices_passed = tuple(node for node in path.slices if state.order[node] <= state.order[source])
    x = select_positions(head.x, dataclasses.replace(path, slices=slices_passed), at)
    if same(tuple(value(x).shape[:-1]), leading):
        return derive(at, torch.Tensor.size, x, dim % (len(leading) + 1))
    # No tensor has the size: erase the slices that were inserted for the comparison.
    while x is not head.x:
        before = x.all_input_nodes[0]
        x.graph.erase_node(x)
        x = before
    return None
