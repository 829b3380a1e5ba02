"""The head of a language model: the linear layer that the logits of a loss come from."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..engine.canonical import Call, canonical, is_tensor, same, value
from ..engine.insertion import Refused, derive
from .losses import OTHER, NotFusable, returned_logits, used_by


@dataclass(frozen=True)
class LinearHead:
    """The linear layer that logits come from.

    Attributes:
        nodes: the nodes that compute the logits, the last first.
        views: the views of the weight that the layer uses.
        x: the hidden states.
        weight: (V, hidden size).
        bias: the layer's bias, or None.
        added: a bias that is added after the layer, with one number per class: (V,) or (1, V).
    """

    nodes: tuple[fx.Node, ...]
    views: tuple[fx.Node, ...]
    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None = None
    added: fx.Node | None = None

    @property
    def inputs(self) -> list[fx.Node]:
        return [
            tensor for tensor in (self.x, self.weight, self.bias, self.added) if tensor is not None
        ]


def head_of(logits: fx.Node) -> LinearHead | None:
    """Return the head that computes `logits`, or None.

    Raises:
        Refused: the logits are scaled by a symbolic number; the weight is no matrix of one row per
            class; or the added tensor does not have one number per class in the logits' dtype.
    """
    linear, added = canonical(logits), None
    nodes: tuple[fx.Node, ...] = (logits,)
    if linear is not None and linear.op == "add":
        product, added = _linear_first(linear)
        if product is None:
            return None
        _check_added(logits, product, added)
        linear, nodes = canonical(product), (logits, product)
    if linear is not None and linear.op in ("mul", "div") and any(map(_may_change, linear.args)):
        # An op compiles again for each value of a number, and Dynamo allows that a few times.
        raise Refused("the logits are scaled by a number that may differ from call to call")
    if linear is None or linear.op != "linear":
        return None
    x, weight, bias = linear.args
    head = LinearHead(nodes, linear.through, x, weight, bias, added)
    is_linear_layer = is_tensor(x) and is_tensor(weight, dim=2)
    if not is_linear_layer or not same(value(logits).shape[-1], value(weight).shape[0]):
        raise Refused("the logits are not those of one linear layer")
    return head


def _may_change(argument: Any) -> bool:
    return isinstance(value(argument), torch.SymFloat)


def _linear_first(call: Call) -> tuple[Any, Any]:
    """Return the operands of an addition, the linear layer first; None twice if there is none."""
    for a, b in (call.args, call.args[::-1]):
        product = canonical(a)
        if product is not None and product.op == "linear" and is_tensor(b):
            return a, b
    return None, None


def _check_added(logits: fx.Node, product: fx.Node, added: Any) -> None:
    *leading, classes = value(added).shape or (1,)
    if not same(classes, value(product).shape[-1]) or not all(same(size, 1) for size in leading):
        raise Refused("the tensor added to the logits does not have one number per class")
    dtypes = [value(tensor).dtype for tensor in (product, added, logits)]
    if len(set(dtypes)) > 1:
        raise Refused(f"a bias in {dtypes[1]} is added to logits in {dtypes[0]}")


def check_logits_users(nodes: Collection[fx.Node], matched: Collection[fx.Node]) -> None:
    """Raise NotFusable if a node outside of `matched` uses a value between head and loss."""
    for node in nodes:
        for user in node.users:
            if user not in matched:
                usage = used_by(user)
                if "returned" in usage:
                    raise returned_logits(usage)
                raise NotFusable(f"the logits {usage}", OTHER)


def total_bias(head: LinearHead, at: fx.Node) -> fx.Node | None:
    """Return the sum of the layer's bias and the bias added after it, before `at`; None if none."""
    if head.added is None:
        return head.bias
    added = head.added
    if value(added).dim() > 1:
        added = derive(at, torch.flatten, added)
    return added if head.bias is None else derive(at, torch.add, head.bias, added)
