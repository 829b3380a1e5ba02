"""Calls of scaled_dot_product_attention, and their arguments by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.nn.functional as F
from torch import Tensor, fx

from .canonical import value

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


def set_arguments(node: fx.Node, arguments: dict[str, Any]) -> None:
    """Give a call these arguments; the defaults are not written."""
    node.args = tuple(arguments[name] for name in ("query", "key", "value"))
    node.kwargs = {
        name: given
        for name, given in arguments.items()
        if name not in ("query", "key", "value")
        and not (name in _DEFAULTS and given is _DEFAULTS[name])
    }
