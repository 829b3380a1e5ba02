"""Losses of extreme logits (very large, very low, or with a large common offset), and PyTorch's
functions to compare them with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

EPS = torch.finfo(torch.float32).eps
LOW, INF = torch.finfo(torch.float32).min, float("inf")
KINDS = ("forward_kl", "reverse_kl", "jsd", "tvd")
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
# A loss by the functions of liger_ops, or of a namespace that replaces it.
Op = Callable[[Any, Tensor, Tensor, Tensor], Tensor]


def rows(V: int, seed: int, infinite: bool) -> Tensor:
    """Return logits whose rows are extreme in different ways. Classes 1 to 3 always have logits."""
    # The same numbers on every device.
    x = torch.randn(
        9 + 2 * infinite, V, generator=torch.Generator().manual_seed(seed), device="cpu"
    )
    x = x.to(torch.get_default_device())
    offsets = torch.tensor([0.0, 1e3, -1e4, 1e6, -1e6])
    x[:5] += offsets.unsqueeze(1)
    x[5], x[6] = LOW, -1e30
    x[7, 4:], x[8, 4:] = LOW, -1e30
    if infinite:
        x[9, 4:], x[10] = -INF, -INF
    return x


def targets(x: Tensor) -> Tensor:
    return torch.arange(len(x)) % 3 + 1


def log_p(x: Tensor) -> Tensor:
    """Return log-probabilities of at least -1e4: exp is then 0, and no product with it is NaN."""
    return x.log_softmax(-1).clamp(min=-1e4)


def divergence_of(log_q: Tensor, log_p: Tensor, kind: str, beta: float = 0.3) -> Tensor:
    p, q = log_p.exp(), log_q.exp()
    if kind == "forward_kl":
        return (p * (log_p - log_q)).sum(-1)
    if kind == "reverse_kl":
        return (q * (log_q - log_p)).sum(-1)
    if kind == "tvd":
        return (p - q).abs().sum(-1) / 2
    log_m = (beta * p + (1 - beta) * q).clamp(min=1e-300 if p.dtype is torch.float64 else 1e-37)
    log_m = log_m.log()
    return (beta * p * (log_p - log_m) + (1 - beta) * q * (log_q - log_m)).sum(-1)


def weights_of(x: Tensor) -> Tensor:
    return torch.linspace(0.5, 1.5, x.shape[-1], dtype=x.dtype)


def head_of(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x and weight of a head whose logits are exactly x: its products are by 1 and 0."""
    return torch.eye(len(x), dtype=x.dtype), x.t()


def by_bias(loss: Callable[..., Tensor], x: Tensor, t: Tensor) -> Tensor:
    zeros = x.new_zeros(1, 1), x.new_zeros(x.shape[-1], 1)
    return torch.cat([loss(*zeros, t[i : i + 1], x[i]) for i in range(len(x))])


def top_classes(x: Tensor) -> tuple[Tensor, Tensor]:
    ids = torch.tensor([0, 2, 1]).expand(len(x), 3)
    return ids, torch.tensor([0.2, 0.4, 0.3], dtype=x.dtype).log().expand(len(x), 3)


def of_top_classes(x: Tensor) -> Tensor:
    ids, listed = top_classes(x)
    tail = torch.log1p(-listed.exp().sum(-1, keepdim=True))
    z = x - x.detach().amax(-1, keepdim=True)
    others = z.scatter(-1, ids, -INF).logsumexp(-1, keepdim=True)
    log_q = torch.cat([z.gather(-1, ids), others], -1)
    return divergence_of(log_p(log_q), torch.cat([listed, tail], -1), "jsd")


