"""Hooks of FSDP2 and DeepSpeed, which gather the parameters of a module for a call."""

from __future__ import annotations

from typing import Any

from torch import nn

from .tensor_parallel import forward_hooks

FSDP = "torch.distributed.fsdp._fully_shard"
_GATHER = (FSDP, "deepspeed.")
# Hooks of transformers that record results, such as those of routers.
_RECORD = "transformers.utils.output_capturing"


def has_hooks(module: nn.Module) -> bool:
    """Whether a call of a module, or its backward, runs hooks of the module."""
    own_backward = module._backward_hooks or module._backward_pre_hooks
    return bool(module._forward_hooks or module._forward_pre_hooks or own_backward)


def only_gather(module: nn.Module) -> bool:
    """Whether the hooks of a module gather its own parameters, of which it has none."""
    if module._backward_hooks or module._backward_pre_hooks or module._parameters:
        return False
    return all(map(gathers, forward_hooks(module)))


def keep_results(module: nn.Module) -> bool:
    """Whether no hook of a module is one that may change what the module returns."""
    return all(gathers(hook, (*_GATHER, _RECORD)) for hook in module._forward_hooks.values())


def gathers(hook: Any, packages: tuple[str, ...] = _GATHER) -> bool:
    return str(getattr(hook, "__module__", "")).startswith(packages)
