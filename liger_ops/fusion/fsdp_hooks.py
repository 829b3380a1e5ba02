"""A head that FSDP2 shards by itself, or in a group with the last norm, as accelerate does.

FSDP2 gathers its weight in a hook that runs before the head's forward, and reduces the gradient and
frees the weight in hooks that it registers there and after the forward. A fused loss does not call
the head: these hooks run around the loss instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

_FSDP = "torch.distributed.fsdp._fully_shard"


def gathers(head: Any) -> bool:
    """Whether a module has hooks, and all of them are forward hooks of FSDP2."""
    if not isinstance(head, nn.Module) or head._backward_hooks or head._backward_pre_hooks:
        return False
    hooks = [*head._forward_pre_hooks.values(), *head._forward_hooks.values()]
    return bool(hooks) and all(
        str(getattr(hook, "__module__", "")).startswith(_FSDP) for hook in hooks
    )


def obstacle(head: Any) -> str | None:
    """Reason that the hooks of FSDP2 cannot run around the loss, or None."""
    dtype = head._get_fsdp_state()._mp_policy.output_dtype
    if dtype not in (None, torch.float32):
        return f"its head is sharded by itself, with the output_dtype {dtype}"
    return None


def called(head: Any, compute: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    """compute(hidden), between the hooks that a call of the head would run."""
    if not gathers(head):
        return compute(hidden)
    # A hook may return None, which changes nothing.
    args: Any = (hidden,)
    for hook in head._forward_pre_hooks.values():
        # FSDP2's take keyword arguments too.
        changed = hook(head, args, {})
        args = args if changed is None else changed[0]
    loss = compute(*args)
    for hook in head._forward_hooks.values():
        changed = hook(head, args, loss)
        loss = loss if changed is None else changed
    return loss
