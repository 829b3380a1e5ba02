"""f-divergences of f-DPO: the derivative f'(u), as a function of log u."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

# The largest exponent; exp overflows in float32 above 88. A pair beyond CAP has a finite loss, and
# no gradient.
CAP = 80.0


def reverse_kl(log_u: Tensor, alpha: float) -> Tensor:
    """Return f'(u) = log u + 1 without the constant, of f(u) = u log u."""
    return log_u


def forward_kl(log_u: Tensor, alpha: float) -> Tensor:
    """Return f'(u) = -1 / u plus 1, which is 0 for u = 1, of f(u) = -log u."""
    return -torch.expm1((-log_u).clamp(max=CAP))


def js_divergence(log_u: Tensor, alpha: float) -> Tensor:
    """Return f'(u) = log(2u / (1 + u)), of f(u) = u log u - (u + 1) log((u + 1) / 2)."""
    return math.log(2) + logsigmoid(log_u)


def alpha_divergence(log_u: Tensor, alpha: float) -> Tensor:
    """Return f'(u) = (1 - u^-alpha) / alpha, whose limit for alpha = 0 is log u."""
    return -torch.expm1((-alpha * log_u).clamp(max=CAP)) / alpha if alpha != 0 else log_u


# Constants may be left out or added, because they cancel: only differences of f' are used.
F_DIVERGENCES: dict[str, Callable[[Tensor, float], Tensor]] = {
    f.__name__: f for f in (reverse_kl, forward_kl, js_divergence, alpha_divergence)
}
