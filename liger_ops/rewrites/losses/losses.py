"""The losses that the ops compute, and how cross_entropy and nll_loss are read as such."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from ..engine.canonical import Call, canonical, is_tensor, value
from ..engine.rewrite import Refused
from .loss_chain import LogitsPath, chain_of, way_of

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
            only known as half of an entropy.
        chain: the way back from the input of the softmax to the logits.
        inner: the nodes between the input of the softmax and `node`.
        target: the class indices, a node or `JoinedTargets`; None if the term has none.
        negative: whether the term is multiplied by -1.
        ignore_index: the target of tokens whose value is 0, in a call of a loss function; None for
            `gather`, whose index has a last dimension of 1.
    """

    node: fx.Node
    kind: str
    chain: LogitsPath
    inner: tuple[fx.Node, ...] = ()
    target: Any = None
    negative: bool = False
    ignore_index: int | None = None

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        """The nodes between the logits and this one."""
        return (*self.inner, *self.chain.nodes)


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
    """A loss that the ops can compute: the nodes to replace, in no order, and the ops' options."""

    ends: tuple[TokenTerm, ...]
    class_weight: Any = None
    reduction: str = "none"
    label_smoothing: float = 0.0

    @property
    def node(self) -> fx.Node:
        return self.ends[0].node

    @property
    def of(self) -> TokenTerm:
        """The end that the logits and the target are taken from."""
        return next((end for end in self.ends if end.target is not None), self.ends[0])

    @property
    def chain(self) -> LogitsPath:
        return self.of.chain

    @property
    def target(self) -> Any:
        return self.of.target

    @property
    def ignore_index(self) -> int:
        return NO_CLASS if self.of.ignore_index is None else self.of.ignore_index

    @property
    def nodes(self) -> set[fx.Node]:
        """The nodes that compute the loss from the logits."""
        return {node for end in self.ends for node in (end.node, *end.nodes)}


def losses(graph: fx.Graph) -> list[fx.Node]:
    """The calls of loss functions."""
    return [
        node
        for node in graph.nodes
        if (call := canonical(node)) is not None and call.op in FUNCTIONS
    ]


def read(node: fx.Node) -> Loss:
    """The loss that `node` computes; raises Refused if the ops do not support it."""
    call = canonical(node)
    assert call is not None
    end = called(node, call)
    _, target, weight, ignore_index, reduction, *smoothing = call.args
    if value(target).is_floating_point():
        raise Refused("the target is probabilities, not the index of a class")
    if not all(isinstance(one, (int, float)) for one in (ignore_index, *smoothing)):
        raise Refused("an option is not known at compile time")
    if is_tensor(weight) and value(weight).requires_grad:
        raise Refused("the weight of the classes requires a gradient")
    check_users(end.inner, {node, *end.inner})
    return Loss((end,), weight, reduction, *map(float, smoothing))


def called(node: fx.Node, call: Call, tempered: bool = False) -> TokenTerm:
    """The loss of a call of a loss function; raises Refused if its input is not that of the ops."""
    logits, target, _, ignore_index, *_ = call.args
    inner: tuple[fx.Node, ...] = ()
    start = of_classes(logits, target, tempered)
    if call.op == "nll_loss":
        way = way_of(start)
        if way is None or way.op != "log_softmax" or way.negative:
            raise Refused("the loss's input is not known to be log_softmax")
        start, inner = way.start, way.nodes
    return TokenTerm(node, "loss", chain_of(start), inner, target, ignore_index=ignore_index)


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
