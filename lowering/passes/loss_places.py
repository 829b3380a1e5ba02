"""Find the position for the op that replaces a loss, and insert it."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx

from .canonical import value
from .graph_state import GraphState
from .loss_chain import NARROW, check_kinds
from .losses import End, Loss
from .rewrite import Refused, derive, emit, put_loss
from .rewrite import replace as put_in_place

# Positions among the results of the ops that end in _forward.
_LOSS, _LSE, _TARGET_LOGIT = 0, 2, 3


def place(
    loss: Loss, nodes: Sequence[fx.Node], inputs: Sequence[fx.Node], of: str, state: GraphState
) -> fx.Node:
    """The node before which to insert the op that replaces the loss and `nodes`, which lead to it.

    `inputs` are the op's inputs without the target; `of` is what messages call them. Raises Refused
    if the op would compute something else there.
    """
    check_kinds([*inputs, loss.target, loss.class_weight])
    ends = sorted((end.node for end in loss.ends), key=state.order.__getitem__)
    if any(state.transformed(end) for end in ends):
        raise Refused("it is computed inside of a torch.func transform, such as vmap")
    if not state.one_mode([*nodes, *ends]):
        raise Refused(f"the loss and its {of} are computed in different gradient or autocast modes")
    first = min([*nodes, *ends], key=state.order.__getitem__)
    written = state.written([*nodes, *inputs], first, ends[-1])
    if written or (len(ends) > 1 and state.written([loss.target], ends[0], ends[-1])):
        raise Refused(f"a tensor is written in place between the {of} and the loss")
    last = state.order[ends[-1]]
    if all(state.order[user] > last for end in ends[:-1] for user in end.users):
        return ends[-1]
    if state.order[loss.target] < state.order[ends[0]]:
        return ends[0]
    raise Refused("a part of the loss is used before its targets are known")


def put(
    loss: Loss, op: str, before: tuple[Any, ...], after: tuple[Any, ...],
    at: fx.Node, among: Collection[fx.Node], state: GraphState,
) -> fx.Node:  # fmt: skip
    """Replace the loss by an op, and erase the nodes of `among` that become unused.

    `before` and `after` are the op's arguments before and after the target: the logits, or the
    tensors that they are computed from.
    """
    matched = {*among, *(end.node for end in loss.ends)}
    if loss.ends[0].part == "loss":
        args = (*before, loss.target, *after, *loss.options)
        return put_loss(at, getattr(torch.ops.liger, op).default, args, matched, state)
    target = derive(at, torch.squeeze, loss.target, -1)
    if [end.part for end in loss.ends] == ["log_prob"]:
        args = (*before, target, *after, *loss.options)
        new = _inserted(at, op, args, state)
        parts = {"log_prob": (new, True)}
    else:
        new, parts = _parts(loss, op, before, after, target, at, state)
    pairs = [(end.node, _as_end(end, *parts[end.part], at)) for end in loss.ends]
    put_in_place(pairs, matched, state)
    return new


def _parts(
    loss: Loss, op: str, before: tuple[Any, ...], after: tuple[Any, ...],
    target: fx.Node, at: fx.Node, state: GraphState,
) -> tuple[fx.Node, dict[str, tuple[fx.Node, bool]]]:  # fmt: skip
    """The op that returns several parts of a loss; for each part its node, and if it is negated."""
    names = {end.part for end in loss.ends}
    # With label_smoothing=1 the loss is minus the mean log-probability over all classes.
    loss = dataclasses.replace(loss, label_smoothing=1.0 if "total" in names else 0.0)
    # The ops that end in _forward have no autocast rule, so their inputs are cast here.
    dtype = value(loss.chain.logits).dtype
    before, after = (tuple(_cast(one, dtype, at) for one in some) for some in (before, after))
    args = (*before, target, *after, *loss.options)
    new = _inserted(at, f"{op}_forward", args, state)
    parts = {}
    if names & {"lse", "target_logit", "log_prob"}:
        lse = derive(at, operator.getitem, new, _LSE)
        target_logit = derive(at, operator.getitem, new, _TARGET_LOGIT)
        parts = {"lse": (lse, False), "target_logit": (target_logit, False)}
        if "log_prob" in names:
            parts["log_prob"] = (derive(at, torch.sub, lse, target_logit), True)
    if "total" in names:
        classes = value(loss.chain.logits).shape[-1]
        if not isinstance(classes, int):
            raise Refused("the number of classes is not known while the graph is compiled")
        mean = derive(at, operator.getitem, new, _LOSS)
        parts["total"] = (derive(at, torch.mul, mean, classes), True)
    return new, parts


def _inserted(at: fx.Node, op: str, args: tuple[Any, ...], state: GraphState) -> fx.Node:
    overload = getattr(torch.ops.liger, op).default
    with state.modes_of(at):
        return emit(at, overload, args)


def _as_end(end: End, part: fx.Node, negative: bool, at: fx.Node) -> fx.Node:
    """A part of the loss with the sign, shape and dtype of the node that it replaces."""
    before = value(end.node)
    if negative != end.negative:
        part = derive(at, torch.neg, part)
    if before.dim() > value(part).dim():
        part = derive(at, torch.unsqueeze, part, -1)
    if end.part == "total" and before.dtype not in (value(part).dtype, *NARROW):
        raise Refused(f"the log-probabilities are summed in {before.dtype}")
    return _cast(part, before.dtype, at)


def _cast(tensor: Any, dtype: torch.dtype, at: fx.Node) -> Any:
    if tensor is None or value(tensor).dtype == dtype:
        return tensor
    return derive(at, torch.Tensor.to, tensor, dtype)
