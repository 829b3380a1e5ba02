"""Find the position for the op that replaces a loss, and insert it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx

from ..engine.canonical import value
from ..engine.graph_state import GraphState
from ..engine.rewrite import ORIGIN, Refused, derive, emit, replace
from .insert_token_op import parts_of
from .loss_chain import check_kinds, positions, rows
from .loss_head import bias_of, check_users, head_of
from .loss_sizes import sizes_of
from .losses import Loss, nodes_of
from .unfused_loss import check_made_here


def of_logits(op: str, loss: Loss, state: GraphState) -> fx.Node:
    """Replace a loss by `op` of the logits."""
    logits = loss.chain.logits
    at = _place(loss, (), [logits], "logits", state)
    return _put(op, loss, logits, (), (), loss.nodes, at, state)


def with_head(op: str, loss: Loss, state: GraphState) -> fx.Node | None:
    """Replace a loss and its head by `op`; None if the logits are not those of a head."""
    check_made_here(loss.chain.logits)
    head = head_of(loss.chain.logits)
    if head is None:
        return None
    matched = {*loss.nodes, *head.nodes}
    sizes = sizes_of(matched - {end.node for end in loss.ends}, head, loss.chain, state)
    check_users(matched - {end.node for end in loss.ends}, matched | sizes.nodes)
    at = _place(loss, head.nodes, head.inputs, "head", state)
    matched |= set(head.views)
    new = _put(op, loss, head.x, (head.weight,), (bias_of(head, at),), matched, at, state)
    sizes.redirect(matched)
    return new


def _place(
    loss: Loss, nodes: Sequence[fx.Node], inputs: Sequence[fx.Node], of: str, state: GraphState
) -> fx.Node:
    """The node before which to insert the op that replaces the loss and `nodes`, its head.

    `inputs` are the op's inputs without the target; `of` is what messages call them. Raises Refused
    if the op would compute something else there.
    """
    targets = nodes_of(loss.target)
    check_kinds([*inputs, *targets, loss.class_weight])
    ends = sorted((end.node for end in loss.ends), key=state.order.__getitem__)
    if any(state.transformed(end) for end in ends):
        raise Refused("it is computed inside of a torch.func transform, such as vmap")
    mode = _mode(loss, nodes, state)
    if mode is None:
        raise Refused(f"the loss and its {of} are computed in different gradient or autocast modes")
    matched = {*loss.nodes, *nodes}
    first = min(matched, key=state.order.__getitem__)
    users = [user for end in ends for user in end.users if user not in matched]
    bound = min(state.order[one] for one in (*users, ends[-1]))
    # As late as possible, because the targets have to be known.
    at = max(
        (one for one, i in state.order.items() if i <= bound and state.modes(one) == mode),
        key=state.order.__getitem__,
    )
    # In one call of the op, a target that is written between two ends has one of its values.
    start = min(at, ends[0], key=state.order.__getitem__)
    if state.written([*matched, *inputs], first, ends[-1]) or (
        len(ends) > 1 and state.written(targets, start, ends[-1])
    ):
        raise Refused(f"a tensor is written in place between the {of} and the loss")
    if any(state.order[one] >= state.order[at] for one in (*inputs, *targets)):
        raise Refused("a part of the loss is used before its targets are known")
    return at


def _mode(loss: Loss, nodes: Sequence[fx.Node], state: GraphState) -> tuple[Any, ...] | None:
    """The modes for the op, or None if no op computes the same.

    A part that is computed without gradients has none, whatever the mode of what it is computed
    from. Other parts have the mode of all nodes that they are computed from.
    """
    modes = [state.modes(end.node) for end in loss.ends]
    mode = next((one for one in modes if one[0] is not False), modes[0])
    for end, (own, *others) in zip(loss.ends, modes, strict=True):
        if own not in (mode[0], False):
            return None
        for node in (end.node, *end.nodes, *nodes):
            grad, *there = state.modes(node)
            if others != there or others != list(mode[1:]) or (grad != own and own is not False):
                return None
    return mode


def _put(
    op: str, loss: Loss, x: fx.Node, before: tuple[Any, ...], after: tuple[Any, ...],
    matched: Collection[fx.Node], at: fx.Node, state: GraphState,
) -> fx.Node:  # fmt: skip
    """Replace the loss by an op, and erase the nodes of `matched` that become unused.

    `x` has the positions of the logits; `before` and `after` are the op's other arguments before
    and after the target, up to the bias.
    """
    chain = loss.chain
    if loss.ends[0].kind == "loss":
        options = (loss.ignore_index, loss.reduction, loss.label_smoothing)
        args = (
            rows(x, chain, at), *before, loss.target, *after,
            loss.class_weight, None, None, *options, 0.0, chain.softcap, chain.scale,
        )  # fmt: skip
        return _put_loss(at, getattr(torch.ops.liger, op).default, args, matched, state)
    x = positions(x, chain, at)
    new, results = parts_of(op, loss, x, before, after, at, state)
    new.meta.update({key: loss.node.meta[key] for key in ORIGIN if key in loss.node.meta})
    replace([(end.node, one) for end, one in zip(loss.ends, results, strict=True)], matched, state)
    return new


def _put_loss(
    at: fx.Node, target: Any, args: tuple[Any, ...], matched: Collection[fx.Node], state: GraphState
) -> fx.Node:
    """Replace a loss by the op, whose float32 result is cast to the old loss's dtype."""
    with state.modes_of(at):
        new = op = emit(at, target, args)
    if value(op).dtype != value(at).dtype:
        new = derive(at, torch.Tensor.to, op, value(at).dtype)
    replace([(at, new)], matched, state)
    return op
