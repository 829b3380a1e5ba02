"""Find the cross-entropy losses of a graph, in each form in which they are written.

The forms are cross_entropy; nll_loss of log_softmax; and per token, `gather` of log_softmax or of
the logits, together with their logsumexp. What is computed from the losses of tokens afterwards, a
mask or a mean, does not change.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from torch import fx

from .canonical import Call, canonical, is_tensor, same, value
from .loss_chain import Chain, chain_of, moved, widened
from .rewrite import Refused

# An ignore_index that no target has, because `gather` does not ignore any.
NO_CLASS = -(2**31)


@dataclass(frozen=True)
class End:
    """A node whose value is a loss, or a part of one.

    Attributes:
        node: the node.
        part: "loss", with its reduction; or, per token: "log_prob" of the target, "total", which is
            the sum of the log-probabilities of all classes, "lse" or "target_logit".
        negative: whether the part is multiplied by -1.
    """

    node: fx.Node
    part: str
    negative: bool = False


@dataclass(frozen=True)
class Loss:
    """A loss that the ops can compute.

    Attributes:
        ends: the nodes to replace, in no order.
        chain: the way back from the ends to the logits.
        target: the class indices; with a last dimension of 1 if the ends are per token.
        The others are arguments of the ops.
    """

    ends: tuple[End, ...]
    chain: Chain
    target: fx.Node
    class_weight: Any = None
    ignore_index: int = NO_CLASS
    reduction: str = "none"
    label_smoothing: float = 0.0

    @property
    def node(self) -> fx.Node:
        return self.ends[0].node

    @property
    def options(self) -> tuple[Any, ...]:
        """The last arguments of both ops, from class_weight to logit_scale."""
        options = (self.ignore_index, self.reduction, self.label_smoothing)
        return self.class_weight, None, None, *options, 0.0, self.chain.softcap, self.chain.scale


def losses(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that may be the last node of a loss."""
    return [
        node
        for node in graph.nodes
        if (call := canonical(node)) is not None and call.op in _READERS
    ]


def read(node: fx.Node) -> Loss | None:
    """The loss that `node` computes, or None; raises Refused if the ops do not support it."""
    call = canonical(node)
    assert call is not None
    return _READERS[call.op](node, call)


def _cross_entropy(node: fx.Node, call: Call) -> Loss:
    logits, target, weight, ignore_index, reduction, label_smoothing = call.args
    chain = chain_of(_of_classes(logits, target))
    _check_options(target, weight, ignore_index, label_smoothing)
    return Loss(
        (End(node, "loss"),),
        chain,
        target,
        weight,
        ignore_index,
        reduction,
        float(label_smoothing),
    )


def _nll_loss(node: fx.Node, call: Call) -> Loss:
    log_probs, target, weight, ignore_index, reduction = call.args
    way = _to_log_softmax(_of_classes(log_probs, target))
    if way is None or way.negative:
        raise Refused("the loss's input is not known to be log_softmax")
    _check_options(target, weight, ignore_index)
    _check_users(way, [node])
    end, chain = End(node, "loss"), chain_of(way.chain)
    return Loss((end,), chain, target, weight, ignore_index, reduction)


def _of_classes(logits: Any, target: Any) -> Chain:
    """The start of the chain, for logits (N, V) with targets (N,), or (N, V, d) with (N, d)."""
    if is_tensor(logits, dim=2) and is_tensor(target, dim=1):
        return Chain(logits)
    if not is_tensor(logits, dim=3) or not is_tensor(target, dim=2):
        raise Refused("the logits are not rows with one target each")
    call = canonical(logits)
    if call is None or call.op != "transpose" or call.args[1] != (-2, -1):
        raise Refused("the classes are the second dimension of the logits in memory, not the last")
    return Chain(call.args[0], (logits,), by_rows=False)


def _check_options(target: Any, weight: Any, *numbers: Any) -> None:
    if value(target).is_floating_point():
        raise Refused("the target is probabilities, not the index of a class")
    if not all(isinstance(one, (int, float)) for one in numbers):
        raise Refused("an option is not known at compile time")
    if is_tensor(weight) and value(weight).requires_grad:
        raise Refused("the weight of the classes requires a gradient")


@dataclass(frozen=True)
class _Way:
    """The nodes from log-probabilities back to their log_softmax, which is the last of `nodes`."""

    chain: Chain
    nodes: tuple[fx.Node, ...]
    negative: bool


def _to_log_softmax(chain: Chain) -> _Way | None:
    """Follow the chain to a log_softmax; the result's chain has the logits of that."""
    negative = cast = False
    while (call := canonical(chain.logits)) is not None:
        source = call.args[0]
        if call.op == "log_softmax":
            if call.args[1] != -1 or not is_tensor(source) or not widened(source, chain.logits):
                return None
            if cast:
                # The op has them in float32, not rounded to the dtype of the cast.
                raise Refused("the log-probabilities are cast between log_softmax and the loss")
            chain = chain.from_source(source)
            return _Way(chain, chain.nodes, negative)
        if call.op in ("cast", "neg"):
            cast |= call.op == "cast"
            negative ^= call.op == "neg"
            chain = chain.from_source(source)
            continue
        further = moved(chain, call)
        if further is None:
            return None
        chain = further
    return None


def _check_users(way: _Way, ends: Collection[fx.Node]) -> None:
    for node in way.nodes:
        for user in node.users:
            if user not in way.nodes and user not in ends:
                raise Refused(f"the log-probabilities {used_by(user)}")


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


def _gather(node: fx.Node, call: Call) -> Loss | None:
    values, dim, index = call.args
    if not is_tensor(values) or not is_tensor(index) or value(values).dim() < 2 or dim != -1:
        return None
    start = Chain(values, by_rows=value(values).dim() == 2)
    way = _to_log_softmax(start)
    beside = [user for user in values.users if user is not node]
    if way is None:
        sums = [user for user in beside if _is(user, "logsumexp", values)]
        if not sums:
            return None
        ends = (End(node, "target_logit"), *(End(one, "lse") for one in sums))
        chain = chain_of(start)
    else:
        totals = [user for user in beside if _is(user, "sum", values)]
        ends = (
            End(node, "log_prob", way.negative),
            *(End(one, "total", way.negative) for one in totals),
        )
        chain = chain_of(way.chain)
    if any(_is(user, "gather", values) for user in beside):
        raise Refused("each token has several targets, taken one by one")
    if not same(tuple(value(index).shape), (*value(values).shape[:-1], 1)):
        raise Refused("the targets are not one for each position")
    if len({end.part for end in ends}) < len(ends):
        # One tensor would replace two, which makes a difference if either is written.
        raise Refused("a part of the loss is computed twice")
    if way is not None:
        _check_users(way, [end.node for end in ends])
    return Loss(ends, chain, index)


def _is(node: fx.Node, op: str, of: fx.Node) -> bool:
    """Whether `node` calls `op` on `of` along the last dimension."""
    call = canonical(node)
    if call is None or call.op != op or call.args[0] is not of:
        return False
    return call.args[1] in (-1, (-1,))


_READERS = {"cross_entropy": _cross_entropy, "nll_loss": _nll_loss, "gather": _gather}
