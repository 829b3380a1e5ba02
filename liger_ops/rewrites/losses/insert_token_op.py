"""Insert an op that returns terms of a loss per token, and nodes that replace the code's terms."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from ..engine.canonical import value
from ..engine.graph_state import GraphState
from ..engine.insertion import Refused, derive
from ..engine.rewrite import emit
from .loss_chain import NARROW
from .losses import NO_CLASS, JoinedTargets, Loss, TokenTerm

# Positions among the results of the ops that end in _forward.
_LOSS, _LSE, _TARGET_LOGIT, _LSE_ERROR = 0, 2, 3, 7
_LOG_PROB, _ENTROPY = 0, 1


def insert_terms(
    op: str, loss: Loss, x: fx.Node, before: tuple[Any, ...], after: tuple[Any, ...],
    at: fx.Node, state: GraphState,
) -> tuple[fx.Node, list[fx.Node]]:  # fmt: skip
    """Insert the op before `at`; return it, and for each term of the loss the node to replace it.

    `x`, `before` and `after` are the op's arguments before and after the target.
    """
    kinds = {term.kind for term in loss.terms}
    # The ops that end in _forward have no autocast rule, so their inputs are cast here.
    dtype = value(loss.path.logits).dtype
    x = _cast(x, dtype, at)
    before = tuple(_cast(tensor, dtype, at) for tensor in before)
    after = tuple(_cast(tensor, dtype, at) for tensor in after)
    target, ignored = _target(loss, x, at)
    if op.endswith("log_prob"):
        path = loss.path
        options = (path.temperature, path.softcap, path.scale, NO_CLASS)
    else:
        options = _cross_entropy_options(loss, kinds)
    with state.modes_of(at):
        overload = getattr(torch.ops.liger, f"{op}_forward").default
        new = emit(at, overload, (x, *before, target, *after, *options))
    if op.endswith("log_prob"):
        nodes = _log_prob_parts(kinds, new, ignored, at)
    else:
        nodes = _cross_entropy_parts(kinds, new, value(loss.path.logits).shape[-1], at)
    mode = state.modes(at)
    return new, [_as_term(term, *nodes[term.kind], mode, at, state) for term in loss.terms]


def _target(loss: Loss, x: fx.Node, at: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    """Return the class index of each position of x, and which of them the code ignores, or None.

    Ignored tokens get class 0, because the op ignores none.
    """
    if loss.target is None:
        # An entropy alone needs no target, and any class will do.
        first = derive(at, operator.getitem, x, (..., 0))
        return derive(at, torch.zeros_like, first, dtype=torch.int64), None
    target = _target_node(loss.target, at)
    if loss.primary.ignore_index is None:
        target = derive(at, torch.squeeze, target, -1)
    if value(target).dim() != value(x).dim() - 1:
        first = derive(at, operator.getitem, x, (..., 0))
        target = derive(at, torch.Tensor.reshape_as, target, first)
    if loss.ignore_index == NO_CLASS:
        return target, None
    # An ignored token has an entropy, but a loss of 0.
    ignored = derive(at, torch.eq, target, loss.ignore_index)
    return derive(at, torch.masked_fill, target, ignored, 0), ignored


def _target_node(target: Any, at: fx.Node) -> fx.Node:
    """Return the node of a target, which may be joined from several."""
    if not isinstance(target, JoinedTargets):
        return target
    parts = [_target_node(part, at) for part in target.parts]
    return derive(at, target.join, parts)


def _cross_entropy_options(loss: Loss, kinds: set[str]) -> tuple[Any, ...]:
    path = loss.path
    if path.temperature != 1.0:
        raise Refused("the logits are scaled after their softcap")
    # With label_smoothing=1 the loss is minus the mean log-probability over all classes.
    smoothing = 1.0 if "total" in kinds else 0.0
    return None, None, None, NO_CLASS, "none", smoothing, 0.0, path.softcap, path.scale


def _log_prob_parts(
    kinds: set[str], new: fx.Node, ignored: fx.Node | None, at: fx.Node
) -> dict[str, tuple[fx.Node, bool]]:
    """Return for each kind of term its node, among results of log_prob, and whether it is negated.

    The op has no target logit: it is the log-probability plus lse.
    """
    nodes = {}
    for name, position in (("log_prob", _LOG_PROB), ("entropy", _ENTROPY), ("lse", _LSE)):
        if name in kinds or (name != "entropy" and "target_logit" in kinds):
            nodes[name] = (derive(at, operator.getitem, new, position), False)
    if "target_logit" in kinds:
        result = derive(at, torch.add, nodes["log_prob"][0], nodes["lse"][0])
        nodes["target_logit"] = (result, False)
    if ignored is not None:
        unignored = derive(at, torch.masked_fill, nodes["log_prob"][0], ignored, 0.0)
        nodes["log_prob"] = (unignored, False)
    return nodes


def _cross_entropy_parts(
    kinds: set[str], new: fx.Node, classes: Any, at: fx.Node
) -> dict[str, tuple[fx.Node, bool]]:
    """Return for each kind of term its node, among results of cross_entropy, and its negation."""
    nodes = {}
    if kinds & {"lse", "target_logit", "log_prob"}:
        lse = derive(at, operator.getitem, new, _LSE)
        target_logit = derive(at, operator.getitem, new, _TARGET_LOGIT)
        nodes = {"lse": (lse, False), "target_logit": (target_logit, False)}
        if "log_prob" in kinds and "total" not in kinds:
            nodes["log_prob"] = (derive(at, operator.getitem, new, _LOSS), True)
        elif "log_prob" in kinds:
            # With label smoothing the op's loss is that of "total". The error of lse, which float32
            # rounds, keeps the difference of two large numbers exact.
            difference = derive(at, torch.sub, lse, target_logit)
            error = derive(at, operator.getitem, new, _LSE_ERROR)
            nodes["log_prob"] = (derive(at, torch.add, difference, error), True)
    if "total" in kinds:
        if not isinstance(classes, int):
            raise Refused("the number of classes is not known while the graph is compiled")
        mean = derive(at, operator.getitem, new, _LOSS)
        nodes["total"] = (derive(at, torch.mul, mean, classes), True)
    return nodes


def _as_term(
    term: TokenTerm, node: fx.Node, negative: bool, mode: tuple[Any, ...],
    at: fx.Node, state: GraphState,
) -> fx.Node:  # fmt: skip
    """Return a term's node with the sign, shape, dtype and gradient of the code's node."""
    before = value(term.node)
    if term.path.by_rows and value(node).dim() > 1:
        node = derive(at, torch.flatten, node)
    if negative != term.negative:
        node = derive(at, torch.neg, node)
    if before.dim() > value(node).dim():
        node = derive(at, torch.unsqueeze, node, -1)
    if term.kind in ("total", "entropy") and before.dtype not in (value(node).dtype, *NARROW):
        raise Refused(f"the log-probabilities are summed in {before.dtype}")
    node = _cast(node, before.dtype, at)
    if state.modes(term.node) != mode:
        node = derive(at, torch.Tensor.detach, node)
    if state.ever_written([term.node]):
        # The backward reads the op's results, so the code's write goes to a copy.
        node = derive(at, torch.clone, node)
    return node


def _cast(tensor: Any, dtype: torch.dtype, at: fx.Node) -> Any:
    if tensor is None or value(tensor).dtype == dtype:
        return tensor
    return derive(at, torch.Tensor.to, tensor, dtype)
