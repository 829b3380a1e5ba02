"""Use a repository that `build` wrote, with the package `kernels`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import layers

# Layers that no model of transformers asks for by name. A model gets them by `use_more`.
UNNAMED = ("SwiGLUMLP", "ForCausalLMLoss")
# The name of an experts implementation.
EXPERTS = "liger-hub"
ATTENTION = "liger-hub"
PROJECTIONS = ({"gate_proj", "up_proj", "down_proj"}, {"gate_up_proj", "down_proj"})


def mapping(folder: Path, device: str, names: Iterable[str] = layers.__all__) -> dict[str, Any]:
    """Return the mapping for `kernels.use_kernel_mapping` that gives each name its layer.

    Args:
        folder: the repository.
        device: as `kernels.kernelize` names it: "cpu", "cuda", "rocm" or "npu".
        names: the layers.
    """
    from kernels import LocalLayerRepository

    return {name: {device: LocalLayerRepository(folder, layer_name=name)} for name in names}


def kernelize(model: Any, folder: Path, with_more: bool = True, compiled: bool = True) -> None:
    """Give a transformers model the layers of a repository, for training.

    Args:
        model: it is changed.
        folder: the repository.
        with_more: also what the model does not ask for by name, as `use_more` describes.
        compiled: whether the model is compiled afterwards.
    """
    from kernels import Mode, use_kernel_mapping
    from kernels import kernelize as replace_forwards

    if with_more:
        use_more(model, folder)
    mode = Mode.TRAINING | Mode.TORCH_COMPILE if compiled else Mode.TRAINING
    # PyTorch calls AMD's GPUs cuda, too.
    device = next(model.parameters()).device.type
    device = "rocm" if device == "cuda" and torch.version.hip else device
    names = [name for name in layers.__all__ if with_more or name not in UNNAMED]
    with use_kernel_mapping(mapping(folder, device, names), inherit_mapping=False):
        replace_forwards(model, mode=mode, device=device)


def use_more(model: Any, folder: Path) -> None:
    """Prepare a transformers model for what it does not ask for by name: give its gated MLPs and
    its loss the names of their layers, by which `kernels.kernelize` finds them, and have
    `experts_forward` compute its experts. The names are the classes', for all models of the
    process."""
    from kernels import (
        get_local_kernel,
        replace_kernel_forward_from_hub,
        use_kernel_forward_from_hub,
    )
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    from transformers.loss.loss_utils import ForCausalLMLoss

    for module in model.modules():
        children = {name for name, _ in module.named_children()}
        if any(projections <= children for projections in PROJECTIONS) and not hasattr(
            type(module), "kernel_layer_name"
        ):
            replace_kernel_forward_from_hub(type(module), "SwiGLUMLP")
    if model.loss_function is ForCausalLMLoss:
        # Not by the property loss_function: nn.Module would make a child of that name.
        model._loss_function = use_kernel_forward_from_hub("ForCausalLMLoss")(ForCausalLMLoss)
    if any(hasattr(module, "_apply_gate") for module in model.modules()):
        ALL_EXPERTS_FUNCTIONS.register(EXPERTS, get_local_kernel(folder).experts_forward)
        model.set_experts_implementation(EXPERTS)


def use_attention(model: Any, folder: Path) -> None:
    """Have the attention and masks of a transformers model computed by a repository.

    Raises:
        ValueError: the model's attention shows keys that `attention` cannot tell: transformers does
            not compute it by FlashAttention.
    """
    from kernels import get_local_kernel
    from transformers import AttentionInterface, AttentionMaskInterface

    if not model._supports_flash_attn:
        raise ValueError(f"use_attention: {type(model).__name__} does not support FlashAttention")
    kernel = get_local_kernel(folder)
    AttentionInterface.register(ATTENTION, kernel.attention)
    AttentionMaskInterface.register(ATTENTION, kernel.attention_mask)
    model.set_attn_implementation(ATTENTION)


def restore(model: nn.Module) -> None:
    """Give the layers of a model, and the functions that it shares with others of its kind, their
    own forwards again."""
    for module in model.modules():
        for layer in (module, *getattr(module, "_kernel_funcs", {}).values()):
            if hasattr(type(layer), "kernel_layer_name"):
                vars(layer).pop("forward", None)
