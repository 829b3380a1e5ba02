"""Losses and their terms, and calls of cross_entropy and nll_loss read as losses; with the warnings
about losses of a training step that could not be fused with their head.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ..engine.canonical import Call, canonical, is_tensor, value
from ..engine.insertion import Refused
from ..engine.maps.index_maps import CASTS, VIEWS
from ..engine.report import Finding, device_of, source_line
from .loss_chain import LogitsPath, follow_back, softmax_path

FUNCTIONS = ("cross_entropy", "nll_loss")
# An ignore_index that no target has, because `gather` does not ignore any.
NO_CLASS = -(2**31)


@dataclass(frozen=True)
class TokenTerm:
    """A node whose value is a loss, or a value per token.

    Attributes:
        node: the node.
        kind: "loss", with its reduction; or, per token: "log_prob" of the target, "entropy", "lse",
            "target_logit", or "total", which is the sum of the log-probabilities of all classes; or
            "mean_logit", the mean of a token's logits, weighted by their probabilities, which is
            only read as half of an entropy.
        path: the path from the input of the softmax back to the logits.
        inner: the nodes between the input of the softmax and `node`.
        target: the class indices, a node or `JoinedTargets`; None if the term has none.
        negative: whether the term is multiplied by -1.
        ignore_index: the target of tokens whose value is 0, in a call of a loss function; None for
            `gather`, whose index has a last dimension of 1.
    """

    node: fx.Node
    kind: str
    path: LogitsPath
    inner: tuple[fx.Node, ...] = ()
    target: Any = None
    negative: bool = False
    ignore_index: int | None = None

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        """The nodes between the logits and `node`."""
        return (*self.inner, *self.path.nodes)


@dataclass(frozen=True)
class JoinedTargets:
    """Targets that are to be joined along their first dimension by `join`: torch.stack or cat."""

    join: Any
    parts: tuple[Any, ...]

    def nodes(self) -> list[fx.Node]:
        return [node for part in self.parts for node in target_nodes(part)]


def target_nodes(target: Any) -> list[fx.Node]:
    """Return the nodes of a target: none, one, or those of `JoinedTargets`."""
    if target is None:
        return []
    return target.nodes() if isinstance(target, JoinedTargets) else [target]


@dataclass(frozen=True)
class Loss:
    """A loss that the ops can compute: the terms to replace, in no order, and the ops' options."""

    terms: tuple[TokenTerm, ...]
    class_weight: Any = None
    reduction: str = "none"
    label_smoothing: float = 0.0

    @property
    def node(self) -> fx.Node:
        return self.terms[0].node

    @property
    def primary(self) -> TokenTerm:
        """The term that the logits and the target are taken from."""
        return next((term for term in self.terms if term.target is not None), self.terms[0])

    @property
    def path(self) -> LogitsPath:
        return self.primary.path

    @property
    def target(self) -> Any:
        return self.primary.target

    @property
    def ignore_index(self) -> int:
        return NO_CLASS if self.primary.ignore_index is None else self.primary.ignore_index

    @property
    def nodes(self) -> set[fx.Node]:
        """The nodes that compute the loss from the logits."""
        return {node for term in self.terms for node in (term.node, *term.nodes)}


def loss_calls(graph: fx.Graph) -> list[fx.Node]:
    """Return the calls of loss functions."""
    return [
        node
        for node in graph.nodes
        if (call := canonical(node)) is not None and call.op in FUNCTIONS
    ]


def read_loss(node: fx.Node) -> Loss:
    """Return the loss that `node`, a call of a loss function, computes.

    Raises:
        Refused: an op does not support its input, its target or an option, or a value between the
            softmax and the loss is used elsewhere.
    """
    call = canonical(node)
    assert call is not None
    term = term_of_call(node, call)
    _, target, weight, ignore_index, reduction, *smoothing = call.args
    if value(target).is_floating_point():
        raise Refused("the target is probabilities, not the index of a class")
    if not all(isinstance(option, (int, float)) for option in (ignore_index, *smoothing)):
        raise Refused("an option is not known at compile time")
    if is_tensor(weight) and value(weight).requires_grad:
        raise Refused("the weight of the classes requires a gradient")
    check_softmax_users(term.inner, {node, *term.inner})
    return Loss((term,), weight, reduction, *map(float, smoothing))


def term_of_call(node: fx.Node, call: Call, has_temperature: bool = False) -> TokenTerm:
    """Return the loss of a call of a loss function.

    Raises:
        Refused: the logits are not rows with one target each, or the input of nll_loss is not known
            to be log_softmax.
    """
    logits, target, _, ignore_index, *_ = call.args
    inner: tuple[fx.Node, ...] = ()
    start = start_of_path(logits, target, has_temperature)
    if call.op == "nll_loss":
        softmax = softmax_path(start)
        if softmax is None or softmax.op != "log_softmax" or softmax.negative:
            raise Refused("the loss's input is not known to be log_softmax")
        start, inner = softmax.start, softmax.nodes
    return TokenTerm(node, "loss", follow_back(start), inner, target, ignore_index=ignore_index)


