"""The head of a language model: the linear layer that the logits of a loss come from."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..engine.canonical import Call, canonical, is_tensor, same, value
from ..engine.rewrite import Refused, derive
from .losses import used_by
from .unfused_loss import OTHER, Apart, returned


@dataclass(frozen=True)
class Head:
    """The linear layer that logits come from.

    Attributes:
        nodes: the nodes that compute the logits, the last first.
        views: the views of the weight that the layer uses.
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
        return [one for one in (self.x, self.weight, self.bias, self.added) if one is not None]


def head_of(logits: fx.Node) -> Head | None:
    """The head that computes `logits`, or None; raises Refused if the op does not support it."""
    linear, added = canonical(logits), None
    nodes: tuple[fx.Node, ...] = (logits,)
    if linear is not None and linear.op == "add":
        of, added = _linear_first(linear)
        if of is None:
            return None
        _check_added(logits, of, added)
        linear, nodes = canonical(of), (logits, of)
    if linear is not None and linear.op in ("mul", "div") and any(map(_may_change, linear.args)):
        # An op compiles again for each value of a number, and Dynamo allows that a few times.
        raise Refused("the logits are scaled by a number that may differ from call to call")
    if linear is None or linear.op != "linear":
        return None
    x, weight, bias = linear.args
    head = Head(nodes, linear.through, x, weight, bias, added)
    known = is_tensor(x) and is_tensor(weight, dim=2)
    if not known or not same(value(logits).shape[-1], value(weight).shape[0]):
        raise Refused("the logits are not those of one linear layer")
    return head


def _may_change(argument: Any) -> bool:
    return isinstance(value(argument), torch.SymFloat)


def _linear_first(call: Call) -> tuple[Any, Any]:
    for a, b in (call.args, call.args[::-1]):
        of = canonical(a)
        if of is not None and of.op == "linear" and is_tensor(b):
            return a, b
    return None, None


def _check_added(logits: fx.Node, of: fx.Node, added: Any) -> None:
    *leading, classes = value(added).shape or (1,)
    if not same(classes, value(of).shape[-1]) or not all(same(size, 1) for size in leading):
        raise Refused("the tensor added to the logits does not have one number per class")
    dtypes = [value(one).dtype for one in (of, added, logits)]
    if len(set(dtypes)) > 1:
        raise Refused(f"a bias in {dtypes[1]} is added to logits in {dtypes[0]}")


def check_users(nodes: Collection[fx.Node], matched: Collection[fx.Node]) -> None:
    """Raise Apart if a node that is not in `matched` uses a value between the head and the loss."""
    for node in nodes:
        for user in node.users:
            if user not in matched:
                use = used_by(user)
                if "returned" in use:
                    raise returned(use)
                raise Apart(f"the logits {use}", OTHER)


def bias_of(head: Head, at: fx.Node) -> fx.Node | None:
    """The bias of the layer and the one added after it, as one, before `at`."""
    if head.added is None:
        return head.bias
    added = head.added
    if value(added).dim() > 1:
        added = derive(at, torch.flatten, added)
    return added if head.bias is None else derive(at, torch.add, head.bias, added)
