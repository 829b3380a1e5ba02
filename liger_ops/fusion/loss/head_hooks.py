"""What runs around the forward of a head that FSDP2, DeepSpeed or tensor parallelism shards.

FSDP2 gathers a head's weight in a hook that runs before its forward, if it shards the head by
itself, or in a group with the last norm, as accelerate does. It reduces the gradient and frees the
weight in hooks that it registers there and after the forward. Tensor parallelism makes the head's
input a DTensor and its output a tensor. A fused loss does not call the head: FSDP2's hooks run
around the loss instead, and the input is what tensor parallelism makes of it. A head with LoRA is a
layer of peft's, which FSDP2 may shard, that holds the linear layer that tensor parallelism shards.
ZeRO-3 of DeepSpeed has hooks on every module, which do what FSDP2's do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .. import tensor_parallel
from ..sharding import FSDP, gathers
from ..tensor_parallel import forward_hooks
from .lora import LoraHead


def are_known(head: Any) -> bool:
    """Whether a head has hooks or a forward of its own, and all of them are FSDP2's, DeepSpeed's or
    of a style that shards the head over words."""
    if not isinstance(head, nn.Module) or head._backward_hooks or head._backward_pre_hooks:
        return False
    hooks = forward_hooks(head)
    if not hooks and "forward" not in vars(head):
        return False
    if all(gathers(hook) for hook in hooks) and "forward" not in vars(head):
        return True
    known = all(gathers(hook) or tensor_parallel.is_hook(hook) for hook in hooks)
    return known and tensor_parallel.over_words(head) is not None


def are_over_words(head: Any) -> bool:
    """Whether a head's hooks are known, and shard it over words."""
    if isinstance(head, LoraHead):
        return are_over_words(head.base)
    return are_known(head) and (
        "forward" in vars(head)
        or any(tensor_parallel.is_hook(hook) for hook in forward_hooks(head))
    )


def keep_words_apart(head: Any) -> bool:
    """Whether a head returns the logits of the rank's words alone."""
    sharded = tensor_parallel.over_words(head) if are_over_words(head) else None
    return sharded is not None and not sharded.gathers


def obstacle(head: Any) -> str | None:
    """Reason that a loss cannot run in the place of the head, or None."""
    if any(gathers(hook, (FSDP,)) for hook in forward_hooks(head)):
        dtype = head._get_fsdp_state()._mp_policy.output_dtype
        if dtype not in (None, torch.float32):
            return f"its head is sharded by itself, with the output_dtype {dtype}"
    return None


def called(modules: list[Any], compute: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    """compute(hidden), between the hooks of FSDP2 or DeepSpeed that a call of the head would run.

    modules: the head, and what it calls in turn.
    """
    if not modules:
        return compute(hidden)
    head, *others = modules
    if not isinstance(head, nn.Module):
        return called(others, compute, hidden)
    # A hook may return None, which changes nothing.
    args: Any = (hidden,)
    for key, hook in head._forward_pre_hooks.items():
        if not gathers(hook):
            continue
        if key in head._forward_pre_hooks_with_kwargs:
            changed = hook(head, args, {})
            args = args if changed is None else changed[0]
        else:
            changed = hook(head, args)
            args = args if changed is None else changed
    loss = called(others, compute, *args)
    for hook in head._forward_hooks.values():
        if gathers(hook):
            changed = hook(head, args, loss)
            loss = loss if changed is None else changed
    return loss
