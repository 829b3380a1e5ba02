"""Masks that are inputs of a graph: recompute them there from the data of another graph.

Another graph computed the mask, which is a dense tensor here. If a graph of this backend returned
it (`mask_outputs`), the graph is compiled with the mask's operations in the place of the input, and
the mask's data as further inputs; the rewrites of attention then see what they would see if the
model were one graph. Each call looks up how its masks were computed, on the host, and runs the
variant for that; it is compiled when first needed. A mask of unknown origin, or one that was
written since, runs the graph as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ...engine.canonical import value
from ...engine.graph_state import GraphState, erase_unused
from ...engine.insertion import Emitter
from ...engine.maps.algebra import Unknown
from ..mask.predicate import inlined
from .mask_outputs import MaskOrigin, Recipe, may_be_mask, origin_of
from .padding import masks_of_attention
from .variants import InputCheck, InputState, inputs_of, is_symbolic

# Key of a node's meta: the position of the input that the node computes anew.
_REPLACED_INPUT = "liger_ops.instead_of"


def mask_positions(module: fx.GraphModule) -> list[int]:
    """Return the positions, among the inputs, of those that may be masks of attention.

    There are none in a graph with symbolic sizes: a recipe has fixed sizes.
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
        position
        for position, node in enumerate(inputs)
        if node in read and may_be_mask(node) and not state.ever_written([node])
    ]


def _state_of(inputs: Sequence[Any], positions: Sequence[int]) -> InputState:
    """Return how the masks at these positions were computed: equal recipes share a variant."""
    masks = [origin_of(inputs[position]) for position in positions]
    recipes = tuple(mask and mask.recipe for mask in masks)
    data = [tensor for mask in masks if mask is not None for tensor in mask.data]
    return InputState(
        recipes, functools.partial(insert_masks, positions=positions, masks=masks), data
    )


MASKS = InputCheck("given_masks", mask_positions, _state_of)


def insert_masks(
    module: fx.GraphModule, positions: Sequence[int], masks: Sequence[MaskOrigin | None]
) -> None:
    """Compute masks in the graph from their data, which become its last inputs.

    All inputs are inserted before the first operation, so that they stay the first nodes.
    """
    inputs = inputs_of(module)
    last, count = inputs[-1], 0
    computed = []
    for position, mask in zip(positions, masks, strict=True):
        if mask is None:
            continue
        data = []
        for tensor in mask.data:
            with module.graph.inserting_after(last):
                last = module.graph.placeholder(f"liger_mask_data_{count}")
            with value(inputs[position]).fake_mode:
                fake = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
            last.meta["example_value"] = fake
            count += 1
            data.append(last)
        computed.append((inputs[position], mask.recipe, data))
    for node, recipe, data in computed:
        _compute(node, recipe, data, last)
    module.recompile()


def _compute(node: fx.Node, recipe: Recipe, data: Sequence[fx.Node], last: fx.Node) -> None:
    """Compute the input `node` after the input `last`, and use the result in its place."""
    computed = inlined(Emitter(last.next, value(node)), recipe.graph, *data)
    example, traced = value(computed), value(node)
    if (example.shape, example.dtype, example.device) != (
        traced.shape, traced.dtype, traced.device,
    ):  # fmt: skip
        raise AssertionError(f"a mask of {example.shape} in the place of one of {traced.shape}")
    position = node.graph.find_nodes(op="placeholder").index(node)
    node.replace_all_uses_with(computed)
    computed.meta[_REPLACED_INPUT] = position


def put_back(module: fx.GraphModule) -> None:
    """Use the input again where the rewrites left a use of a mask, so that it is not recomputed."""
    for node in list(module.graph.nodes):
        if (position := node.meta.pop(_REPLACED_INPUT, None)) is None:
            continue
        node.replace_all_uses_with(inputs_of(module)[position])
        erase_unused(node, set(module.graph.nodes))
    module.recompile()
