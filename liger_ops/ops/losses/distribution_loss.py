"""The losses of two tensors of probabilities or log-probabilities: kl_div, jsd and tvd."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..tensors import widened
from .divergence import shares

REDUCTIONS = ("batchmean", "mean", "sum", "none")

# float32's smallest normal number. The logarithm of a smaller probability is that of this number.
TINY = torch.finfo(torch.float32).tiny


class DistributionLoss(NamedTuple):
    """One of the losses, with its tensors x and y.

    The kinds, with P = exp(y) and Q = exp(x): "kl_div", whose y are probabilities, is KL(y || Q);
    "forward_kl" is KL(P || Q), "reverse_kl" is KL(Q || P), and "jsd" is the divergence of P and Q
    from their mixture. "tvd" is the distance of the probabilities x and y.
    """

    kind: str
    x: Tensor
    y: Tensor
    # eps of kl_div, or beta of jsd.
    scalar: float
    reduction: str
    # The divisor of "batchmean", if all rows count.
    batch: int
    # Which rows count, or None for all.
    within: Tensor | None = None

    @property
    def divisor(self) -> Tensor | int:
        """The number, at least 1, by which the sum of all terms is divided."""
        return self.divided_by(None if self.within is None else self.within.sum())

    def divided_by(self, counted: Tensor | None) -> Tensor | int:
        """Return the divisor if `counted` rows count; None for all."""
        if self.reduction in ("sum", "none"):
            return 1
        *leading, V = self.x.shape
        # sym_max keeps a traced size symbolic, where max would guard on it.
        V, of_mean = torch.sym_max(V, 1), self.reduction == "mean"
        if counted is not None:
            rows = counted.clamp(min=1)
            return rows * V if of_mean else rows
        return torch.sym_max(math.prod(leading) * V if of_mean else self.batch, 1)


def within(call: Any) -> Tensor | None:
    """Return whether each row counts, or None if all do."""
    return None if call.shift_labels is None else call.shift_labels != call.ignore_index


def value(loss: DistributionLoss) -> Tensor:
    """Compute the loss, in float32, or in float64 if one of the tensors is."""
    terms = _terms(loss.kind, *_operands(loss), loss.scalar)
    if loss.within is not None:
        terms = torch.where(loss.within.unsqueeze(-1), terms, 0.0)
    if loss.reduction == "none":
        return terms.contiguous()
    return terms.sum() / loss.divisor


def gradients(call: Any, loss: DistributionLoss) -> tuple[Tensor | None, ...]:
    """Return the gradients of x and y that a backward's call asks for, rounded once."""
    slopes = _slopes(loss.kind, *_operands(loss), loss.scalar)
    factor = call.dloss.to(slopes[0].dtype) / loss.divisor
    results: list[Tensor | None] = []
    for wanted, slope, x in zip(call.output_mask, slopes, (loss.x, loss.y), strict=True):
        gradient = None
        if wanted:
            gradient = factor * slope
            if loss.within is not None:
                gradient = torch.where(loss.within.unsqueeze(-1), gradient, 0.0)
            gradient = gradient.to(x.dtype).contiguous()
        results.append(gradient)
    return tuple(results)


def _operands(loss: DistributionLoss) -> tuple[Tensor, Tensor]:
    """Return x and y in the dtype of the arithmetic, and 0 in the rows that do not count.

    Those rows may be NaN, which would make gradients NaN.
    """
    x, y = widened(loss.x), widened(loss.y)
    if loss.within is not None:
        x, y = (torch.where(loss.within.unsqueeze(-1), tensor, 0.0) for tensor in (x, y))
    return x, y


def _kl_terms(p: Tensor, log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return p * (log_p - log_q), and 0 where p is 0, although the logarithms may be -inf.

    NaN stays NaN.
    """
    # The comparison is False for a log_q of NaN, so that it makes the term NaN.
    is_zero = (p == 0) & (log_q < torch.inf)
    return p * torch.where(is_zero, 0.0, log_p - log_q)


def _floored(p: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return max(p, eps) for p >= 0, and whether p is below eps.

    A negative p stays, so that its logarithm is NaN.
    """
    below = (p >= 0) & (p < eps)
    return torch.where(below, eps, p), below


def _terms(kind: str, x: Tensor, y: Tensor, scalar: float) -> Tensor:
    """Compute the terms, of x's shape, that a reduction sums."""
    if kind == "tvd":
        return (x - y).abs() / 2
    if kind == "kl_div":
        return _kl_terms(y, _floored(y, scalar)[0].log(), x)
    if kind == "forward_kl":
        return _kl_terms(y.exp(), y, x)
    if kind == "reverse_kl":
        return _kl_terms(x.exp(), x, y)
    of_x, of_y = shares(y, x, kind, scalar)
    return of_x + of_y


def _slopes(kind: str, x: Tensor, y: Tensor, scalar: float) -> tuple[Tensor, Tensor]:
    """Compute the derivatives of a term with respect to x and to y.

    They are written out because autograd gives 0 where a probability is 0: the term is a constant
    there.
    """
    if kind == "tvd":
        half = torch.sign(x - y).detach() / 2
        return half, -half
    if kind == "kl_div":
        floored, below = _floored(y, scalar)
        return -y, floored.log() - x + torch.where(below, 0.0, 1.0)
    if kind == "forward_kl":
        p = y.exp()
        return -p, _kl_terms(p, y, x) + p
    if kind == "reverse_kl":
        q = x.exp()
        return _kl_terms(q, x, y) + q, -q
    return shares(y, x, kind, scalar)