# Name of a loss -> the op and PyTorch's functions for it, both of logits x, a teacher's logits y
# and targets t; and whether x may be infinite.
LOSSES: dict[str, tuple[Op, Loss, bool]] = {
    "cross_entropy": (
        lambda ops, x, y, t: ops.cross_entropy(x, t, reduction="none"),
        lambda x, y, t: F.cross_entropy(x, t, reduction="none"),
        True,
    ),
    "smoothed": (
        lambda ops, x, y, t: ops.cross_entropy(
            x, t, weights_of(x), reduction="none", label_smoothing=0.1
        ),
        lambda x, y, t: F.cross_entropy(
            x, t, weights_of(x), reduction="none", label_smoothing=0.1
        ),
        False,
    ),
    "log_prob": (
        lambda ops, x, y, t: ops.log_prob(x, t)[0],
        lambda x, y, t: x.log_softmax(-1).gather(-1, t.unsqueeze(-1)).squeeze(-1),
        True,
    ),
    "entropy": (
        lambda ops, x, y, t: ops.log_prob(x, t)[1],
        lambda x, y, t: -(log_p(x).exp() * log_p(x)).sum(-1),
        False,
    ),
    "linear_cross_entropy": (
        lambda ops, x, y, t: ops.linear_cross_entropy(
            *head_of(x), t, reduction="sum", chunk_bytes=5 * 4 * x.shape[-1]
        ).unsqueeze(0),
        lambda x, y, t: F.cross_entropy(x, t, reduction="sum").unsqueeze(0),
        False,
    ),
    "linear_cross_entropy of a bias": (
        lambda ops, x, y, t: by_bias(
            lambda *head: ops.linear_cross_entropy(*head, reduction="none"), x, t
        ),
        lambda x, y, t: F.cross_entropy(x, t, reduction="none"),
        False,
    ),
    "linear_log_prob": (
        lambda ops, x, y, t: sum(
            ops.linear_log_prob(*head_of(x), t, chunk_bytes=5 * 4 * x.shape[-1])
        ),
        lambda x, y, t: (
            log_p(x).gather(-1, t.unsqueeze(-1)).squeeze(-1) - (log_p(x).exp() * log_p(x)).sum(-1)
        ),
        False,
    ),
    "linear_top_k_divergence": (
        lambda ops, x, y, t: ops.linear_top_k_divergence(*head_of(x), *top_classes(x), beta=0.3),
        lambda x, y, t: of_top_classes(x),
        False,
    ),
    **{
        f"divergence, {kind}": (
            lambda ops, x, y, t, kind=kind: ops.divergence(x, y, kind, 0.3),
            lambda x, y, t, kind=kind: divergence_of(log_p(x), log_p(y), kind),
            False,
        )
        for kind in KINDS
    },
    "linear_divergence": (
        lambda ops, x, y, t: ops.linear_divergence(
            *head_of(x), teacher_logits=y, target=t, beta=0.3, hard_weight=0.5, soft_weight=0.7,
            reduction="none", chunk_bytes=5 * 4 * x.shape[-1],
        )[0],
        lambda x, y, t: (
            0.7 * divergence_of(log_p(x), log_p(y), "jsd")
            + 0.5 * F.cross_entropy(x, t, reduction="none")
        ),
        False,
    ),
}  # fmt: skip


def values_and_gradient(
    loss: Loss, x: Tensor, y: Tensor, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    leaf = x.to(dtype, copy=True).requires_grad_()
    values = loss(leaf, y.to(dtype), targets(x))
    (gradient,) = torch.autograd.grad(values.sum(), leaf)
    return [values.detach(), gradient]


def assert_as_near_as_pytorch(found: list[Tensor], reference: Loss, x: Tensor, y: Tensor) -> None:
    """Check each row: the error against float64 is at most twice PyTorch's and a few roundings.

    Where PyTorch gives inf or NaN, the result must be the same.
    """
    pytorch = values_and_gradient(reference, x, y)
    truth = values_and_gradient(reference, x, y, torch.float64)
    for name, ours, theirs, exact in zip(("value", "gradient"), found, pytorch, truth, strict=True):
        finite = theirs.isfinite()
        torch.testing.assert_close(ours[~finite], theirs[~finite], equal_nan=True)
        errors = [(z.double() - exact).abs().masked_fill(~finite, 0.0) for z in (ours, theirs)]
        size = exact.abs().masked_fill(~finite, 0.0)
        if exact.dim() > 1:
            errors, size = [error.amax(-1) for error in errors], size.amax(-1)
        bounds = 2 * errors[1] + 16 * EPS * (1 + size)
        assert bool((errors[0] <= bounds).all()), (name, errors[0], bounds)
