"""Which linear layer the head of a model is at a call."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def head_of(model: nn.Module, path: str, sharded: bool = False) -> nn.Linear | str:
    """The torch.nn.Linear whose product with its weight a model's head returns, or why there is
    none.

    Args:
        model: it, or what has been made of it.
        path: from it to its head.
        sharded: whether the layer's parameters may be DTensors, which FSDP2 makes plain for a call.
    """
    *holders, _ = path.split(".")
    holder: Any = model
    for name in holders:
        holder = getattr(holder, name, None)
        reason = _what_it_does_beside(holder, f"its {name}")
        if reason is not None:
            return reason
    head = child_of(model, path)
    while True:
        reason = _what_it_does_beside(head, "its head")
        if reason is not None:
            return reason
        if type(head) is nn.Linear:
            return _with_plain_tensors(head, sharded)
        held = _held_by_peft(head)
        if held is None:
            return f"its head is a {qualified_name(type(head))}, not a torch.nn.Linear"
        head = held


def child_of(model: Any, path: str) -> Any:
    """The module at a path, or None."""
    for name in path.split("."):
        model = getattr(model, name, None)
    return model


def qualified_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}".removeprefix("builtins.")


def _what_it_does_beside(module: Any, what: str) -> str | None:
    if not isinstance(module, nn.Module):
        return None
    if "forward" in vars(module):
        return f"{what} has a forward of its own"
    if module._compiled_call_impl is not None:
        return f"{what} is compiled by itself"
    for hooks in HOOKS:
        if getattr(module, hooks):
            return f"{what} has hooks"
    return None


def _with_plain_tensors(head: nn.Linear, sharded: bool) -> nn.Linear | str:
    for tensor in (head.weight, head.bias):
        # A replica of DataParallel holds plain tensors, a model that torch.export traces fake ones.
        if tensor is None or type(tensor) in (nn.Parameter, Tensor, FakeTensor):
            continue
        if not (sharded and type(tensor).__name__ == "DTensor"):
            return f"its head holds a {type(tensor).__name__}, not a plain tensor"
    return head


def _held_by_peft(head: Any) -> Any:
    """The module whose output a wrapper of peft returns as it is, or None.

    peft is recognised by the names of its classes: it need not be installed. Its
    ModulesToSaveWrapper calls the copy of the active adapter, and the original where its adapters
    are disabled or it has no copy for the active one. Its LoRA Linear calls the base layer alone
    while the adapters are merged into the base layer's weight, or disabled. Disabled and merged, it
    would first take them out of the weight, which is its own to do.
    """
    name = qualified_name(type(head))
    if name == "peft.utils.other.ModulesToSaveWrapper":
        active = head.active_adapters
        if head.disable_adapters or not active or active[0] not in head.modules_to_save:
            return head.original_module
        return head.modules_to_save[active[0]]
    if name == "peft.tuners.lora.layer.Linear" and head.merged != head.disable_adapters:
        return head.base_layer
    return None
