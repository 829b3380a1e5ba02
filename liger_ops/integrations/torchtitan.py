"""Overrides for torchtitan's configurations: its RMSNorm, FeedForward and CrossEntropyLoss by ops.

torchtitan replaces a part of a model or of a trainer by an override that is named on its command
line, before it builds, parallelises and compiles the model:

    --override.imports liger_ops.integrations.torchtitan.rms_norm,\\
        liger_ops.integrations.torchtitan.swiglu,liger_ops.integrations.torchtitan.cross_entropy

Parameters keep their names, so that checkpoints are the same. Under tensor parallelism the ops are
given torchtitan's DTensors, and its loss parallelism by `liger_ops.distributed.cross_entropy`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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
except ImportError as error:
    raise ImportError(
        "liger_ops.integrations.torchtitan needs torchtitan 0.3 or later, which has"
        f" --override.imports: {error}"
    ) from error

__all__ = ["cross_entropy", "rms_norm", "swiglu"]


class LigerRMSNorm(RMSNorm):
    """torchtitan's RMSNorm, by the op `rms_norm`: computed in float32, and rounded once."""

    @dataclass(kw_only=True, slots=True)
    class Config(RMSNorm.Config):
        pass

    def forward(self, x: Tensor) -> Tensor:
        return liger_ops.rms_norm(x, self.weight, self.eps, casting_mode="gemma")


class LigerFeedForward(FeedForward):
    """torchtitan's FeedForward, with the product of silu(w1(x)) and w3(x) by the op `swiglu`."""

    @dataclass(kw_only=True, slots=True)
    class Config(FeedForward.Config):
        pass

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(liger_ops.swiglu(self.w1(x), self.w3(x)))


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
    """The sum over tokens of the cross-entropy of logits (B, S, V), float32.

    Logits are a tensor, or a DTensor that is sharded over words alone, on a mesh of one dimension.
    Any other layout gets torchtitan's own function, and so does the backend "spmd_types" with
    tensor parallelism or with its type checks.
    """
    options: dict[str, Any] = {"reduction": "sum", "ignore_index": titan.IGNORE_INDEX}
    typed = get_spmd_backend() == "spmd_types" and (
        titan.spmd.is_type_checking() or titan.spmd_mesh_size("tp") > 1
    )
    if isinstance(labels, DTensor) or typed:
        return titan.cross_entropy_loss(pred, labels, global_vocab_size=global_vocab_size)
    if not isinstance(pred, DTensor):
        return liger_ops.cross_entropy(pred.flatten(0, 1), labels.flatten(0, 1), **options)
    if pred.placements != (Shard(pred.ndim - 1),):
        return titan.cross_entropy_loss(pred, labels, global_vocab_size=global_vocab_size)
    return cross_entropy_of_shards(
        pred.to_local().flatten(0, 1),
        labels.flatten(0, 1),
        group=pred.device_mesh.get_group(),
        vocab_size=pred.shape[-1],
        **options,
    )


# `exact`: a subclass has another forward, or other numbers.
@override(target=RMSNorm.Config, exact=True, description="RMSNorm by liger_ops.rms_norm")
def rms_norm(config: Any) -> Any:
    """Compute every RMSNorm by `liger_ops.rms_norm`."""
    return derive(config, LigerRMSNorm.Config)


@override(target=FeedForward.Config, exact=True, description="FeedForward by liger_ops.swiglu")
def swiglu(config: Any) -> Any:
    """Compute the activation of every FeedForward by `liger_ops.swiglu`."""
    return derive(config, LigerFeedForward.Config)


@override(target=titan.CrossEntropyLoss.Config, exact=True, description="liger_ops.cross_entropy")
def cross_entropy(config: Any) -> Any:
    """Compute the loss, of a chunk of tokens too, by `liger_ops.cross_entropy`."""
    return derive(config, LigerCrossEntropyLoss.Config)
