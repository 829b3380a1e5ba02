"""Padding masks: a compiled variant for batches in which they are 1 everywhere.

Every collator passes an attention_mask, and in most batches it is 1 everywhere. Eager transformers
looks at the data and drops such a mask; a traced graph cannot. So the graph has two `Variants`: one
in which the mask is ones, so that attention is proved causal, and the graph as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ....torch_private import assert_async
from ...engine.canonical import value
from ...engine.effects import is_plain
from ...engine.graph_state import GraphState, needed_by
from ...engine.insertion import derive
from ...engine.maps.algebra import Condition, Unknown, comparisons, data_of
from ...engine.report import Report
from ..attention import Mask, attentions, mask_of, visible
from ..mask.evaluate import Scope, scopes
from ..unfused_attention import unfused_attentions
from .mask_outputs import is_ones
from .variants import InputCheck, InputState, duplicate, inputs_of

PROMISE = (
    'backend liger: options["padding"] is False, a promise that no token is padding, but the'
    " attention mask is not 1 everywhere"
)


def padding_positions(module: fx.GraphModule) -> list[int]:
    """Return the positions of the inputs that are padding masks, among the inputs of the graph.

    An input is a padding mask if a mask of attention reads it only to ask whether a token is
    padding, and if the masks that depend on it are functions of indices alone once it is ones.
    """
    inputs = inputs_of(module)
    masks = list(_conditions(module))
    state, accepted = GraphState(module.graph), []
    for position, node in enumerate(inputs):
        if not _may_be_padding(node) or not any(_only_compares(mask, node) for mask in masks):
            continue
        if state.ever_written([node]):
            continue
        assumed = duplicate(module)
        assume_ones(assumed, [position])
        pairs = zip(masks, _conditions(assumed), strict=True)
        if all(not data_of(after) for before, after in pairs if _depends(before, node)):
            accepted.append(position)
    return accepted


def _state_of(inputs: Sequence[Any], positions: Sequence[int]) -> InputState:
    return _variant(all(is_ones(inputs[position]) for position in positions), positions)


def _variant(full: bool, positions: Sequence[int]) -> InputState:
    """Return the state of full batches, whose inputs at `positions` are ones, or of others."""
    return InputState(full, functools.partial(assume_ones, positions=positions if full else ()))


PADDING = InputCheck(
    "padding", padding_positions, _state_of,
    lambda positions: [_variant(full, positions) for full in (True, False)],
)  # fmt: skip


def assume_ones(module: fx.GraphModule, positions: Sequence[int], *, check: bool = False) -> None:
    """Use ones in the place of inputs; with `check`, assert in the graph that they are ones.

    A GPU asserts on the device, and the failure shows when the host next waits for it.
    """
    inputs = inputs_of(module)
    *_, last = inputs
    for node in [inputs[position] for position in positions]:
        ones = derive(last.next, torch.ones_like, node)
        for user in list(node.users):
            if user is not ones and user.op != "output":
                user.replace_input_with(node, ones)
        if check:
            is_one = derive(last.next, torch.eq, node, 1)
            are_all_ones = derive(is_one.next, torch.all, is_one)
            derive(are_all_ones.next, assert_async, are_all_ones, PROMISE)
    module.recompile()


def _may_be_padding(node: fx.Node) -> bool:
    example = value(node)
    return (
        isinstance(example, Tensor)
        and is_plain(example)
        and example.dim() == 2
        and not example.dtype.is_floating_point
        and not example.dtype.is_complex
    )


def masks_of_attention(
    module: fx.GraphModule, *, data: bool = False
) -> Iterator[tuple[Scope, Mask]]:
    """Yield the masks of attention, in the order of the graph, each with its scope.

    For `data` see `IndexFunctions`.
    """
    for scope in scopes(module.graph, data=data):
        for _, arguments in attentions(scope.graph, "masks", Report()):
            if isinstance(arguments["attn_mask"], fx.Node):
                yield scope, mask_of(arguments)
        state = GraphState(scope.graph)
        for _, attention in unfused_attentions("masks", Report(), scope, state):
            yield from ((scope, mask) for mask in attention.masks)


def _conditions(module: fx.GraphModule) -> Iterator[Condition]:
    """Yield the condition of each mask; False, which depends on nothing, if it is unknown."""
    for scope, mask in masks_of_attention(module, data=True):
        try:
            yield visible(mask, scope.functions)
        except Unknown:
            yield False


def _only_compares(condition: Condition, node: fx.Node) -> bool:
    """Return whether a condition reads `node`, and only compares its elements with constants."""
    leaves = [
        leaf
        for leaf in comparisons(condition)
        if any(datum.node is node for datum in data_of(leaf))
    ]
    return bool(leaves) and all(
        len(leaf.value.terms) == 1 and not leaf.value.slopes for leaf in leaves
    )


def _depends(condition: Condition, node: fx.Node) -> bool:
    """Return whether the data of a condition is computed from `node`."""
    return node in needed_by(*(datum.node for datum in data_of(condition)))
