"""A graph that is given a mask computes attention by what the mask was computed from.

Another graph made the mask, which is a dense tensor here. If it is a mask that a graph of this
backend returned (`mask_outputs`), the graph is compiled with the mask's operations in the place of
the input, and the mask's data as further inputs; the rewrites of attention then see what they would
see if the model were one graph. Each call asks what its masks are, on the host, and runs the
compilation for that; it is compiled when first needed. A mask of which nothing is known, or that
was written since, runs the graph as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ...engine.canonical import value
from ...engine.emitter import Emitter
from ...engine.graph_state import GraphState, erase_unused
from ..mask.algebra import Unknown
from ..mask.predicate import inlined
from .mask_outputs import MaskOrigin, Recipe, may_be_mask, origin_of
from .padding import masks_of_attention
from .variants import Look, Seen, inputs_of, is_symbolic

# The position of the input that a node computes anew.
_INSTEAD_OF = "liger_ops.instead_of"


def given_masks(module: fx.GraphModule) -> list[int]:
    """The positions, among the inputs, of those that may be masks of attention.

    There are none in a graph with symbolic sizes.
    """
    inputs = inputs_of(module)
    if not any(map(may_be_mask, inputs)) or any(map(is_symbolic, inputs)):
        return []
    read: set[fx.Node] = set()
    for scope, mask in masks_of_attention(module):
        try:
            scope.functions.value(mask.source)
        except Unknown:
            read.update(scope.functions.nodes_read(mask.source))
    state = GraphState(module.graph)
    return [
        place
        for place, node in enumerate(inputs)
        if node in read and may_be_mask(node) and not state.ever_written([node])
    ]


def _seen(inputs: Sequence[Any], places: Sequence[int]) -> Seen:
    masks = [origin_of(inputs[place]) for place in places]
    recipes = tuple(mask and mask.recipe for mask in masks)
    data = [one for mask in masks if mask is not None for one in mask.data]
    return Seen(recipes, functools.partial(put, places=places, masks=masks), data)


MASKS = Look("given_masks", given_masks, _seen)


def put(module: fx.GraphModule, places: Sequence[int], masks: Sequence[MaskOrigin | None]) -> None:
    """Compute masks in the graph from their data, which become its last inputs."""
    inputs = inputs_of(module)
    last, count = inputs[-1], 0
    made = []
    for place, mask in zip(places, masks, strict=True):
        if mask is None:
            continue
        data = []
        for one in mask.data:
            with module.graph.inserting_after(last):
                last = module.graph.placeholder(f"liger_mask_data_{count}")
            with value(inputs[place]).fake_mode:
                fake = torch.empty(one.shape, dtype=one.dtype, device=one.device)
            last.meta["example_value"] = fake
            count += 1
            data.append(last)
        made.append((inputs[place], mask.recipe, data))
    for node, recipe, data in made:
        _compute(node, recipe, data, last)
    module.recompile()


def _compute(node: fx.Node, recipe: Recipe, data: Sequence[fx.Node], last: fx.Node) -> None:
    """Compute the input `node` after the input `last`, and let the graph use that."""
    made = inlined(Emitter(last.next, value(node)), recipe.graph, *data)
    example, traced = value(made), value(node)
    if (example.shape, example.dtype, example.device) != (
        traced.shape, traced.dtype, traced.device,
    ):  # fmt: skip
        raise AssertionError(f"a mask of {example.shape} in the place of one of {traced.shape}")
    place = node.graph.find_nodes(op="placeholder").index(node)
    node.replace_all_uses_with(made)
    made.meta[_INSTEAD_OF] = place


def put_back(module: fx.GraphModule) -> None:
    """Use a mask that was given where the rewrites left a use of it: it need not be made again."""
    for node in list(module.graph.nodes):
        if (place := node.meta.pop(_INSTEAD_OF, None)) is None:
            continue
        node.replace_all_uses_with(inputs_of(module)[place])
        erase_unused(node, set(module.graph.nodes))
    module.recompile()
