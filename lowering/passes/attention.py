"""Calls of scaled_dot_product_attention, and their arguments by name."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch.nn.functional as F
from torch import Tensor, fx

from .canonical import same, value
from .graph_state import GraphState, fake_mode_of

_POSITIONAL = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_DEFAULTS = {"attn_mask": None, "is_causal": False, "enable_gqa": False}


def attentions(graph: fx.Graph) -> Iterator[tuple[fx.Node, dict[str, Any]]]:
    """Each call on dense tensors of at least two dimensions, with its arguments."""
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not F.scaled_dot_product_attention:
            continue
        arguments = {**_DEFAULTS, **dict(zip(_POSITIONAL, node.args, strict=False)), **node.kwargs}
        tensors = [value(arguments.get(name)) for name in ("query", "key", "value")]
        if all(isinstance(x, Tensor) and not x.is_nested and x.dim() >= 2 for x in tensors):
            yield node, arguments


def set_arguments(node: fx.Node, arguments: dict[str, Any], state: GraphState) -> str | None:
    """Give a call these arguments; where its result would be laid out otherwise, only say so."""
    before = value(node)
    tensors = tuple(arguments[name] for name in _POSITIONAL[:3])
    options = {
        name: given
        for name, given in arguments.items()
        if name not in _POSITIONAL[:3] and not (name in _DEFAULTS and given is _DEFAULTS[name])
    }
    with state.modes_of(node), fake_mode_of([before]):
        after = F.scaled_dot_product_attention(
            *map(value, tensors), **{name: value(given) for name, given in options.items()}
        )
    if after.dtype != before.dtype or not same(after.shape, before.shape):
        return f"the result would be {after.dtype}{tuple(after.shape)}"
    if not same(after.stride(), before.stride()):
        return f"the result would have the strides {after.stride()}, not {before.stride()}"
    node.args, node.kwargs = tensors, options
    return None


def erase_unused(node: fx.Node, among: Collection[fx.Node]) -> None:
    """Erase a node that nothing uses any more, and of its inputs those that this leaves unused.

    `among` are nodes that only compute. fx's dead code elimination would not do: to it a method
    that writes in place has no effect.
    """
    if node.users or node not in among or node.op == "placeholder":
        return
    inputs = node.all_input_nodes
    node.graph.erase_node(node)
    for one in inputs:
        erase_unused(one, among)