def start_of_path(logits: Any, target: Any, has_temperature: bool = False) -> LogitsPath:
    """Return the path at a loss's input: (N, V) with targets (N,), or (N, V, d) with (N, d).

    Raises:
        Refused: the shapes are others, or the classes are not the last dimension in memory.
    """
    if is_tensor(logits, dim=2) and is_tensor(target, dim=1):
        return LogitsPath(logits, has_temperature=has_temperature)
    if not is_tensor(logits, dim=3) or not is_tensor(target, dim=2):
        raise Refused("the logits are not rows with one target each")
    call = canonical(logits)
    if call is None or call.op != "transpose" or call.args[1] != (-2, -1):
        raise Refused("the classes are the second dimension of the logits in memory, not the last")
    return LogitsPath(call.args[0], (logits,), by_rows=False, has_temperature=has_temperature)


def check_softmax_users(inner: Any, matched: set[fx.Node]) -> None:
    """Raise Refused if a node of `inner` has a user that is not in `matched`."""
    for node in inner:
        for user in node.users:
            if user not in matched:
                call = canonical(node)
                is_exp = call is not None and call.op in ("exp", "softmax")
                noun = "probabilities" if is_exp else "log-probabilities"
                raise Refused(f"the {noun} {used_by(user)}")


def used_by(user: fx.Node) -> str:
    """Return how `user` uses a value: "are returned", or for example "are used by argmax too"."""
    node = user
    while (call := canonical(node)) is not None and call.op in VIEWS | CASTS:
        if len(node.users) != 1:
            break
        node = next(iter(node.users))
    return "are returned" if node.op == "output" else f"are used by {user.name} too"


# Below this number of classes the logits take little memory compared with the hidden states.
LEAST_CLASSES = 1024

RETURNED = (
    "Compile a step that returns the loss alone, torch.compile(lambda **batch:"
    ' model(**batch).loss, backend="liger"), or call liger_ops.fuse(model).'
)
WRAPPED = (
    "FSDP2 and DDP make a graph of the model's forward, which returns the logits: call"
    " liger_ops.fuse(model), or fuse(model, norms=False, activations=False, rope=False) to leave"
    " the layers to the backend."
)
ELSEWHERE = (
    "Compile the head and the loss as one function, without a graph break between them, or call"
    " liger_ops.fuse(model)."
)
OTHER = "liger_ops.explain shows what came close, and why it was left."


@dataclass(frozen=True)
class UnfusedLoss(Finding):
    """A loss that a training step computes with all logits in memory at once.

    Attributes:
        advice: what the user can do about it.
    """

    advice: str = OTHER


class NotFusable(Refused):
    """Raised if a loss cannot be fused with its head. `advice` tells the user what to do."""

    def __init__(self, reason: str, advice: str) -> None:
        super().__init__(reason)
        self.advice = advice


def returned_logits(use: str) -> NotFusable:
    """Return the exception for logits that the graph returns."""
    # In a process group the model may have the hooks of FSDP2 or DDP, where graphs end.
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        reason = (
            f"the logits {use}, to the code after the hooks of FSDP2 or DDP if the model has them"
        )
        return NotFusable(reason, WRAPPED)
    return NotFusable(f"the logits {use}", RETURNED)


def check_computed_here(logits: fx.Node) -> None:
    """Raise NotFusable if logits that need a gradient were computed outside of this graph."""
    example = value(logits)
    is_input = logits.op == "placeholder" and isinstance(example, Tensor)
    if is_input and example.requires_grad and not example.is_leaf:
        raise NotFusable(
            "the logits are computed outside of the graph that has the loss", ELSEWHERE
        )


def finding(op: str, loss: Loss, refused: Refused) -> Finding:
    """Return the finding for a loss that is refused."""
    return Finding(op, str(refused), source_line(loss.node), device_of(loss.node))


def refusal(op: str, loss: Loss, refused: Refused) -> Finding:
    """Return the finding for a loss that could not be fused with its head.

    It is an `UnfusedLoss`, which warns, if the loss has a gradient and LEAST_CLASSES or more.
    """
    node, logits = loss.node, value(loss.path.logits)
    # A loss without a gradient is an evaluation, which does not need a warning.
    if value(node).requires_grad and logits.shape[-1] >= LEAST_CLASSES:
        advice = getattr(refused, "advice", OTHER)
        return UnfusedLoss(op, str(refused), source_line(node), device_of(node), advice=advice)
    return finding(op, loss, refused)


_warned: set[str] = set()


def warn(findings: Iterable[Finding]) -> None:
    """Warn once for each line of user code whose training loss could not be fused."""
    for finding in findings:
        if isinstance(finding, UnfusedLoss) and finding.where not in _warned:
            _warned.add(finding.where)
            warnings.warn(
                f"liger_ops: the loss at {finding.where}\nis computed from logits that are whole in"
                f" memory: {finding.reason}. {finding.advice}",
                stacklevel=2,
            )
