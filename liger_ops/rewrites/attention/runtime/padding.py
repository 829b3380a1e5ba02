"""A padding mask that hides nothing costs nothing: the compiled callable looks at it.

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
from ...engine.graph_state import GraphState, needed_by
from ...engine.memory import is_plain
from ...engine.report import Report
from ...engine.rewrite import derive
from ..attention import attentions, mask_of
from ..mask.algebra import Condition, Unknown, comparisons, data_of
from ..mask.scopes import Scope, scopes
from ..masks import Mask, visible
from ..unfused_attention import unfused_attentions
from .mask_outputs import is_ones
from .variants import Look, Seen, duplicate, inputs_of

PROMISE = (
    'backend liger: options["padding"] is False, a promise that no token is padding, but the'
    " attention mask is not 1 everywhere"
)


def padding_masks(module: fx.GraphModule) -> list[int]:
    """The positions of the inputs that are padding masks, among the inputs of the graph.

    An input is one if attention masks read it only to ask whether a token is padding, and if these
    masks are functions of indices alone where it is 1 everywhere.
    """
    inputs = inputs_of(module)
    masks = list(_conditions(module))
    state, found = GraphState(module.graph), []
    for place, node in enumerate(inputs):
        if not _may_be_padding(node) or not any(_asks(mask, node) for mask in masks):
            continue
        if state.ever_written([node]):
            continue
        assumed = duplicate(module)
        assume_ones(assumed, [place])
        pairs = zip(masks, _conditions(assumed), strict=True)
        if all(not data_of(after) for before, after in pairs if _depends(before, node)):
            found.append(place)
    return found


def _seen(inputs: Sequence[Any], places: Sequence[int]) -> Seen:
    return _variant(all(is_ones(inputs[place]) for place in places), places)


def _variant(full: bool, places: Sequence[int]) -> Seen:
    """The graph for full batches, whose inputs at `places` are 1 everywhere, or for others."""
    return Seen(full, functools.partial(assume_ones, places=places if full else ()))


PADDING = Look(
    "padding", padding_masks, _seen,
    lambda places: [_variant(full, places) for full in (True, False)],
)  # fmt: skip


def assume_ones(module: fx.GraphModule, places: Sequence[int], *, check: bool = False) -> None:
    """Let the graph use ones in the place of inputs; with `check`, assert that they are ones.

    On a GPU the assertion runs on the device, and fails when the host next waits for it.
    """
    inputs = inputs_of(module)
    *_, last = inputs
    for node in [inputs[place] for place in places]:
        ones = derive(last.next, torch.ones_like, node)
        for user in list(node.users):
            if user is not ones and user.op != "output":
                user.replace_input_with(node, ones)
        if check:
            equal = derive(last.next, torch.eq, node, 1)
            every = derive(equal.next, torch.all, equal)
            derive(every.next, assert_async, every, PROMISE)
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
    """The masks of attention, in the order of the graph, and the scope of each.

    For `data` see `IndexFunctions`."""
    for scope in scopes(module.graph, data=data):
        for _, arguments in attentions(scope.graph, "masks", Report()):
            if isinstance(arguments["attn_mask"], fx.Node):
                yield scope, mask_of(arguments)
        state = GraphState(scope.graph)
        for _, found in unfused_attentions("masks", Report(), scope, state):
            yield from ((scope, mask) for mask in found.masks)


def _conditions(module: fx.GraphModule) -> Iterator[Condition]:
    """The condition of each mask; False, which depends on nothing, if it cannot be analysed."""
    for scope, mask in masks_of_attention(module, data=True):
        try:
            yield visible(mask, scope.functions)
        except Unknown:
            yield False


def _asks(condition: Condition, node: fx.Node) -> bool:
    """Whether a condition reads `node`, and only to compare its elements with constants."""
    leaves = [
        leaf
        for leaf in comparisons(condition)
        if any(datum.node is node for datum in data_of(leaf))
    ]
    return bool(leaves) and all(
        len(leaf.value.terms) == 1 and not leaf.value.slopes for leaf in leaves
    )


def _depends(condition: Condition, node: fx.Node) -> bool:
    """Whether the data of a condition is computed from `node`."""
    return node in needed_by(*(datum.node for datum in data_of(condition)))
