"""Which op a gated activation is, found by comparing what it makes of chosen projections."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import library
from .probing import NotAnOp, dtype_name, first_line, uniform

# Of float32 against the definition, relative to |gate * up|: one unit in the last place for each of
# a few operations.
FLOAT32_BOUND = 4e-6

# Magnitudes of the projections. The last is where functions differ that agree near zero, such as
# one that is clamped, and where the exponential of a sigmoid overflows.
SCALES = (1.0, 8.0, 0.0, 0.05, 100.0, 1e4)

# What an activation makes of projections, in evaluation mode or in training.
Run = Callable[[Sequence[Tensor], bool], Tensor]


@dataclass(frozen=True)
class Activation:
    """An op and options, and which of two projections is the gate."""

    op: str
    options: tuple[tuple[str, Any], ...] = ()
    gate_first: bool = True

    def __call__(self, projections: Sequence[Tensor]) -> Tensor:
        """The op's definition."""
        ordered = projections if self.gate_first else projections[::-1]
        return library.OPS[self.op].definition(*ordered, **dict(self.options))


def find(run: Run, widths: Sequence[int], numbers: Sequence[float]) -> Activation:
    """Find the op that `run` computes.

    It is given projections, one packed or a gate and an up, and compared with the definitions of
    swiglu, geglu, clamped_swiglu and relu_squared: in float32 the values, on numbers of usual,
    tiny and huge size and on zeros, in evaluation and in training, and the gradients; in bfloat16
    and float16 the values, within the roundings of code that rounds after every operation.

    Args:
        run: the activation.
        widths: of the projections, one or two.
        numbers: what the module's code may use: its attributes that are numbers.

    Raises:
        NotAnOp: no op computes the same; the text gives the reason.
    """
    sizes = [*SCALES, *(2 * abs(number) for number in numbers)]
    projections = _projections(widths, sizes, torch.float32)
    y = run(projections, False)
    for activation in _candidates(len(widths), numbers):
        expected = activation(projections)
        if y.shape == expected.shape and _agree(y, expected, projections):
            break
    else:
        raise NotAnOp(
            "it computes none of swiglu, geglu, clamped_swiglu and relu_squared in float32"
        )
    if not _agree(run(projections, True), expected, projections):
        raise NotAnOp(f"it is {activation.op} in evaluation, and something else in training")
    _compare_gradients(run, activation, widths)
    for dtype in (torch.bfloat16, torch.float16):
        _compare_roundings(run, activation, _projections(widths, (1.0, 8.0, 0.0, 0.05), dtype))
    return activation


def _candidates(count: int, numbers: Sequence[float]) -> Iterator[Activation]:
    """The simplest first."""
    orders = (True,) if count == 1 else (True, False)
    options: tuple[tuple[str, Any], ...]
    if count == 1:
        yield Activation("relu_squared")
    for gate_first in orders:
        yield Activation("swiglu", (), gate_first)
        for approximate in ("tanh", "none"):
            yield Activation("geglu", (("approximate", approximate),), gate_first)
    for gate_first in orders:
        for gate in (1.0, *numbers):
            for down in (1.0, *numbers):
                options = (("gate_multiplier", gate), ("down_multiplier", down))
                yield Activation("swiglu", options, gate_first)
        limits = [number for number in (math.inf, *numbers) if number >= 0]
        for interleaved in (False, True) if count == 1 else (False,):
            for alpha in (1.0, 1.702, *numbers):
                for limit in limits:
                    for up_offset in (0.0, 1.0):
                        options = (
                            ("alpha", alpha),
                            ("limit", limit),
                            ("up_offset", up_offset),
                            ("interleaved", interleaved),
                        )
                        yield Activation("clamped_swiglu", options, gate_first)


def _agree(y: Tensor, expected: Tensor, projections: Sequence[Tensor]) -> bool:
    bound = FLOAT32_BOUND * (1 + expected.abs() + _product(projections, expected))
    return bool(((y - expected).abs() <= bound).all())


def _product(projections: Sequence[Tensor], y: Tensor) -> Tensor:
    """The largest that gate * up may be, for each element of y."""
    if len(projections) == 2:
        return (projections[0] * projections[1]).abs()
    if projections[0].shape == y.shape:
        return projections[0].square()
    halves = projections[0].chunk(2, -1)
    pairs = projections[0][..., ::2], projections[0][..., 1::2]
    return torch.maximum((halves[0] * halves[1]).abs(), (pairs[0] * pairs[1]).abs())


def _compare_gradients(run: Run, activation: Activation, widths: Sequence[int]) -> None:
    with torch.enable_grad():
        leaves = [
            projection.requires_grad_()
            for projection in _projections(widths, (1.0, 8.0, 0.05), torch.float32)
        ]
        expected_y = activation(leaves)
        dy = uniform(expected_y.shape, seed=5)
        expected = torch.autograd.grad(expected_y, leaves, dy)
        try:
            found = torch.autograd.grad(run(leaves, True), leaves, dy)
        except RuntimeError as error:
            raise NotAnOp(f"its gradient cannot be taken: {first_line(error)}") from None
    for ours, theirs in zip(expected, found, strict=True):
        # Slopes are of order 1, and their factors, the other projection and alpha, of order 10.
        if not ((ours - theirs).abs() <= 1e-4 * (1 + ours.abs())).all():
            raise NotAnOp(f"it has the values of {activation.op} but another gradient")


def _compare_roundings(run: Run, activation: Activation, projections: Sequence[Tensor]) -> None:
    """Hold the values to those of code that rounds the projections, the activation and the result.

    A rounding changes a number by half an eps of it at most, and two are allowed to each: what
    the roundings of the projections make of the result is to first order its gradient.
    """
    dtype = projections[0].dtype
    y = run(projections, False)
    if y.dtype is not dtype:
        raise NotAnOp(f"it returns {dtype_name(y.dtype)} for projections of {dtype_name(dtype)}")
    with torch.enable_grad():
        exact = [projection.double().requires_grad_() for projection in projections]
        expected = activation(exact)
        gradients = torch.autograd.grad(expected.sum(), exact)
    moved = [(x * dx).abs() for x, dx in zip(exact, gradients, strict=True)]
    if len(moved) == 1 and expected.shape != moved[0].shape:
        pairs = dict(activation.options).get("interleaved")
        moved = [moved[0][..., ::2], moved[0][..., 1::2]] if pairs else list(moved[0].chunk(2, -1))
    info = torch.finfo(dtype)
    bound = info.eps * (2 * expected.abs() + sum(moved)) + 4 * info.smallest_normal * info.eps
    bound = bound + FLOAT32_BOUND * _product(projections, expected)
    if not ((y.double() - expected).abs() <= bound).all():
        raise NotAnOp(
            f"it has the values of {activation.op} in float32 but rounds elsewhere in"
            f" {dtype_name(dtype)}"
        )


def _projections(
    widths: Sequence[int], scales: Sequence[float], dtype: torch.dtype
) -> list[Tensor]:
    """Random numbers of every pair of scales, and of either sign."""
    rows = max(4, 1024 // min(widths))
    projections = []
    for i, width in enumerate(widths):
        shape = (2, rows, width)
        chosen = ((uniform(shape, seed=3 + i) + 0.5) * len(scales)).long()
        factors = torch.tensor(scales, dtype=torch.float32)[chosen]
        projections.append((2 * uniform(shape, seed=1 + i) * factors).to(dtype))
    return projections
