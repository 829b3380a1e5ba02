"""The ops behind Megatron-Core's norms, cross-entropies and SwiGLU.

from liger_ops.integrations import megatron

megatron.install()  # in each process, before it builds the model
"""

from __future__ import annotations

import importlib
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from .. import cross_entropy, distributed, layer_norm
from .. import swiglu as swiglu_op
from ..nn import LayerNorm, RMSNorm
from .replaced import Replaced

PACKAGE = "megatron"
BLOCK, BLOCK_NORM = "megatron.core.transformer.transformer_block", "LayerNormImpl"
TORCH_NORM = "megatron.core.transformer.torch_norm", "WrappedTorchNorm"
APEX_NORM = "megatron.core.fusions.fused_layer_norm", "FusedLayerNorm"
LOSS = "megatron.core.tensor_parallel.cross_entropy", "vocab_parallel_cross_entropy"
FUSED_LOSS = "megatron.core.fusions.fused_cross_entropy", "fused_vocab_parallel_cross_entropy"
SWIGLU = "megatron.core.fusions.fused_bias_swiglu", "bias_swiglu_impl"

_replaced = Replaced()
# Megatron's own functions, which serve what the ops do not take.
_own: dict[tuple[str, str], Any] = {}


def install(*, norms: bool = True, cross_entropy: bool = True, swiglu: bool = True) -> None:
    """Let Megatron-Core use `rms_norm`, `layer_norm`, `cross_entropy` and `swiglu`.

    It applies to this process. Call it before the model is built: a model keeps its norms.

    - norms: `WrappedTorchNorm` and Apex's `FusedLayerNorm`, which `LocalSpecProvider` and the local
      layer specs name, and `LayerNormImpl`, the last norm of a block, become modules of
      `liger_ops.nn`. Their parameters have the same names. They also take what `WrappedTorchNorm`
      refuses: `sequence_parallel`, `layernorm_zero_centered_gamma`, `persist_layer_norm` and
      `memory_efficient_layer_norm`; the last two change nothing.
    - cross_entropy: `fused_vocab_parallel_cross_entropy` (`cross_entropy_loss_fusion=True`, and the
      implementation "native") and, without fusion, `vocab_parallel_cross_entropy`
      become `liger_ops.cross_entropy` or, with several tensor-parallel ranks,
      `liger_ops.distributed.cross_entropy`. The logits are not overwritten. Gradients have the
      precision of the logits; Megatron's fused function rounds them to bfloat16. A token whose
      target is no word of the vocabulary has the loss 0 and no gradient; Megatron computes some
      loss, for its user to mask.
    - swiglu: `bias_swiglu_impl` (`bias_activation_fusion=True`) becomes `liger_ops.swiglu`.

    The ops are deterministic. Megatron's `deterministic_mode` refuses
    `cross_entropy_loss_fusion=True` by its name: leave it False, and the loss is the op's.

    Megatron's own functions still serve label smoothing, and a SwiGLU with fp8_input_store,
    cpu_offload_input or clamp_value. The layers of Transformer Engine, its cross-entropy
    (`cross_entropy_fusion_impl="te"`) and the SwiGLU of routed experts are left.

    `uninstall` undoes it. A second call does nothing more. The functions are replaced in every
    loaded module of the package megatron; code of other packages that imported one by name before
    the call keeps Megatron's.

    Raises:
        ImportError: Megatron-Core is not installed.
        RuntimeError: this version of Megatron-Core lacks one of the names; nothing is changed.

    Example:
        >>> from liger_ops.integrations import megatron
        >>> megatron.install()  # doctest: +SKIP
    """
    if _replaced:
        return
    importlib.import_module("megatron.core")
    values: dict[tuple[str, str], Any] = {}
    if norms:
        values |= {
            key: type(key[1], (MegatronNorm,), {"place": key}) for key in (TORCH_NORM, APEX_NORM)
        }
    if cross_entropy:
        values |= {
            LOSS: vocab_parallel_cross_entropy,
            FUSED_LOSS: fused_vocab_parallel_cross_entropy,
        }
    if swiglu:
        values[SWIGLU] = bias_swiglu_impl
    block = importlib.import_module(BLOCK)
    own = {key: getattr(importlib.import_module(key[0]), key[1], None) for key in values}
    if norms:
        own[BLOCK, BLOCK_NORM] = getattr(block, BLOCK_NORM, None)
    missing = [".".join(key) for key, value in own.items() if value is None]
    if missing:
        raise RuntimeError(
            f"liger_ops.integrations.megatron.install: {missing[0]} must exist, as in"
            " Megatron-Core 0.16; this version does not have it"
        )
    _own.update(own)
    for key, value in values.items():
        _replaced.everywhere(PACKAGE, own[key], value)
    # The last norm of a block is Transformer Engine's where that is installed.
    if norms and getattr(block, BLOCK_NORM) is own[BLOCK, BLOCK_NORM]:
        _replaced.set(block, BLOCK_NORM, values[TORCH_NORM])


