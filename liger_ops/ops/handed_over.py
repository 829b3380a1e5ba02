"""The gradient of a head's weight that a forward computes, handed to the backward to be finished.

The backward multiplies it by the gradient of the loss. Saved by autograd, it has to stay as it is,
and the product takes the memory of a second one: a gigabyte for 128256 words of 4096. Handed over,
it is nobody else's: the first backward multiplies it in place and gives it away, and a second
backward, with `retain_graph=True`, finds none and computes it again from the logits.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

# Where the product below is one kernel in float32. In float64 gradients are checked, and a second
# backward has to give the first's to the last bit.
_DEVICES = ("cpu", "cuda")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class _Thread(threading.local):
    nobody_else = False


_thread = _Thread()


@contextmanager
def nobody_else_sees_the_gradients() -> Iterator[None]:
    """Around the call of a forward op whose gradients its caller drops."""
    _thread.nobody_else = True
    try:
        yield
    finally:
        _thread.nobody_else = False


def hand_over(gradient: Tensor | None, dtype: torch.dtype) -> list[Tensor]:
    """`gradient` in a list from which the backward takes it; empty if autograd must save it.

    That is so if it has to be converted to `dtype`, if a graph is being traced, and if saved
    tensors have hooks, as in a checkpoint, which would not see it.
    """
    alone = (
        _thread.nobody_else
        and type(gradient) is Tensor
        and gradient.dtype is dtype
        and dtype in _DTYPES
        and gradient.device.type in _DEVICES
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    )
    return [gradient] if alone and gradient is not None else []


def finished(gradient: Tensor, factor: Tensor) -> Tensor:
    """gradient times a factor of one element, in place: in float32, and rounded once."""
    found_inf = torch.zeros(1, dtype=torch.float32, device=gradient.device)
    # The product of GradScaler, which unlike mul_ does not round the factor to the gradient's dtype.
    torch._amp_foreach_non_finite_check_and_unscale_([gradient], found_inf, factor.float())
    return gradient
