"""From a cross-entropy back to the logits that it is of."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from .canonical import IDENTITY, Call, canonical, is_tensor, same, value
from .graph_state import GraphState
from .pattern import Pattern
from .rewrite import Refused, derive, foreign, number


def softcapped(logits: Tensor, softcap: float) -> Tensor:
    return torch.tanh(logits / softcap) * softcap


_SOFTCAPPED = Pattern(softcapped, logits=(2, 3, 8), softcap=30.0)


@dataclass(frozen=True)
class Chain:
    """Logits, and what lies between them and their loss.

    Attributes:
        logits: the first value that is not a cast, a scale, a softcap or a view of another.
        nodes: the nodes from there to the loss, both included.
        slices: the nodes that take some of the positions, in the order in which they do.
        softcap, scale: as the ops take them.
    """

    logits: fx.Node
    nodes: tuple[fx.Node, ...]
    slices: tuple[fx.Node, ...] = ()
    softcap: Any = None
    scale: float = 1.0


@dataclass(frozen=True)
class Loss:
    """A call of torch.nn.functional.cross_entropy that the ops can compute."""

    node: fx.Node
    chain: Chain
    target: fx.Node
    class_weight: Any
    ignore_index: int
    reduction: str
    label_smoothing: float

    @property
    def options(self) -> tuple[Any, ...]:
        """What both ops take last, from the weight of classes to the scale of logits."""
        options = (self.ignore_index, self.reduction, self.label_smoothing)
        return self.class_weight, None, None, *options, 0.0, self.chain.softcap, self.chain.scale


def losses(graph: fx.Graph) -> list[fx.Node]:
    return [
        node
        for node in graph.nodes
        if (call := canonical(node)) is not None and call.op == "cross_entropy"
    ]


def read(node: fx.Node) -> Loss:
    """What a cross-entropy is of; Refused where the ops have no such."""
    call = canonical(node)
    assert call is not None
    logits, target, weight, ignore_index, reduction, label_smoothing = call.args
    if not is_tensor(logits, dim=2) or not is_tensor(target, dim=1):
        raise Refused("the logits are not rows, of one target each")
    if value(target).is_floating_point():
        raise Refused("the target is probabilities, not the index of a class")
    if not all(isinstance(one, (int, float)) for one in (ignore_index, label_smoothing)):
        raise Refused("an option is not known while the graph is compiled")
    return Loss(
        node,
        _chain(logits, node),
        target,
        weight,
        ignore_index,
        reduction,
        float(label_smoothing),
    )


def _chain(logits: fx.Node, loss: fx.Node) -> Chain:
    vocabulary = value(logits).shape[-1]
    chain = Chain(logits, (loss,))
    while True:
        node = chain.logits
        call = canonical(node)
        if call is None:
            return chain
        further = _further(node, call, chain, vocabulary)
        if further is None:
            return chain
        chain = further


def _further(node: fx.Node, call: Call, chain: Chain, vocabulary: Any) -> Chain | None:
    """The chain with `node` in it, and what that is made from for its logits."""
    source = call.args[0]
    passed = (*chain.nodes, node)
    if call.op in (IDENTITY, "contiguous"):
        return replace(chain, logits=source, nodes=passed)
    if call.op == "cast":
        wide = value(node).dtype in (torch.float32, torch.float64)
        return replace(chain, logits=source, nodes=passed) if wide else None
    if call.op in ("view", "flatten"):
        rows = same(value(node).shape[-1], vocabulary) and same(value(source).shape[-1], vocabulary)
        # What is taken of the positions is known of the logits as they were before.
        return replace(chain, logits=source, nodes=passed) if rows and not chain.slices else None
    if call.op == "slice":
        if call.args[1] == -1 or call.through:
            return None
        return replace(chain, logits=source, nodes=passed, slices=(node, *chain.slices))
    capped = _SOFTCAPPED.match(node)
    if capped is not None and capped.difference is None:
        if chain.softcap is not None or chain.scale != 1.0:
            return None
        nodes = (*chain.nodes, *capped.nodes)
        return replace(
            chain, logits=capped["logits"], nodes=nodes, softcap=number(capped["softcap"])
        )
    scale = _scale(call)
    if scale is None or scale <= 0:
        return None
    source = next(one for one in call.args if is_tensor(one))
    return replace(chain, logits=source, nodes=passed, scale=chain.scale * scale)


def _scale(call: Call) -> float | None:
    if call.op not in ("mul", "div") or len(call.args) != 2:
        return None
    a, b = call.args
    if isinstance(b, (int, float)) and b != 0:
        return float(b) if call.op == "mul" else 1.0 / b
    return float(a) if call.op == "mul" and isinstance(a, (int, float)) else None


def positions(of: fx.Node, chain: Chain, at: fx.Node) -> fx.Node:
    """The rows of `of`, which has the logits' positions, that the loss takes, before `at`."""
    for node in chain.slices:
        of = derive(at, operator.getitem, of, _index(node))
    return derive(at, torch.flatten, of, 0, -2) if value(of).dim() > 2 else of


def _index(taking: fx.Node) -> tuple[Any, ...]:
    """The index of a node that takes of the positions, with the whole of the last dimension."""
    index = taking.args[1]
    parts = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis not in parts:
        parts.append(Ellipsis)
    place = parts.index(Ellipsis)
    missing = value(taking).dim() - (len(parts) - 1)
    parts[place : place + 1] = [slice(None)] * missing
    return (*parts[:-1], slice(None))


def check_place(
    loss: Loss, nodes: Sequence[fx.Node], inputs: Sequence[fx.Node], of: str, state: GraphState
) -> None:
    """Raise Refused where an op in the place of `nodes`, the loss and what leads to it, would not
    see what they do; `of` names what the loss is of."""
    if reason := foreign([*inputs, loss.target]):
        raise Refused(reason)
    if state.transformed(loss.node):
        raise Refused("it is computed inside of a transform of functions, such as vmap")
    if not state.one_mode(nodes):
        raise Refused(f"the loss and its {of} are computed in different autocast modes")
    first = min(nodes, key=state.order.__getitem__)
    computed = [node for node in nodes if node is not loss.node]
    if state.written([*computed, *inputs, loss.target], first, loss.node):
        raise Refused(f"a tensor is written in place between the {of} and the loss")


def outside_user(nodes: Sequence[fx.Node]) -> fx.Node | None:
    """Something else that uses what lies between the logits and the loss, the first of `nodes`."""
    return next(
        (user for node in nodes[1:] for user in node.users if user not in nodes),
        None,
    )