def uninstall() -> None:
    """Restore Megatron's own functions and classes. Does nothing if `install` was not called.

    A model that was built in between keeps its norms.
    """
    _replaced.undo()


class MegatronNorm:
    """Replacement of a class of Megatron's that makes the norm which the configuration names."""

    place: tuple[str, str]

    def __new__(
        cls, config: Any, hidden_size: int, eps: float = 1e-5, *unused: Any, **unused_too: Any
    ) -> Any:
        """Return an RMSNorm or LayerNorm. Megatron does not use the other arguments either."""
        norm: nn.Module
        centred = config.layernorm_zero_centered_gamma
        if config.normalization == "RMSNorm":
            # As torch.nn.RMSNorm: in float32, rounded once.
            norm = RMSNorm(hidden_size, eps, float(centred), casting_mode="gemma")
        elif config.normalization == "LayerNorm":
            norm = (ZeroCentredLayerNorm if centred else LayerNorm)(hidden_size, eps)
        else:
            return _own[cls.place](config, hidden_size, eps, *unused, **unused_too)
        for parameter in norm.parameters():
            # Megatron adds up the gradients of such parameters over the tensor-parallel ranks.
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm


class ZeroCentredLayerNorm(LayerNorm):
    """LayerNorm with the weight 1 + weight, as Megatron's `layernorm_zero_centered_gamma`."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        return layer_norm(input, self.weight + 1, self.bias, self.eps)


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor, target: Tensor, label_smoothing: float = 0.0,
    tp_group: ProcessGroup | None = None,
) -> Tensor:  # fmt: skip
    """Compute the loss of each token, as Megatron's function of this name."""
    if label_smoothing > 0:
        # Megatron smooths over a rank's own words, with a factor of its own.
        given = () if tp_group is None else (tp_group,)
        return _own[LOSS](vocab_parallel_logits, target, label_smoothing, *given)
    if tp_group is None:
        from megatron.core.parallel_state import get_tensor_model_parallel_group

        tp_group = get_tensor_model_parallel_group()
    return fused_vocab_parallel_cross_entropy(vocab_parallel_logits, target, tp_group)


def fused_vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor, target: Tensor, tp_group: ProcessGroup
) -> Tensor:
    """Compute the loss of each token, as Megatron's function of this name.

    Args:
        vocab_parallel_logits: (S, B, V / ranks), the logits of the rank's words.
        target: (S, B), integers.
        tp_group: the ranks that have the words.

    Returns:
        (S, B), float32.
    """
    logits, ranks = vocab_parallel_logits, tp_group.size()
    words = logits.shape[-1] * ranks
    target = target.masked_fill((target < 0) | (target >= words), -100)
    if ranks == 1:
        return cross_entropy(logits, target, reduction="none")
    options: Any = {"reduction": "none", "group": tp_group, "vocab_size": words}
    return distributed.cross_entropy(logits, target, **options)


def bias_swiglu_impl(input: Tensor, bias: Tensor | None, *options: Any, **named: Any) -> Tensor:
    """Apply SwiGLU to input, whose halves are gate and up, plus bias.

    The options are fp8_input_store, cpu_offload_input and, in later versions, clamp_value.
    Megatron's own function serves them.
    """
    if any(option not in (None, False) for option in (*options, *named.values())):
        return _own[SWIGLU](input, bias, *options, **named)
    return swiglu_op(input if bias is None else input + bias)
