"""Follow the input of a loss back to the logits."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from .canonical import IDENTITY, Call, canonical, is_tensor, same, value
from .pattern import Pattern
from .rewrite import Refused, derive, foreign, number

NARROW = (torch.bfloat16, torch.float16)


def softcapped(logits: Tensor, softcap: float) -> Tensor:
    return torch.tanh(logits / softcap) * softcap


_SOFTCAPPED = Pattern(softcapped, logits=(2, 3, 8), softcap=30.0)


@dataclass(frozen=True)
class Chain:
    """Logits, and the nodes between them and their loss.

    Attributes:
        logits: the first value that is not a cast, a scale, a softcap or a view of another.
        nodes: the nodes between the logits and the loss, the last first.
        by_rows: whether the loss takes rows, (N, V), so that views may change the shape of the
            positions; otherwise it takes (..., V), and no view may change that.
        slices: the nodes that select positions, in the order of the graph.
        softcap, scale: arguments of the ops.
    """

    logits: fx.Node
    nodes: tuple[fx.Node, ...] = ()
    by_rows: bool = True
    slices: tuple[fx.Node, ...] = ()
    softcap: Any = None
    scale: float = 1.0

    def from_source(self, source: fx.Node, **changed: Any) -> Chain:
        """The chain one step further back: `source`, from which the logits are computed."""
        changed.setdefault("nodes", (*self.nodes, self.logits))
        return replace(self, logits=source, **changed)


def chain_of(chain: Chain) -> Chain:
    """The chain, followed back as far as the ops support what is done to the logits."""
    check_kinds([chain.logits])
    while (call := canonical(chain.logits)) is not None:
        further = moved(chain, call) or _computed(chain, call)
        if further is None:
            break
        chain = further
    return chain


def moved(chain: Chain, call: Call) -> Chain | None:
    """The chain past `call`, a view or a copy of its logits.

    None if `call` is something else, or separates the classes of a position.
    """
    source = call.args[0]
    if call.op in (IDENTITY, "contiguous"):
        return chain.from_source(source)
    if call.op in ("view", "flatten"):
        if not is_tensor(source) or value(source).dim() == 0:
            return None
        now, before = value(chain.logits).shape, value(source).shape
        kept = same(now[-1], before[-1]) if chain.by_rows else same(tuple(now), tuple(before))
        # The slices index positions in the shape after the view, so they cannot move past it.
        return chain.from_source(source) if kept and not chain.slices else None
    if call.op == "slice":
        if call.args[1] == -1 or call.through:
            return None
        return chain.from_source(source, slices=(chain.logits, *chain.slices))
    return None


def _computed(chain: Chain, call: Call) -> Chain | None:
    """The chain past `call`, a cast, a scale or a softcap of its logits, or None."""
    node = chain.logits
    if call.op == "cast":
        return chain.from_source(call.args[0]) if widened(call.args[0], node) else None
    capped = _SOFTCAPPED.match(node)
    if capped is not None and capped.difference is None:
        if chain.softcap is not None or chain.scale != 1.0:
            return None
        nodes = (*chain.nodes, *capped.nodes)
        return chain.from_source(capped["logits"], nodes=nodes, softcap=number(capped["softcap"]))
    scale = _scale(call)
    if scale is None or scale <= 0:
        return None
    source = next(one for one in call.args if is_tensor(one))
    return chain.from_source(source, scale=chain.scale * scale)


def widened(source: Any, to: Any) -> bool:
    """Whether the ops compute the same for `source` as for `to`, a cast of it.

    The ops compute in float32, and in float64 only for float64. A cast to a narrower dtype rounds,
    and a cast to float64 asks for more precision than the ops would have.
    """
    before, after = value(source).dtype, value(to).dtype
    return before == after or (before in NARROW and after == torch.float32)


def check_kinds(operands: Sequence[Any]) -> None:
    """Raise Refused if a tensor is a DTensor or the like, for which the loss differs."""
    if reason := foreign(operands):
        raise Refused(reason)


def _scale(call: Call) -> float | None:
    if call.op not in ("mul", "div") or len(call.args) != 2:
        return None
    a, b = call.args
    if isinstance(b, (int, float)) and b != 0:
        return float(b) if call.op == "mul" else 1.0 / b
    return float(a) if call.op == "mul" and isinstance(a, (int, float)) else None


def positions(of: fx.Node, chain: Chain, at: fx.Node) -> fx.Node:
    """The positions of `of` that the loss takes, before `at`; `of` has the logits' shape."""
    for node in chain.slices:
        of = derive(at, operator.getitem, of, _index(node))
    flattened = chain.by_rows and value(of).dim() > 2
    return derive(at, torch.flatten, of, 0, -2) if flattened else of


def _index(taking: fx.Node) -> tuple[Any, ...]:
    """The index of a slicing node, with a full slice for the last dimension."""
    index = taking.args[1]
    parts = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis not in parts:
        parts.append(Ellipsis)
    place = parts.index(Ellipsis)
    missing = value(taking).dim() - (len(parts) - 1)
    parts[place : place + 1] = [slice(None)] * missing
    return (*parts[:-1], slice(None))
