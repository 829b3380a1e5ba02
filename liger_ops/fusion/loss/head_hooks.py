"""Run the hooks of a head that FSDP2, DeepSpeed or tensor parallelism shards around its loss.

If FSDP2 shards the head by itself, or in a group with the last norm as accelerate does, it gathers
the head's weight in a hook before the forward. It reduces the gradient and frees the weight in
hooks that it registers there and after the forward. ZeRO-3 of DeepSpeed has hooks with these
effects on every module. Tensor parallelism makes the head's input a DTensor, and its output a
tensor.

A fused loss does not call the head: FSDP2's hooks run around the loss instead, and the loss is
given the input that tensor parallelism would make. A head with LoRA is a layer of peft, which FSDP2
may shard, and which holds the linear layer that tensor parallelism shards.
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


def has_known_hooks(head: Any) -> bool:
    """Return whether a head has hooks or a forward set on the instance, and all of them are those
    of FSDP2, DeepSpeed or a tensor-parallel style that shards the head over words."""
    if not isinstance(head, nn.Module) or head._backward_hooks or head._backward_pre_hooks:
        return False
    hooks = forward_hooks(head)
    if not hooks and "forward" not in vars(head):
        return False
    if all(gathers(hook) for hook in hooks) and "forward" not in vars(head):
        return True
    are_known = all(gathers(hook) or tensor_parallel.is_hook(hook) for hook in hooks)
    return are_known and tensor_parallel.over_words(head) is not None


def is_over_words(head: Any) -> bool:
    """Return whether a head's hooks are known, and shard it over words."""
    if isinstance(head, LoraHead):
        return is_over_words(head.base)
    return has_known_hooks(head) and (
        "forward" in vars(head)
        or any(tensor_parallel.is_hook(hook) for hook in forward_hooks(head))
    )


def keeps_words_apart(head: Any) -> bool:
    """Return whether a head returns only the logits of the rank's words."""
    sharded = tensor_parallel.over_words(head) if is_over_words(head) else None
    return sharded is not None and not sharded.gathers


def obstacle(head: Any) -> str | None:
    """Return the reason that a loss cannot run between the hooks of a head, or None."""
    if any(gathers(hook, (FSDP,)) for hook in forward_hooks(head)):
        dtype = head._get_fsdp_state()._mp_policy.output_dtype
        if dtype not in (None, torch.float32):
            return f"its head is sharded by itself, with the output_dtype {dtype}"
    return None


def call_between_hooks(
    modules: list[Any], compute: Callable[[Tensor], Tensor], hidden: Tensor
) -> Tensor:
    """Return compute(hidden), run between the hooks of FSDP2 or DeepSpeed that a call of the head
    would run.

    Args:
        modules: the head, and the modules that a call of it calls in turn.
        compute: a function of the hidden states that the hooks leave.
        hidden: the input of the head.
    """
    if not modules:
        return compute(hidden)
    head, *others = modules
    if not isinstance(head, nn.Module):
        return call_between_hooks(others, compute, hidden)
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
    loss = call_between_hooks(others, compute, *args)
    for hook in head._forward_hooks.values():
        if gathers(hook):
            changed = hook(head, args, loss)
            loss = loss if changed is None else changed
    return loss
