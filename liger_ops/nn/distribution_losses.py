"""The losses of two distributions given as tensors, as modules."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.losses.jsd import jsd
from ..ops.losses.kl_div import kl_div
from ..ops.losses.tvd import tvd
from .log_prob import WithOptions


class KLDiv(WithOptions):
    """The Kullback-Leibler divergence of log-probabilities from a target.

    Calls `liger_ops.kl_div`; see there for equations, precision and gradient.

    Args:
        reduction, log_target, eps: as for `liger_ops.kl_div`. `torch.nn.KLDivLoss` and
            Liger-Kernel's module have the reduction "mean" by default.

    Shape:
        input, target: (..., V), floating point, any strides.
        The loss: (), or (..., V) for the reduction "none"; float64 for float64 tensors, else
        float32.

    Raises:
        TypeError, ValueError: see `liger_ops.kl_div`.

    Example:
        >>> p = torch.tensor([[0.5, 0.5, 0.0]])
        >>> liger_ops.nn.KLDiv()(torch.tensor([[0.25, 0.75, 0.0]]).log(), p)
        tensor(0.1438)
    """

    def __init__(
        self, reduction: str = "batchmean", log_target: bool = False, eps: float = 1e-10
    ) -> None:
        defaults = {"reduction": "batchmean", "log_target": False, "eps": 1e-10}
        super().__init__(defaults, (reduction, log_target, eps))
        # Raises the op's own errors for wrong options now, not at the first forward.
        self(_none(), _none())

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return kl_div(input, target, *self.options)


class JSD(WithOptions):
    """The generalised Jensen-Shannon divergence of log-probabilities, the mean over tokens.

    Calls `liger_ops.jsd`; see there for equations, precision and gradient.

    Args:
        beta, ignore_index: as for `liger_ops.jsd`.

    Shape:
        input, target: (..., V), floating point, any strides.
        shift_labels: (...), int64 or int32, or None.
        The loss: (), float64 for float64 tensors, else float32.

    Raises:
        TypeError, ValueError: see `liger_ops.jsd`.

    Example:
        >>> log_q, log_p = torch.tensor([[0.0, -torch.inf]]), torch.tensor([[-torch.inf, 0.0]])
        >>> liger_ops.nn.JSD()(log_q, log_p)
        tensor(0.6931)
    """

    def __init__(self, beta: float = 0.5, ignore_index: int = -100) -> None:
        super().__init__({"beta": 0.5, "ignore_index": -100}, (beta, ignore_index))
        self(_none(), _none())

    def forward(self, input: Tensor, target: Tensor, shift_labels: Tensor | None = None) -> Tensor:
        return jsd(input, target, shift_labels, *self.options)


class TVD(WithOptions):
    """The total variation distance of probabilities.

    Calls `liger_ops.tvd`; see there for equations, precision and gradient.

    Args:
        reduction, ignore_index: as for `liger_ops.tvd`.

    Shape:
        p, q: (..., V), floating point, any strides.
        shift_labels: (...), int64 or int32, or None.
        The loss: (), or (..., V) for the reduction "none"; float64 for float64 tensors, else
        float32.

    Raises:
        TypeError, ValueError: see `liger_ops.tvd`.

    Example:
        >>> p, q = torch.tensor([[0.5, 0.5, 0.0]]), torch.tensor([[0.25, 0.75, 0.0]])
        >>> liger_ops.nn.TVD()(p, q)
        tensor(0.2500)
    """

    def __init__(self, reduction: str = "batchmean", ignore_index: int = -100) -> None:
        super().__init__(
            {"reduction": "batchmean", "ignore_index": -100}, (reduction, ignore_index)
        )
        self(_none(), _none())

    def forward(self, p: Tensor, q: Tensor, shift_labels: Tensor | None = None) -> Tensor:
        return tvd(p, q, shift_labels, *self.options)


def _none() -> Tensor:
    return torch.empty(0, 1, device="meta")
