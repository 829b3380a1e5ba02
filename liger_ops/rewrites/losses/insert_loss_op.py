"""Find the position for the op that replaces a loss, and insert the op."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx

from ..engine.canonical import value
from ..engine.graph_state import GraphState
from ..engine.insertion import ORIGIN, Refused, derive
from ..engine.rewrite import emit, replace
from .insert_token_op import insert_terms
from .loss_chain import as_rows, check_tensor_types, select_positions
from .loss_head import check_logits_users, head_of, total_bias
from .loss_sizes import sizes_of
from .losses import Loss, target_nodes
from .unfused_loss import check_computed_here


def insert_logits_op(op: str, loss: Loss, state: GraphState) -> fx.Node:
    """Replace a loss by `op` of the logits, and return the op."""
    logits = loss.path.logits
    at = _insertion_point(loss, (), [logits], "logits", state)
    return _insert(op, loss, logits, (), (), loss.nodes, at, state)


def insert_head_op(op: str, loss: Loss, state: GraphState) -> fx.Node | None:
    """Replace a loss and its head by `op`, and return the op; None if no head computes the logits.

    Raises:
        Refused: the op would not compute the same, or the logits are used elsewhere.
    """
    check_computed_here(loss.path.logits)
    head = head_of(loss.path.logits)
    if head is None:
        return None
    matched = {*loss.nodes, *head.nodes}
    sizes = sizes_of(matched - {term.node for term in loss.terms}, head, loss.path, state)
    check_logits_users(matched - {term.node for term in loss.terms}, matched | sizes.nodes)
    at = _insertion_point(loss, head.nodes, head.inputs, "head", state)
    matched |= set(head.views)
    new = _insert(op, loss, head.x, (head.weight,), (total_bias(head, at),), matched, at, state)
    sizes.redirect(matched)
    return new


def _insertion_point(
    loss: Loss, nodes: Sequence[fx.Node], inputs: Sequence[fx.Node], noun: str, state: GraphState
) -> fx.Node:
    """Return the node before which to insert the op that replaces the loss and `nodes`, its head.

    `inputs` are the op's inputs without the target; `noun` names them in messages.

    Raises:
        Refused: a tensor is a DTensor or the like; the loss is inside of a torch.func transform;
            the modes differ; a tensor is written in place in between; or a part of the loss is
            used before its targets are known.
    """
    targets = target_nodes(loss.target)
    check_tensor_types([*inputs, *targets, loss.class_weight])
    results = sorted((term.node for term in loss.terms), key=state.order.__getitem__)
    if any(state.transformed(result) for result in results):
        raise Refused("it is computed inside of a torch.func transform, such as vmap")
    mode = _mode(loss, nodes, state)
    if mode is None:
        raise Refused(
            f"the loss and its {noun} are computed in different gradient or autocast modes"
        )
    matched = {*loss.nodes, *nodes}
    first = min(matched, key=state.order.__getitem__)
    users = [user for result in results for user in result.users if user not in matched]
    bound = min(state.order[node] for node in (*users, results[-1]))
    # As late as possible, because the targets have to be known.
    at = max(
        (node for node, i in state.order.items() if i <= bound and state.modes(node) == mode),
        key=state.order.__getitem__,
    )
    # One op reads a target once: a write of it between two terms of the loss would be lost.
    start = min(at, results[0], key=state.order.__getitem__)
    if state.written([*matched, *inputs], first, results[-1]) or (
        len(results) > 1 and state.written(targets, start, results[-1])
    ):
        raise Refused(f"a tensor is written in place between the {noun} and the loss")
    if any(state.order[node] >= state.order[at] for node in (*inputs, *targets)):
        raise Refused("a part of the loss is used before its targets are known")
    return at


def _mode(loss: Loss, nodes: Sequence[fx.Node], state: GraphState) -> tuple[Any, ...] | None:
    """Return the gradient and autocast modes for the op, or None if no op computes the same.

    A term that is computed under no_grad has no gradient, whatever the mode of the nodes that it is
    computed from. Any other term has to be in the mode of all these nodes.
    """
    modes = [state.modes(term.node) for term in loss.terms]
    mode = next((term_mode for term_mode in modes if term_mode[0] is not False), modes[0])
    for term, (term_grad, *others) in zip(loss.terms, modes, strict=True):
        if term_grad not in (mode[0], False):
            return None
        for node in (term.node, *term.nodes, *nodes):
            grad, *node_modes = state.modes(node)
            if (
                others != node_modes
                or others != list(mode[1:])
                or (grad != term_grad and term_grad is not False)
            ):
                return None
    return mode


def _insert(
    op: str, loss: Loss, x: fx.Node, before: tuple[Any, ...], after: tuple[Any, ...],
    matched: Collection[fx.Node], at: fx.Node, state: GraphState,
) -> fx.Node:  # fmt: skip
    """Replace the loss by an op, erase the nodes of `matched` that become unused; return the op.

    `x`, the logits or the hidden states, has the positions of the logits; `before` and `after` are
    the op's other arguments before and after the target, up to the bias.
    """
    path = loss.path
    if loss.terms[0].kind == "loss":
        options = (loss.ignore_index, loss.reduction, loss.label_smoothing)
        args = (
            as_rows(x, path, at), *before, loss.target, *after,
            loss.class_weight, None, None, *options, 0.0, path.softcap, path.scale,
        )  # fmt: skip
        return _insert_loss(at, getattr(torch.ops.liger, op).default, args, matched, state)
    x = select_positions(x, path, at)
    new, results = insert_terms(op, loss, x, before, after, at, state)
    new.meta.update({key: loss.node.meta[key] for key in ORIGIN if key in loss.node.meta})
    replace(
        [(term.node, result) for term, result in zip(loss.terms, results, strict=True)],
        matched,
        state,
    )
    return new


def _insert_loss(
    at: fx.Node, target: Any, args: tuple[Any, ...], matched: Collection[fx.Node], state: GraphState
) -> fx.Node:
    """Replace a loss by the op, cast its float32 result to the loss's dtype, and return the op."""
    with state.modes_of(at):
        new = op = emit(at, target, args)
    if value(op).dtype != value(at).dtype:
        new = derive(at, torch.Tensor.to, op, value(at).dtype)
    replace([(at, new)], matched, state)
    return op
