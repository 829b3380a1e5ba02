"""Overrides for torchtitan's configurations: norms, feed-forwards, experts and the loss, by ops.

torchtitan replaces a part of a model or of a trainer by an override. The command line names the
overrides, which apply before torchtitan builds, parallelises and compiles the model:

    --override.imports liger_ops.integrations.torchtitan.rms_norm,\\
        liger_ops.integrations.torchtitan.swiglu,\\
        liger_ops.integrations.torchtitan.grouped_experts,\\
        liger_ops.integrations.torchtitan.cross_entropy

Parameters keep their names, so that checkpoints are the same. The arguments of each forward keep
their names too: by these torchtitan finds the arguments' shardings. Under tensor parallelism, the
loss of a sharded vocabulary is `liger_ops.distributed.cross_entropy`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

import liger_ops
from liger_ops.distributed import cross_entropy as cross_entropy_of_shards

try:
    from torchtitan.components import loss as titan
    from torchtitan.config import derive, override
    from torchtitan.distributed.utils import get_spmd_backend
    from torchtitan.models.common import RMSNorm
    from torchtitan.models.common.feed_forward import FeedForward
    from torchtitan.models.common.moe import GroupedExperts
except ImportError as error:
    raise ImportError(
        "liger_ops.integrations.torchtitan needs torchtitan 0.3 or later, which has"
        f" --override.imports: {error}"
    ) from error

__all__ = ["cross_entropy", "grouped_experts", "rms_norm", "swiglu"]


class LigerRMSNorm(RMSNorm):
    """torchtitan's RMSNorm, computed by the op `rms_norm` in float32, and rounded once."""

    @dataclass(kw_only=True, slots=True)
    class Config(RMSNorm.Config):
        pass

    def forward(self, x: Tensor) -> Tensor:
        return liger_ops.rms_norm(x, self.weight, self.eps, casting_mode="gemma")


class LigerFeedForward(FeedForward):
    """torchtitan's FeedForward. The op `swiglu` computes silu(w1(x)) * w3(x)."""

    @dataclass(kw_only=True, slots=True)
    class Config(FeedForward.Config):
        pass

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(liger_ops.swiglu(self.w1(x), self.w3(x)))


class LigerGroupedExperts(GroupedExperts):
    """torchtitan's GroupedExperts. The op `swiglu` computes the activation of all experts' rows.

    The products are torchtitan's, in bfloat16. If torchtitan's type checks run, its own forward is
    called, without the op.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        if titan.spmd.is_type_checking():
            return super().forward(x_RD, num_tokens_per_expert_E)
        ends = num_tokens_per_expert_E.cumsum(0, dtype=torch.int32)

        def product(rows: Tensor, weight: Tensor) -> Tensor:
            local = weight.to_local() if isinstance(weight, DTensor) else weight
            return self._grouped_mm(A=rows, B_t=local.bfloat16().transpose(-2, -1), offs=ends)

        rows = x_RD.bfloat16()
        hidden = liger_ops.swiglu(product(rows, self.w1_EFD), product(rows, self.w3_EFD))
        return product(hidden, self.w2_EDF).type_as(x_RD)


class LigerCrossEntropyLoss(titan.CrossEntropyLoss):
    """torchtitan's CrossEntropyLoss, by the op `cross_entropy`, without a copy in float32."""

    @dataclass(kw_only=True, slots=True)
    class Config(titan.CrossEntropyLoss.Config):
        pass

    def __init__(self, config: Config, *, compile_config: Any = None) -> None:
        super().__init__(config)
        self.fn = summed_cross_entropy
        self._maybe_compile(compile_config)


def summed_cross_entropy(
    pred: Tensor, labels: Tensor, *, global_vocab_size: int | None = None
) -> Tensor:
    """Compute the sum over tokens of the cross-entropy of logits (B, S, V), in float32.

    Logits are a whole tensor, or the rank's words of a vocabulary that is sharded over "tp": a
    DTensor with the backend "partial_dtensor", a tensor with "spmd_types". torchtitan's own
    function computes the loss for any other layout, under its type checks, and with the backend
    "full_dtensor".
    """
    words = (Shard(pred.ndim - 1),)
    if (
        titan.spmd.is_type_checking()
        or isinstance(labels, DTensor)
        or (isinstance(pred, DTensor) and pred.placements != words)
    ):
        return titan.cross_entropy_loss(pred, labels, global_vocab_size=global_vocab_size)
    logits, target = pred.flatten(0, 1), labels.flatten(0, 1)
    options: dict[str, Any] = {"reduction": "sum", "ignore_index": titan.IGNORE_INDEX}
    if isinstance(pred, DTensor):
        return cross_entropy_of_shards(logits, target, **options)
    if get_spmd_backend() == "spmd_types" and titan.spmd_mesh_size("tp") > 1:
        group = titan.current_spmd_mesh().get_group("tp")
        return cross_entropy_of_shards(
            logits, target, group=group, vocab_size=global_vocab_size, **options
        )
    return liger_ops.cross_entropy(logits, target, **options)


# `exact`, because a subclass may have another forward, or compute other values.
@override(target=RMSNorm.Config, exact=True, description="RMSNorm by liger_ops.rms_norm")
def rms_norm(config: Any) -> Any:
    """Compute every RMSNorm by `liger_ops.rms_norm`."""
    return derive(config, LigerRMSNorm.Config)


@override(target=FeedForward.Config, exact=True, description="FeedForward by liger_ops.swiglu")
def swiglu(config: Any) -> Any:
    """Compute the activation of every FeedForward by `liger_ops.swiglu`."""
    return derive(config, LigerFeedForward.Config)


@override(target=GroupedExperts.Config, exact=True, description="experts by liger_ops.swiglu")
def grouped_experts(config: Any) -> Any:
    """Compute the activation of every GroupedExperts by `liger_ops.swiglu`."""
    return derive(config, LigerGroupedExperts.Config)


@override(target=titan.CrossEntropyLoss.Config, exact=True, description="liger_ops.cross_entropy")
def cross_entropy(config: Any) -> Any:
    """Compute the loss by `liger_ops.cross_entropy`, also that of a chunk of tokens."""
    return derive(config, LigerCrossEntropyLoss.Config)
