"""The losses of distributions, and log-probabilities and entropy, as modules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..ops.losses.divergence import divergence
from ..ops.losses.jsd import jsd
from ..ops.losses.kl_div import kl_div
from ..ops.losses.log_prob import log_prob
from ..ops.losses.router_losses import router_losses
from ..ops.losses.tvd import tvd
from .derived import OptionsModule, documented, no_rows, no_target

__all__ = ["JSD", "TVD", "Divergence", "KLDiv", "LogProb", "RouterLosses"]


class LossModule(OptionsModule):
    """A loss with options. repr shows the options that differ from their defaults.

    The check of the options calls the loss with two tensors: a loss of other arguments overrides
    `_check`.
    """

    shows_defaults: ClassVar[bool] = False

    def _check(self) -> None:
        self(no_rows(), no_rows())


@documented(kl_div)
@dataclass(eq=False, repr=False)
class KLDiv(LossModule):
    """The Kullback-Leibler divergence of log-probabilities from a target.

    The default reduction is "batchmean"; that of `torch.nn.KLDivLoss` and of Liger-Kernel's module
    is "mean".

    Example:
        >>> p = torch.tensor([[0.5, 0.5, 0.0]])
        >>> liger_ops.nn.KLDiv()(torch.tensor([[0.25, 0.75, 0.0]]).log(), p)
        tensor(0.1438)
    """

    reduction: str = "batchmean"
    log_target: bool = False
    eps: float = 1e-10

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return kl_div(input, target, *self.options)


@documented(jsd)
@dataclass(eq=False, repr=False)
class JSD(LossModule):
    """The generalised Jensen-Shannon divergence of log-probabilities, the mean over tokens.

    Example:
        >>> log_q, log_p = torch.tensor([[0.0, -torch.inf]]), torch.tensor([[-torch.inf, 0.0]])
        >>> liger_ops.nn.JSD()(log_q, log_p)
        tensor(0.6931)
    """

    beta: float = 0.5
    ignore_index: int = -100

    def forward(self, input: Tensor, target: Tensor, shift_labels: Tensor | None = None) -> Tensor:
        return jsd(input, target, shift_labels, *self.options)


@documented(tvd)
@dataclass(eq=False, repr=False)
class TVD(LossModule):
    """The total variation distance of probabilities.

    Example:
        >>> p, q = torch.tensor([[0.5, 0.5, 0.0]]), torch.tensor([[0.25, 0.75, 0.0]])
        >>> liger_ops.nn.TVD()(p, q)
        tensor(0.2500)
    """

    reduction: str = "batchmean"
    ignore_index: int = -100

    def forward(self, p: Tensor, q: Tensor, shift_labels: Tensor | None = None) -> Tensor:
        return tvd(p, q, shift_labels, *self.options)


@documented(divergence)
@dataclass(eq=False, repr=False)
class Divergence(LossModule):
    """The divergence of a student's distribution from its teacher's, for each token.

    Example:
        >>> student, teacher = torch.zeros(1, 2), torch.tensor([[0.0, -torch.inf]])
        >>> liger_ops.nn.Divergence("forward_kl")(student, teacher)
        tensor([0.6931])
    """

    kind: str = "jsd"
    beta: float = 0.5
    temperature: float = 1.0
    teacher_temperature: float | None = None
    ignore_index: int = -100

    def forward(
        self, student_logits: Tensor, teacher_logits: Tensor, target: Tensor | None = None
    ) -> Tensor:
        options = {name: getattr(self, name) for name in self._names}
        return divergence(student_logits, teacher_logits, target=target, **options)


@documented(log_prob)
@dataclass(eq=False, repr=False)
class LogProb(LossModule):
    """The log-probability of each token's target, and the entropy of its distribution.

    Example:
        >>> liger_ops.nn.LogProb(temperature=0.5)(torch.zeros(2, 4), torch.tensor([3, -100]))
        (tensor([-1.3863,  0.0000]), tensor([1.3863, 0.0000]))
    """

    temperature: float = 1.0
    softcap: float | None = None
    logit_scale: float = 1.0
    ignore_index: int = -100

    def _check(self) -> None:
        self(no_rows(), no_target())

    def forward(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return log_prob(logits, target, *self.options)


@documented(router_losses)
@dataclass(eq=False, repr=False)
class RouterLosses(LossModule):
    """The load-balancing loss and the z-loss of the routers of a mixture of experts.

    Example:
        >>> liger_ops.nn.RouterLosses(1)([torch.eye(2), torch.eye(2)])
        (tensor(1.), tensor(1.7247))
    """

    top_k: int

    def _check(self) -> None:
        self([no_rows(max(self.top_k, 1))])

    def forward(
        self, gate_logits: list[Tensor], token_weight: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return router_losses(gate_logits, self.top_k, token_weight)
