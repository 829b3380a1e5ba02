"""Sizes that the code reads from logits, read from the input of the head instead."""

from __future__ import annotations

import operator
from collections.abc import Collection
from dataclasses import dataclass, replace

import torch
from torch import fx

from ..engine.canonical import same, value
from ..engine.graph_state import GraphState, erase_unused
from ..engine.rewrite import derive
from .loss_chain import LogitsPath, positions
from .loss_head import Head


@dataclass(frozen=True)
class Sizes:
    """Nodes that read the sizes of logits.

    Attributes:
        of: the logits, or views of them.
        readers: the nodes that are or have a size, each with the same size of another tensor.
        shapes: the nodes that have whole shapes, of which `readers` take sizes.
    """

    of: set[fx.Node]
    readers: dict[fx.Node, fx.Node]
    shapes: set[fx.Node]

    @property
    def nodes(self) -> set[fx.Node]:
        return {*self.readers, *self.shapes}

    def redirect(self, matched: Collection[fx.Node]) -> None:
        """Use the other sizes, and erase the nodes of `matched` that become unused."""
        for reader, size in self.readers.items():
            reader.replace_all_uses_with(size)
        for node in (*self.readers, *self.of):
            erase_unused(node, {*matched, *self.nodes})


def sizes_of(
    matched: Collection[fx.Node], head: Head, chain: LogitsPath, state: GraphState
) -> Sizes:
    """The nodes that read sizes of `matched`, the nodes from a head to its loss.

    Those are left out whose sizes no other tensor is known to have, or which use a whole shape.
    """
    sizes = Sizes(set(), {}, set())
    for of in sorted(matched, key=state.order.__getitem__):
        for user in of.users:
            if user.op != "call_method" or user.target != "size" or user.kwargs:
                continue
            whole = len(user.args) == 1
            found = {}
            for reader in user.users if whole else [user]:
                new = _size(of, reader.args[-1], head, chain, reader, state)
                if new is None or (whole and reader.target is not operator.getitem):
                    break
                found[reader] = new
            else:
                sizes.of.add(of)
                sizes.readers.update(found)
                sizes.shapes.update([user] if whole else [])
    return sizes


def _size(
    of: fx.Node, dim: object, head: Head, chain: LogitsPath, at: fx.Node, state: GraphState
) -> fx.Node | None:
    """The size of a dimension of `of`, read from the head's tensors before `at`."""
    leading = tuple(value(of).shape[:-1])
    if not isinstance(dim, int):
        return None
    if dim % (len(leading) + 1) == len(leading):
        return derive(at, torch.Tensor.size, head.weight, 0)
    passed = tuple(one for one in chain.slices if state.order[one] <= state.order[of])
    x = positions(head.x, replace(chain, slices=passed), at)
    if same(tuple(value(x).shape[:-1]), leading):
        return derive(at, torch.Tensor.size, x, dim % (len(leading) + 1))
    while x is not head.x:
        before = x.all_input_nodes[0]
        x.graph.erase_node(x)
        x = before
    return None
