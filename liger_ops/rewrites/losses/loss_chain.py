"""Follow the input of a loss back to the logits: views, casts, scales, a softcap, a softmax."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from ...accepted import is_scale
from ..engine.canonical import IDENTITY, Call, canonical, is_tensor, same, value
from ..engine.pattern import Pattern
from ..engine.rewrite import Refused, derive, foreign, number

NARROW = (torch.bfloat16, torch.float16)


def softcapped(logits: Tensor, softcap: float) -> Tensor:
    return torch.tanh(logits / softcap) * softcap


_SOFTCAPPED = Pattern(softcapped, logits=(2, 3, 8), softcap=30.0)


@dataclass(frozen=True)
class LogitsPath:
    """Logits, and the nodes between them and their loss.

    Attributes:
        logits: the first value that is not a cast, a scale, a softcap or a view of another.
        nodes: the nodes between the logits and the loss, the last first.
        by_rows: whether the loss takes rows, (N, V), so that views may change the shape of the
            positions; otherwise it takes (..., V), and no view may change that.
        slices: the nodes that select positions, in the order of the graph.
        softcap, scale: arguments of the ops.
        temperature: what the capped logits are divided by.
        tempered: whether the op has a temperature. If not, the chain ends at capped logits that are
            scaled afterwards.
    """

    logits: fx.Node
    nodes: tuple[fx.Node, ...] = ()
    by_rows: bool = True
    slices: tuple[fx.Node, ...] = ()
    softcap: Any = None
    scale: float = 1.0
    temperature: float = 1.0
    tempered: bool = False

    def from_source(self, source: fx.Node, **changed: Any) -> LogitsPath:
        """The chain one step further back: `source`, from which the logits are computed."""
        changed.setdefault("nodes", (*self.nodes, self.logits))
        return replace(self, logits=source, **changed)


def chain_of(chain: LogitsPath) -> LogitsPath:
    """The chain, followed back as far as the ops support what is done to the logits."""
    check_kinds([chain.logits])
    while (call := canonical(chain.logits)) is not None:
        further = moved(chain, call) or _computed(chain, call)
        if further is None:
            break
        chain = further
    return chain


def moved(chain: LogitsPath, call: Call) -> LogitsPath | None:
    """The chain past `call`, a view or a copy of its logits.

    None if `call` is something else, or separates the classes of a position.
    """
    source = call.args[0]
    if call.op in (IDENTITY, "contiguous"):
        return chain.from_source(source)
    if call.op in ("view", "flatten", "squeeze", "unsqueeze"):
        if not is_tensor(source) or value(source).dim() == 0:
            return None
        now, before = value(chain.logits).shape, value(source).shape
        kept = same(now[-1], before[-1]) if chain.by_rows else same(tuple(now), tuple(before))
        # The slices index positions in the shape after the view, so they cannot move past it.
        return chain.from_source(source) if kept and not chain.slices else None
    if call.op == "slice":
        if call.args[1] == -1:
            return None
        if call.through:
            # A piece of a split tensor: followed if it is the only one, and so the whole.
            if not same(tuple(value(chain.logits).shape), tuple(value(source).shape)):
                return None
            return chain.from_source(source, nodes=(*chain.nodes, chain.logits, *call.through))
        return chain.from_source(source, slices=(chain.logits, *chain.slices))
    return None


def _computed(chain: LogitsPath, call: Call) -> LogitsPath | None:
    """The chain past `call`, a cast, a scale or a softcap of its logits, or None."""
    node = chain.logits
    if call.op == "cast":
        return chain.from_source(call.args[0]) if widened(call.args[0], node) else None
    capped = _SOFTCAPPED.match(node)
    if capped is not None and capped.difference is None:
        nodes = (*chain.nodes, *capped.nodes)
        further = _capped(chain, number(capped["softcap"]))
        return further and replace(further, logits=capped["logits"], nodes=nodes)
    scale = _scale(call)
    if scale is None or not (is_scale(scale) and is_scale(chain.scale * scale)):
        return None
    source = next(one for one in call.args if is_tensor(one))
    return chain.from_source(source, scale=chain.scale * scale)


def _capped(chain: LogitsPath, softcap: Any) -> LogitsPath | None:
    """The chain past a softcap. What scales the capped logits is a temperature."""
    if chain.softcap is not None:
        return None
    if chain.scale == 1.0:
        return replace(chain, softcap=softcap)
    if not chain.tempered:
        return None
    return replace(chain, softcap=softcap, scale=1.0, temperature=1.0 / chain.scale)


def alike(a: LogitsPath, b: LogitsPath) -> bool:
    """Whether two chains lead to the same logits, of the same positions."""
    return (
        a.logits is b.logits
        and (a.scale, a.temperature) == (b.scale, b.temperature)
        and same(a.softcap, b.softcap)
        and len(a.slices) == len(b.slices)
        and all(_same_slice(x, y) for x, y in zip(a.slices, b.slices, strict=True))
    )


def _same_slice(a: fx.Node, b: fx.Node) -> bool:
    if a is b:
        return True
    one, other = canonical(a), canonical(b)
    return one is not None and other is not None and same(one.args[1:], other.args[1:])


@dataclass(frozen=True)
class SoftmaxPath:
    """The way from probabilities, or from their logarithms, back to the softmax.

    Attributes:
        op: "softmax" for probabilities, or "log_softmax".
        start: the chain at the input of the softmax.
        nodes: the nodes on the way, the softmax last.
        negative: whether the values are multiplied by -1 on the way.
    """

    op: str
    start: LogitsPath
    nodes: tuple[fx.Node, ...]
    negative: bool


def way_of(chain: LogitsPath) -> SoftmaxPath | None:
    """Follow the chain to a softmax or a log_softmax over classes.

    Raises Refused if the values are cast on the way.
    """
    negative = cast = is_exp = False
    while (call := canonical(chain.logits)) is not None:
        source = call.args[0]
        if call.op in ("log_softmax", "softmax"):
            over_classes = call.args[1] == -1 and is_tensor(source)
            if not over_classes or not widened(source, chain.logits):
                return None
            if is_exp and call.op == "softmax":
                return None
            if cast:
                # The op has them in float32, not rounded to the dtype of the cast.
                raise Refused(f"the log-probabilities are cast between {call.op} and the loss")
            chain = chain.from_source(source)
            op = "softmax" if is_exp else call.op
            return SoftmaxPath(op, replace(chain, nodes=()), chain.nodes, negative)
        if call.op == "cast" or (call.op in ("neg", "exp") and not is_exp):
            cast |= call.op == "cast"
            negative ^= call.op == "neg"
            is_exp |= call.op == "exp"
            chain = chain.from_source(source)
            continue
        further = moved(chain, call)
        if further is None:
            return None
        chain = further
    return None


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


def positions(of: fx.Node, chain: LogitsPath, at: fx.Node) -> fx.Node:
    """The positions of `of` that the loss takes, before `at`; `of` has the logits' shape."""
    for node in chain.slices:
        of = derive(at, operator.getitem, of, _index(node))
    return of


def rows(of: fx.Node, chain: LogitsPath, at: fx.Node) -> fx.Node:
    """`positions`, as a matrix if the loss takes rows."""
    of = positions(of, chain, at)
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
