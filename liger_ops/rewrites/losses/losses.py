"""The losses that the ops compute, and how cross_entropy and nll_loss are read as such."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from ..engine.canonical import Call, canonical, is_tensor, value
from ..engine.rewrite import Refused
from .loss_chain import LogitsPath, chain_of, way_of

# An ignore_index that no target has, because `gather` does not ignore any.
NO_CLASS = -(2**31)


@dataclass(frozen=True)
class LossOutput:
    """A node whose value is a loss, or a part of one.

    Attributes:
        node: the node.
        part: "loss", with its reduction; or, per token: "log_prob" of the target, "entropy", "lse",
            "target_logit", or "total", which is the sum of the log-probabilities of all classes.
        negative: whether the part is multiplied by -1.
        by_rows: whether the tokens are in one dimension, whatever the positions of the logits.
        nodes: the nodes between the logits and this one.
    """

    node: fx.Node
    part: str
    negative: bool = False
    by_rows: bool = True
    nodes: tuple[fx.Node, ...] = ()


@dataclass(frozen=True)
class JoinedTargets:
    """Targets that are to be joined along their first dimension by `join`, such as torch.stack."""

    join: Any
    of: tuple[Any, ...]

    def nodes(self) -> list[fx.Node]:
        return [node for one in self.of for node in nodes_of(one)]


def nodes_of(target: Any) -> list[fx.Node]:
    if target is None:
        return []
    return target.nodes() if isinstance(target, JoinedTargets) else [target]


@dataclass(frozen=True)
class Loss:
    """A loss that the ops can compute.

    Attributes:
        ends: the nodes to replace, in no order.
        chain: the way back from the ends to the logits.
        target: the class indices: a node, or `JoinedTargets`; None if no end needs them.
        has_classes: whether target has a last dimension of 1, as the index of `gather` has.
        The others are arguments of the ops.
    """

    ends: tuple[LossOutput, ...]
    chain: LogitsPath
    target: Any
    has_classes: bool = False
    class_weight: Any = None
    ignore_index: int = NO_CLASS
    reduction: str = "none"
    label_smoothing: float = 0.0

    @property
    def node(self) -> fx.Node:
        return self.ends[0].node

    @property
    def nodes(self) -> set[fx.Node]:
        """The nodes that compute the loss from the logits."""
        return {node for end in self.ends for node in (end.node, *end.nodes)}


def losses(graph: fx.Graph) -> list[fx.Node]:
    """The calls of loss functions."""
    return [
        node
        for node in graph.nodes
        if (call := canonical(node)) is not None and call.op in _READERS
    ]


def read(node: fx.Node) -> Loss:
    """The loss that `node` computes; raises Refused if the ops do not support it."""
    call = canonical(node)
    assert call is not None
    return _READERS[call.op](node, call)


def _cross_entropy(node: fx.Node, call: Call) -> Loss:
    logits, target, weight, ignore_index, reduction, label_smoothing = call.args
    chain = chain_of(of_classes(logits, target))
    _check_options(target, weight, ignore_index, label_smoothing)
    end = LossOutput(node, "loss", nodes=chain.nodes)
    options = (weight, ignore_index, reduction, float(label_smoothing))
    return Loss((end,), chain, target, False, *options)


def _nll_loss(node: fx.Node, call: Call) -> Loss:
    log_probs, target, weight, ignore_index, reduction = call.args
    way = way_of(of_classes(log_probs, target))
    if way is None or way.op != "log_softmax" or way.negative:
        raise Refused("the loss's input is not known to be log_softmax")
    _check_options(target, weight, ignore_index)
    check_users(way.nodes, {node, *way.nodes})
    chain = chain_of(way.start)
    end = LossOutput(node, "loss", nodes=(*way.nodes, *chain.nodes))
    return Loss((end,), chain, target, False, weight, ignore_index, reduction)


def of_classes(logits: Any, target: Any, tempered: bool = False) -> LogitsPath:
    """The start of the chain, for logits (N, V) with targets (N,), or (N, V, d) with (N, d)."""
    if is_tensor(logits, dim=2) and is_tensor(target, dim=1):
        return LogitsPath(logits, tempered=tempered)
    if not is_tensor(logits, dim=3) or not is_tensor(target, dim=2):
        raise Refused("the logits are not rows with one target each")
    call = canonical(logits)
    if call is None or call.op != "transpose" or call.args[1] != (-2, -1):
        raise Refused("the classes are the second dimension of the logits in memory, not the last")
    return LogitsPath(call.args[0], (logits,), by_rows=False, tempered=tempered)


def _check_options(target: Any, weight: Any, *numbers: Any) -> None:
    if value(target).is_floating_point():
        raise Refused("the target is probabilities, not the index of a class")
    if not all(isinstance(one, (int, float)) for one in numbers):
        raise Refused("an option is not known at compile time")
    if is_tensor(weight) and value(weight).requires_grad:
        raise Refused("the weight of the classes requires a gradient")


def check_users(inner: Any, matched: set[fx.Node]) -> None:
    """Raise Refused if a node of `inner` has a user that is not in `matched`."""
    for node in inner:
        for user in node.users:
            if user not in matched:
                call = canonical(node)
                is_exp = call is not None and call.op in ("exp", "softmax")
                what = "probabilities" if is_exp else "log-probabilities"
                raise Refused(f"the {what} {used_by(user)}")


def used_by(user: fx.Node) -> str:
    """How `user` uses a value: "are returned", or for example "are used by argmax too"."""
    node = user
    while (call := canonical(node)) is not None and call.op in _RETURNED_AS:
        if len(node.users) != 1:
            break
        node = next(iter(node.users))
    return "are returned" if node.op == "output" else f"are used by {user.name} too"


# Operations that a value may pass through before it is returned.
_RETURNED_AS = {"cast", "contiguous", "flatten", "slice", "view"}

_READERS = {"cross_entropy": _cross_entropy, "nll_loss": _nll_loss}
