"""The gradient of a head's weight that a forward computes, handed to the backward to be finished.

The backward multiplies it by the gradient of the loss. Saved by autograd, it has to stay as it is,
and the product takes the memory of a second one: a gigabyte for 128256 words of 4096. Handed over,
it is nobody else's: the first backward multiplies it in place and gives it away, and a second
backward, with `retain_graph=True`, finds none and computes it again from the logits. The peak of
forward and backward for 32768 x 4096 x 128256 in bfloat16 on an H200, with chunks of 250 MiB and
accum_dtype=bfloat16: 1514 MiB, eager and compiled, and 2516 without this.
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
from .head import GRADIENTS, factors_of
from .scaling import scale_, scaled

# In float64 gradients are checked, and a second backward has to give the first's to the last bit.
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class _PrivateGradients(threading.local):
    active = False


_private_gradients = _PrivateGradients()


@contextmanager
def gradients_are_private() -> Iterator[None]:
    """Around the call of a forward op whose gradients its caller drops."""
    before, _private_gradients.active = _private_gradients.active, True
    try:
        yield
    finally:
        _private_gradients.active = before


def hand_over(gradient: Tensor | None, dtype: torch.dtype) -> list[Tensor]:
    """`gradient`, which the caller alone has, in a list from which the backward takes it; empty if
    autograd must save it.

    That is so if it has to be converted to `dtype`, if a graph is being traced, and if saved
    tensors have hooks, as in a checkpoint, which would not see it.
    """
    alone = (
        type(gradient) is Tensor
        and gradient.dtype is dtype
        and dtype in _DTYPES
        and len_torch_dispatch_stack() == 0
        and top_saved_tensors_default_hooks(True) is None
    )
    return [gradient] if alone and gradient is not None else []


class PrecomputedFormula(Formula):
    """The formula of a loss that computes the gradients of its head in the forward, its results dx,
    dweight, dbias, dlora_x and dlora_b, and of the loss alone, its first result."""

    def items(self, call: Any) -> Tensor | int:
        """The number by which the reduction of the backward op's call divides."""
        raise NotImplementedError

    def factor(self, call: Any) -> Tensor:
        """What the backward op of this call multiplies dweight by, (1, 1)."""
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
        """The weight's gradient times the factor: in float32, and rounded once. None if the
        backward op has to multiply it, or to compute it again."""
        if ctx.handed_over:
            return scale_(ctx.handed_over.pop(), self.factor(call))
        dweight = call.dweight
        if dweight is not None and type(dweight) is not Tensor and dweight.dtype in _DTYPES:
            # While a graph is traced: Inductor writes the product to the memory of what is saved.
            # The op's result would be new memory.
            return scaled(dweight, self.factor(call), dweight.dtype)
        return None
