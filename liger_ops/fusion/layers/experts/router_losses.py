"""The load-balancing loss of a mixture model: one function for all layers becomes router_losses.

In transformers this is a function of the model's file, `load_balancing_loss_func`, which the
forward of the model with the loss calls. A function with the same arguments is recognised if it
computes the same losses and gradients for some drawn logits.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ....ops.losses.router_losses import router_losses
from ...probing import NotAnOp
from ..functions import Functions, globals_of

NAME = "load_balancing_loss_func"
PARAMETERS = ("gate_logits", "num_experts", "top_k", "attention_mask")


class RouterLossFunctions(Functions):
    """Load-balancing losses. There is no rewrite for this op: a function is recognised by comparing
    values."""

    name = title = "router loss"
    rewrites = ("router_losses",)

    def named(self, cls: Any) -> Iterator[tuple[str, Any]]:
        found = [one for one in globals_of(getattr(cls, "forward", None)) if one[0] == NAME]
        return iter([one for one in found if one[1] is not None][:1])

    def recognise(self, function: Any) -> None:
        """Raise NotAnOp if a function has other arguments, or computes another loss or gradient."""
        names = tuple(inspect.signature(function).parameters)
        if names != PARAMETERS:
            raise NotAnOp(f"it takes ({', '.join(names)}), not ({', '.join(PARAMETERS)})")
        for found, expected in _pairs(function):
            if not torch.allclose(found, expected, rtol=1e-4, atol=1e-6):
                raise NotAnOp("it computes another loss than router_losses")

    @classmethod
    def make_caller(cls, function: Any, facts: None) -> Callable[..., Any]:
        return lambda args, kwargs: _loss(*args, **kwargs)


@torch.enable_grad()
def _pairs(function: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pairs of a function's and the op's loss and gradients, with and without a mask."""
    drawn = torch.Generator().manual_seed(0)
    masked = torch.tensor([[0.0, 0.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
    for experts, top_k, mask in ((5, 1, None), (6, 2, None), (7, 3, masked)):
        logits = [torch.randn(8, experts, generator=drawn).requires_grad_() for _ in range(3)]
        loss = function(tuple(logits), experts, top_k, mask)
        expected = _loss(tuple(logits), experts, top_k, mask)
        assert expected is not None
        yield loss, expected
        yield from zip(
            torch.autograd.grad(loss, logits), torch.autograd.grad(expected, logits), strict=True
        )


def _loss(
    gate_logits: Any, num_experts: Any = None, top_k: Any = 2, attention_mask: Any = None
) -> Tensor | None:
    """Return the loss by the op, or None for a call that the function may compute differently."""
    if not isinstance(gate_logits, tuple) or not gate_logits:
        return None
    x = gate_logits[0]
    if type(x) is not Tensor or x.dim() != 2 or x.shape[1] != num_experts:
        return None
    for logits in gate_logits:
        if type(logits) is not Tensor or logits.shape != x.shape:
            return None
        if logits.dtype is not x.dtype or logits.device != x.device:
            return None
    if attention_mask is not None:
        if attention_mask.numel() != x.shape[0] or attention_mask.dtype is torch.float64:
            return None
        attention_mask = attention_mask.reshape(-1).to(x.device)
    # The function returns float32 for float64 too.
    return router_losses(list(gate_logits), top_k, attention_mask)[0].float()
