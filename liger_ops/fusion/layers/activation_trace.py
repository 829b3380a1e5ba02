"""Recognise the op of a gated activation with the patterns of the backend's rewrites."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ...rewrites.engine.canonical import calls, value
from ...rewrites.engine.recognise import Recognised, recognise
from ...rewrites.engine.rewrite import Refused, before_widening
from ..probing import NotAnOp, dtype_name

REWRITES = ("swiglu", "geglu", "clamped_swiglu", "relu_squared")

USUAL = (torch.bfloat16, torch.float32, torch.float16)


@dataclass(frozen=True)
class Activation:
    """An op, its options, and which of two projections, or halves of one, is the gate."""

    op: str
    options: tuple[tuple[str, Any], ...] = ()
    gate_first: bool = True


# Returns the graph of an activation for a dtype and a training mode. The projections are among its
# inputs, by name.
Traced = Callable[[torch.dtype, bool], fx.GraphModule]


def find(traced: Traced, projections: Sequence[str]) -> tuple[Activation, tuple[torch.dtype, ...]]:
    """Find the op that the graphs of `traced` compute from `projections`, one packed or two, and
    the dtypes in which they do.

    It must be the same in bfloat16, float16 and float32, in training and in evaluation.

    Raises:
        NotAnOp: it is not an op; the text gives the reason.
    """
    activation = _recognised(traced(torch.bfloat16, False), projections, REWRITES)
    # swiglu of interleaved halves is clamped_swiglu without a limit.
    rewrites = ("swiglu", "clamped_swiglu") if "clamped" in activation.op else (activation.op,)
    for dtype in USUAL:
        try:
            found = _recognised(traced(dtype, True), projections, rewrites)
        except NotAnOp as reason:
            if dtype is torch.bfloat16:
                raise NotAnOp(
                    f"it is {activation.op} in evaluation, and something else in training"
                ) from None
            raise NotAnOp(f"{reason} ({dtype_name(dtype)})") from None
        if found != activation:
            raise NotAnOp(f"it is {activation.op}, and something else in {dtype_name(dtype)}")
    wide = torch.float64
    with contextlib.suppress(NotAnOp):
        modes = [_recognised(traced(wide, mode), projections, rewrites) for mode in (True, False)]
        if modes == [activation, activation]:
            return activation, (*USUAL, wide)
    return activation, USUAL


def _recognised(
    module: fx.GraphModule, projections: Sequence[str], rewrites: Sequence[str]
) -> Activation:
    (output,) = (node for node in module.graph.nodes if node.op == "output")
    given = next(node for node in module.graph.nodes if node.target == projections[0])
    y, dtype = value(output.args[0]), value(given).dtype
    if y.dtype is not dtype:
        raise NotAnOp(f"it returns {dtype_name(y.dtype)} for projections of {dtype_name(dtype)}")
    try:
        found = recognise(module, rewrites)
    except Refused as reason:
        raise NotAnOp(str(reason)) from None
    if found.op == "relu_squared":
        return _of(found, [found.arguments["x"]], projections, {})
    gate, up = (before_widening(found.arguments[name]) for name in ("gate", "up"))
    options = {name: one for name, one in found.arguments.items() if name not in ("gate", "up")}
    if len(projections) == 2:
        return _of(found, [gate, up], projections, options)
    packed, is_interleaved, gate_first = _packed(found, gate, up)
    if is_interleaved and found.op == "swiglu" and options["gate_multiplier"] == 1.0:
        found = Recognised("clamped_swiglu", {}, found.result)
        options = {"alpha": 1.0, "limit": math.inf, "up_offset": 0.0}
    if is_interleaved and found.op != "clamped_swiglu":
        raise NotAnOp(f"it is {found.op} of neighbours, which the op does not take in one tensor")
    if found.op == "clamped_swiglu":
        options["interleaved"] = is_interleaved
    return _of(found, [packed], projections, options, gate_first)


def _of(
    found: Recognised, given: Sequence[Any], projections: Sequence[str], options: dict[str, Any],
    gate_first: bool = True,
) -> Activation:  # fmt: skip
    """The recognised op, whose inputs have to be the projections themselves."""
    names = [getattr(node, "target", None) for node in given]
    if sorted(map(str, names)) != sorted(projections):
        raise NotAnOp(f"it is {found.op}, and of other tensors than the projections")
    if options == {"gate_multiplier": 1.0, "down_multiplier": 1.0}:
        options = {}
    return Activation(found.op, tuple(options.items()), gate_first and names[0] == projections[0])


def _packed(found: Recognised, gate: Any, up: Any) -> tuple[Any, bool, bool]:
    """The tensor that gate and up are parts of, whether they are interleaved in it, and whether the
    gate is first."""
    first, second = calls(gate, "slice"), calls(up, "slice")
    if first is not None and second is not None and first.args[0] is second.args[0]:
        packed = first.args[0]
        width = value(packed).shape[-1]
        parts = first.args[1:], second.args[1:]
        halves = (-1, 0, width // 2, 1), (-1, width // 2, width, 1)
        if parts in (halves, halves[::-1]):
            return packed, False, parts == halves
        if parts == ((-1, 0, width, 2), (-1, 1, width, 2)):
            return packed, True, True
    raise NotAnOp(f"it is {found.op}, and of other parts of its projection than gate and up")
