"""Insert an op that returns parts of a loss per token, and its results as the code has them."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from ..engine.canonical import value
from ..engine.graph_state import GraphState
from ..engine.rewrite import Refused, derive, emit
from .loss_chain import NARROW
from .losses import NO_CLASS, JoinedTargets, Loss, TokenTerm

# Positions among the results of the ops that end in _forward.
_LOSS, _LSE, _TARGET_LOGIT, _LSE_ERROR = 0, 2, 3, 7
_LOG_PROB, _ENTROPY = 0, 1


def parts_of(
    op: str, loss: Loss, x: fx.Node, before: tuple[Any, ...], after: tuple[Any, ...],
    at: fx.Node, state: GraphState,
) -> tuple[fx.Node, list[fx.Node]]:  # fmt: skip
    """The op, and for each end of the loss a node that replaces it; before `at`.

    `x`, `before` and `after` are the op's arguments before and after the target.
    """
    names = {end.kind for end in loss.ends}
    # The ops that end in _forward have no autocast rule, so their inputs are cast here.
    dtype = value(loss.chain.logits).dtype
    x = _cast(x, dtype, at)
    before = tuple(_cast(one, dtype, at) for one in before)
    after = tuple(_cast(one, dtype, at) for one in after)
    target, ignored = _target(loss, x, at)
    if op.endswith("log_prob"):
        chain = loss.chain
        options = (chain.temperature, chain.softcap, chain.scale, NO_CLASS)
    else:
        options = _cross_entropy_options(loss, names)
    with state.modes_of(at):
        overload = getattr(torch.ops.liger, f"{op}_forward").default
        new = emit(at, overload, (x, *before, target, *after, *options))
    if op.endswith("log_prob"):
        parts = _log_prob_parts(names, new, ignored, at)
    else:
        parts = _cross_entropy_parts(names, new, value(loss.chain.logits).shape[-1], at)
    mode = state.modes(at)
    return new, [_as_end(end, *parts[end.kind], mode, at, state) for end in loss.ends]


def _target(loss: Loss, x: fx.Node, at: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    """The class index of each position of x, and which of them the code ignores, or None."""
    if loss.target is None:
        # An entropy alone needs no target, and any class will do.
        first = derive(at, operator.getitem, x, (..., 0))
        return derive(at, torch.zeros_like, first, dtype=torch.int64), None
    target = _built(loss.target, at)
    if loss.of.ignore_index is None:
        target = derive(at, torch.squeeze, target, -1)
    if value(target).dim() != value(x).dim() - 1:
        first = derive(at, operator.getitem, x, (..., 0))
        target = derive(at, torch.Tensor.reshape_as, target, first)
    if loss.ignore_index == NO_CLASS:
        return target, None
    # An ignored token has an entropy, but a loss of 0.
    ignored = derive(at, torch.eq, target, loss.ignore_index)
    return derive(at, torch.masked_fill, target, ignored, 0), ignored


def _built(target: Any, at: fx.Node) -> fx.Node:
    if not isinstance(target, JoinedTargets):
        return target
    of = [_built(one, at) for one in target.of]
    return derive(at, target.join, of)


def _cross_entropy_options(loss: Loss, names: set[str]) -> tuple[Any, ...]:
    chain = loss.chain
    if chain.temperature != 1.0:
        raise Refused("the logits are scaled after their softcap")
    # With label_smoothing=1 the loss is minus the mean log-probability over all classes.
    smoothing = 1.0 if "total" in names else 0.0
    return None, None, None, NO_CLASS, "none", smoothing, 0.0, chain.softcap, chain.scale


def _log_prob_parts(
    names: set[str], new: fx.Node, ignored: fx.Node | None, at: fx.Node
) -> dict[str, tuple[fx.Node, bool]]:
    """For each part its node, and whether it is negated."""
    parts = {}
    for name, place in (("log_prob", _LOG_PROB), ("entropy", _ENTROPY), ("lse", _LSE)):
        if name in names or (name != "entropy" and "target_logit" in names):
            parts[name] = (derive(at, operator.getitem, new, place), False)
    if "target_logit" in names:
        of = derive(at, torch.add, parts["log_prob"][0], parts["lse"][0])
        parts["target_logit"] = (of, False)
    if ignored is not None:
        kept = derive(at, torch.masked_fill, parts["log_prob"][0], ignored, 0.0)
        parts["log_prob"] = (kept, False)
    return parts


def _cross_entropy_parts(
    names: set[str], new: fx.Node, classes: Any, at: fx.Node
) -> dict[str, tuple[fx.Node, bool]]:
    parts = {}
    if names & {"lse", "target_logit", "log_prob"}:
        lse = derive(at, operator.getitem, new, _LSE)
        target_logit = derive(at, operator.getitem, new, _TARGET_LOGIT)
        parts = {"lse": (lse, False), "target_logit": (target_logit, False)}
        if "log_prob" in names and "total" not in names:
            parts["log_prob"] = (derive(at, operator.getitem, new, _LOSS), True)
        elif "log_prob" in names:
            less = derive(at, torch.sub, lse, target_logit)
            error = derive(at, operator.getitem, new, _LSE_ERROR)
            parts["log_prob"] = (derive(at, torch.add, less, error), True)
    if "total" in names:
        if not isinstance(classes, int):
            raise Refused("the number of classes is not known while the graph is compiled")
        mean = derive(at, operator.getitem, new, _LOSS)
        parts["total"] = (derive(at, torch.mul, mean, classes), True)
    return parts


def _as_end(
    end: TokenTerm, part: fx.Node, negative: bool, mode: tuple[Any, ...],
    at: fx.Node, state: GraphState,
) -> fx.Node:  # fmt: skip
    """A part of the loss with the sign, shape, dtype and gradient of the node that it replaces."""
    before = value(end.node)
    if end.chain.by_rows and value(part).dim() > 1:
        part = derive(at, torch.flatten, part)
    if negative != end.negative:
        part = derive(at, torch.neg, part)
    if before.dim() > value(part).dim():
        part = derive(at, torch.unsqueeze, part, -1)
    if end.kind in ("total", "entropy") and before.dtype not in (value(part).dtype, *NARROW):
        raise Refused(f"the log-probabilities are summed in {before.dtype}")
    part = _cast(part, before.dtype, at)
    if state.modes(end.node) != mode:
        part = derive(at, torch.Tensor.detach, part)
    if state.ever_written([end.node]):
        # The backward reads the op's results.
        part = derive(at, torch.clone, part)
    return part


def _cast(tensor: Any, dtype: torch.dtype, at: fx.Node) -> Any:
    if tensor is None or value(tensor).dtype == dtype:
        return tensor
    return derive(at, torch.Tensor.to, tensor, dtype)
