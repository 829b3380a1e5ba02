"""f-divergences of f-DPO: the derivative f'(u), as a function of log u."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

# The largest exponent: a pair beyond it has a finite loss, and no gradient. float32 ends at 88.
CAP = 80.0


def reverse_kl(log_u: Tensor, alpha: float) -> Tensor:
    """f(u) = u log u, and f'(u) = log u + 1; the constant is left out."""
    return log_u


def forward_kl(log_u: Tensor, alpha: float) -> Tensor:
    """f(u) = -log u, and f'(u) = -1 / u; 1 is added, so that u = 1 has 0."""
    return -torch.expm1((-log_u).clamp(max=CAP))


def js_divergence(log_u: Tensor, alpha: float) -> Tensor:
    """f(u) = u log u - (u + 1) log((u + 1) / 2), and f'(u) = log(2u / (1 + u))."""
    return math.log(2) + logsigmoid(log_u)


def alpha_divergence(log_u: Tensor, alpha: float) -> Tensor:
    """f'(u) = (1 - u^-alpha) / alpha, which is log u in the limit of alpha = 0."""
    return -torch.expm1((-alpha * log_u).clamp(max=CAP)) / alpha if alpha != 0 else log_u


# The constants that are left out cancel: only differences of f' are used.
F_DIVERGENCES: dict[str, Callable[[Tensor, float], Tensor]] = {
    f.__name__: f for f in (reverse_kl, forward_kl, js_divergence, alpha_divergence)
}
