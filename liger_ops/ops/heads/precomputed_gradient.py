"""The gradient of a head's weight that a forward computes, handed over to the backward.

The backward multiplies it by the gradient of the loss. If autograd saved the gradient, it would
have to stay unchanged, and the product would take as much memory again: a gigabyte for 128256 words
of 4096 columns. Instead the forward hands it over, and nothing else has it: the first backward
multiplies it in place and returns it. A second backward, with `retain_graph=True`, does not find it
and computes it again from the logits.

The peak of forward and backward for 32768 x 4096 x 128256 in bfloat16 on an H200, with chunks of
250 MiB and accum_dtype=bfloat16: 1514 MiB, eager and compiled, and 2516 MiB without this.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ...autograd import Formula
from ...torch_private import (
    are_functorch_transforms_active,
    len_torch_dispatch_stack,
    top_saved_tensors_default_hooks,
)
from .head import GRADIENTS, divisor, factors_of, scale_, scaled

# Not float64: there gradients are checked (gradcheck), and a second backward, which computes the
# gradient again, would have to agree with the first to the last bit.
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class _PrivateGradients(threading.local):
    """A flag of each thread: the caller of the current forward op drops the op's gradients."""

    active = False


_private_gradients = _PrivateGradients()


@contextmanager
def gradients_are_private() -> Iterator[None]:
    """Mark the gradients of the forward op that is called in this context as dropped by its caller.

    The op may then hand them over to its backward.
    """
    before, _private_gradients.active = _private_gradients.active, True
    try:
        yield
    finally:
        _private_gradients.active = before


def hand_over(gradient: Tensor | None, dtype: torch.dtype) -> list[Tensor]:
    """Return a list with `gradient`, for the backward to take, or an empty list.

    Nothing but the caller may have the gradient. If the list is empty, autograd must save it. This
    is the case if the gradient has another dtype than `dtype`, the weight's, or float64; if a graph
    is traced; and if saved tensors have hooks, as in a checkpoint, which would not see a tensor in
    a list.
    """
    can_hand_over = (
        type(gradient) is Tensor
        and gradient.dtype is dtype
        and dtype in _DTYPES
        and len_torch_dispatch_stack() == 0
        and top_saved_tensors_default_hooks(True) is None
    )
    return [gradient] if can_hand_over and gradient is not None else []


class PrecomputedFormula(Formula):
    """The autograd formula of a loss whose forward computes the gradients of its head.

    They are its results dx, dweight, dbias, dlora_x and dlora_b, the gradients of its first result,
    the loss. If another result has a gradient too, the backward computes all of them again.
    """

    def items(self, call: Any) -> Tensor | int:
        """Return the number by which the reduction of the backward op's call divides."""
        return divisor(call, call.total_weight)

    def factor(self, call: Any) -> Tensor:
        """Return the factor, (1, 1), by which the backward op of this call multiplies dweight."""
        return factors_of(call, self.items(call))[1]

    def save(self, ctx: Any, values: Sequence[Any]) -> None:
        saved = dict(zip(self.saved_names, values, strict=True))
        dtype = saved[f"{self.prefix}weight"].dtype
        ctx.handed_over = hand_over(saved["dweight"], dtype) if _private_gradients.active else []
        if ctx.handed_over:
            saved["dweight"] = None
        super().save(ctx, list(saved.values()))

    def run(self, ctx: Any, values: tuple[Any, ...]) -> Any:
        call = self.gradient.arguments(*values)
        dloss, *others = values[: self.count]
        # With gradients enabled this is a backward with create_graph=True: the forward's gradients
        # are constants to autograd, and the backward op must compute its own.
        transformed = are_functorch_transforms_active() or torch.is_grad_enabled()
        if transformed or dloss is None or any(grad is not None for grad in others):
            call = call._replace(**dict.fromkeys(GRADIENTS.split()))
            return super().run(ctx, call)
        x, weight, bias, *lora = call.output_mask
        finished = self._finished(ctx, call) if weight else None
        if finished is None:
            return super().run(ctx, call)
        call = call._replace(dweight=None, output_mask=[x, False, bias, *lora])
        dx, _, *gradients = super().run(ctx, call)
        return (dx, finished, *gradients)

    def _finished(self, ctx: Any, call: Any) -> Tensor | None:
        """Return the weight's gradient times the factor, multiplied in float32 and rounded once.

        Return None if the backward op has to multiply it, or to compute it again.
        """
        if ctx.handed_over:
            return scale_(ctx.handed_over.pop(), self.factor(call))
        dweight = call.dweight
        if dweight is not None and type(dweight) is not Tensor and dweight.dtype in _DTYPES:
            # While a graph is traced, the product is not left to the backward op, whose result
            # would be new memory: Inductor writes this product to the memory of the saved gradient.
            return scaled(dweight, self.factor(call), dweight.dtype)
        return None
