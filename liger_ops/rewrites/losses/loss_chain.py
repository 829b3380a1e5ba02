"""Follow the input of a loss back to the logits: views, casts, scales, a softcap, a softmax."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from ...accepted import is_scale
from ..engine.canonical import Call, canonical, is_tensor, same, value
from ..engine.insertion import Refused, derive
from ..engine.maps.index_maps import COPIES, RESHAPES
from ..engine.pattern import Pattern
from ..engine.rewrite import foreign, number

NARROW = (torch.bfloat16, torch.float16)


def softcapped(logits: Tensor, softcap: float) -> Tensor:
    """Compute softcapped logits, as in Gemma 2."""
    return torch.tanh(logits / softcap) * softcap


_SOFTCAPPED = Pattern(softcapped, logits=(2, 3, 8), softcap=30.0)


@dataclass(frozen=True)
class LogitsPath:
    """A path from the input of a loss back to logits.

    Attributes:
        logits: the end of the path: followed to its end, a value that is not a cast, a scale, a
            softcap or a view of another.
        nodes: the nodes between the logits and the loss, the last first.
        by_rows: whether the loss takes rows, (N, V), so that views may change the shape of the
            positions; otherwise it takes (..., V), and no view may change that.
        slices: the nodes that select positions, in the order of the graph.
        softcap, scale: arguments of the ops.
        temperature: the number that the capped logits are divided by.
        has_temperature: whether the op has a temperature. If not, the path ends at capped logits
            that are scaled afterwards.
    """

    logits: fx.Node
    nodes: tuple[fx.Node, ...] = ()
    by_rows: bool = True
    slices: tuple[fx.Node, ...] = ()
    softcap: Any = None
    scale: float = 1.0
    temperature: float = 1.0
    has_temperature: bool = False

    def from_source(self, source: fx.Node, **changed: Any) -> LogitsPath:
        """Return the path one step further back, to `source`, from which the logits come."""
        changed.setdefault("nodes", (*self.nodes, self.logits))
        return replace(self, logits=source, **changed)


def follow_back(path: LogitsPath) -> LogitsPath:
    """Follow the path back as far as the ops support the operations on the logits."""
    check_tensor_types([path.logits])
    while (call := canonical(path.logits)) is not None:
        extended = through_view(path, call) or _through_computation(path, call)
        if extended is None:
            break
        path = extended
    return path


def through_view(path: LogitsPath, call: Call) -> LogitsPath | None:
    """Return the path past `call`, which is a view or a copy of its logits.

    Return None if `call` is something else, or separates the classes of a position.
    """
    source = call.args[0]
    if call.op in COPIES:
        return path.from_source(source)
    if call.op in RESHAPES:
        if not is_tensor(source) or value(source).dim() == 0:
            return None
        after, before = value(path.logits).shape, value(source).shape
        keeps_classes = (
            same(after[-1], before[-1]) if path.by_rows else same(tuple(after), tuple(before))
        )
        # The slices index positions in the shape after the view, so they cannot move past it.
        return path.from_source(source) if keeps_classes and not path.slices else None
    if call.op == "slice":
        if call.args[1] == -1:
            return None
        if call.through:
            # A piece of a split tensor: followed if it is the only piece, and so the whole tensor.
            if not same(tuple(value(path.logits).shape), tuple(value(source).shape)):
                return None
            return path.from_source(source, nodes=(*path.nodes, path.logits, *call.through))
        if _index(path.logits, call) is not None:
            return path.from_source(source, slices=(path.logits, *path.slices))
    return None


def _through_computation(path: LogitsPath, call: Call) -> LogitsPath | None:
    """Return the path past `call`, a cast, a scale or a softcap of its logits, or None."""
    node = path.logits
    if call.op == "cast":
        return path.from_source(call.args[0]) if widened(call.args[0], node) else None
    capped = _SOFTCAPPED.match(node)
    if capped is not None and capped.difference is None:
        nodes = (*path.nodes, *capped.nodes)
        extended = _capped(path, number(capped["softcap"]))
        return extended and replace(extended, logits=capped["logits"], nodes=nodes)
    scale = _scale(call)
    if scale is None or not (is_scale(scale) and is_scale(path.scale * scale)):
        return None
    source = next(operand for operand in call.args if is_tensor(operand))
    return path.from_source(source, scale=path.scale * scale)


def _capped(path: LogitsPath, softcap: Any) -> LogitsPath | None:
    """Return the path past a softcap, or None. A scale of the capped logits is a temperature."""
    if path.softcap is not None:
        return None
    if path.scale == 1.0:
        return replace(path, softcap=softcap)
    if not path.has_temperature:
        return None
    return replace(path, softcap=softcap, scale=1.0, temperature=1.0 / path.scale)


def same_logits(a: LogitsPath, b: LogitsPath) -> bool:
    """Return whether two paths lead to the same logits, scaled alike, of the same positions."""
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
    first, second = canonical(a), canonical(b)
    return first is not None and second is not None and same(first.args[1:], second.args[1:])


@dataclass(frozen=True)
class SoftmaxPath:
    """A path from probabilities, or from their logarithms, back to the softmax.

    Attributes:
        op: "softmax" for probabilities, or "log_softmax".
        start: the path to follow on from the input of the softmax.
        nodes: the nodes of the path, the softmax last.
        negative: whether the values are multiplied by -1 on the path.
    """

    op: str
    start: LogitsPath
    nodes: tuple[fx.Node, ...]
    negative: bool


def softmax_path(path: LogitsPath) -> SoftmaxPath | None:
    """Follow a path back to a softmax or a log_softmax over classes; return None if there is none.

    exp(log_softmax) counts as a softmax.

    Raises:
        Refused: the values are cast between the softmax and the loss.
    """
    negative = cast = is_exp = False
    while (call := canonical(path.logits)) is not None:
        source = call.args[0]
        if call.op in ("log_softmax", "softmax"):
            over_classes = call.args[1] == -1 and is_tensor(source)
            if not over_classes or not widened(source, path.logits):
                return None
            if is_exp and call.op == "softmax":
                return None
            if cast:
                # The op has them in float32, not rounded to the dtype of the cast.
                raise Refused(f"the log-probabilities are cast between {call.op} and the loss")
            path = path.from_source(source)
            op = "softmax" if is_exp else call.op
            return SoftmaxPath(op, replace(path, nodes=()), path.nodes, negative)
        if call.op == "cast" or (call.op in ("neg", "exp") and not is_exp):
            cast |= call.op == "cast"
            negative ^= call.op == "neg"
            is_exp |= call.op == "exp"
            path = path.from_source(source)
            continue
        extended = through_view(path, call)
        if extended is None:
            return None
        path = extended
    return None


def widened(source: Any, to: Any) -> bool:
    """Return whether the ops compute the same for `source` as for `to`, a cast of it.

    The ops compute in float32, and in float64 only for float64. A cast to a narrower dtype rounds,
    and a cast to float64 asks for more precision than the ops would have.
    """
    before, after = value(source).dtype, value(to).dtype
    return before == after or (before in NARROW and after == torch.float32)


def check_tensor_types(operands: Sequence[Any]) -> None:
    """Raise Refused if a tensor is a DTensor or the like, for which the loss differs."""
    if reason := foreign(operands):
        raise Refused(reason)


def _scale(call: Call) -> float | None:
    """Return the number that a call multiplies a tensor by, also by a division; or None."""
    if call.op not in ("mul", "div") or len(call.args) != 2:
        return None
    a, b = call.args
    if isinstance(b, (int, float)) and b != 0:
        return float(b) if call.op == "mul" else 1.0 / b
    return float(a) if call.op == "mul" and isinstance(a, (int, float)) else None


def select_positions(tensor: fx.Node, path: LogitsPath, at: fx.Node) -> fx.Node:
    """Return the positions of a tensor that the loss takes, before `at`.

    The leading dimensions of the tensor are those of the logits, which the hidden states have too.
    """
    for node in path.slices:
        call = canonical(node)
        assert call is not None
        tensor = derive(at, operator.getitem, tensor, _index(node, call))
    return tensor


def as_rows(tensor: fx.Node, path: LogitsPath, at: fx.Node) -> fx.Node:
    """Return the positions of a tensor that the loss takes, as a matrix if the loss takes rows."""
    tensor = select_positions(tensor, path, at)
    flattened = path.by_rows and value(tensor).dim() > 2
    return derive(at, torch.flatten, tensor, 0, -2) if flattened else tensor


def _index(slicing: fx.Node, call: Call) -> tuple[Any, ...] | None:
    """Return the index of a slicing node, with a full slice for the last dimension.

    None if a bound is a symbolic size that is no node of the graph.
    """
    if slicing.target is not operator.getitem:
        _, dim, *bounds = call.args
        known = not any(isinstance(bound, torch.SymInt) for bound in bounds)
        return (..., slice(*bounds), *[slice(None)] * (-dim - 1)) if known else None
    index = slicing.args[1]
    items = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis not in items:
        items.append(Ellipsis)
    position = items.index(Ellipsis)
    missing = value(slicing).dim() - (len(items) - 1)
    items[position : position + 1] = [slice(None)] * missing
    return (*items[:-1], slice(None))
