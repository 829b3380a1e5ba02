"""Find the linear layer that is the head of a model in a call, and run the hooks that FSDP2,
DeepSpeed or tensor parallelism put around it.

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

from ...torch_private import FakeTensor
from .. import classes, tensor_parallel
from ..assumptions import is_set_on
from ..lora.head import LAYER, LoraHead, adapters_of
from ..sharding import FSDP, gathers, has_hooks, shape_of
from ..tensor_parallel import OverWords, forward_hooks


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


def head_of(model: nn.Module, path: str, sharded: bool = False) -> nn.Linear | LoraHead | str:
    """Return the torch.nn.Linear that computes the output of a model's head, with the LoRA that is
    added to it if there is one, or the reason that there is no such layer.

    Args:
        model: the model, or an object made from it.
        path: the path from the model to its head.
        sharded: whether the layer's parameters may be DTensors, in whose place FSDP2 sets plain
            tensors for a call.
    """
    *holders, _ = path.split(".")
    holder: Any = model
    for name in holders:
        holder = getattr(holder, name, None)
        reason = call_side_effect(holder, f"its {name}")
        if reason is not None:
            return reason
    return _linear_in(child_of(model, path), sharded)


def modules_called(model: nn.Module, path: str) -> list[Any]:
    """Return the modules that a call of a head runs, from the one at `path` to the linear layer."""
    modules = [child_of(model, path)]
    while True:
        inner = _called_by_peft(modules[-1])
        inner = getattr(modules[-1], "base_layer", None) if inner is None else inner
        if inner is None:
            return modules
        modules.append(inner)


def _linear_in(head: Any, sharded: bool) -> nn.Linear | LoraHead | str:
    while True:
        hooked = has_known_hooks(head)
        reason = call_side_effect(head, "its head", allow_sharding=hooked)
        if reason is None and hooked:
            reason = obstacle(head)
        if reason is not None:
            return reason
        # FSDP2's hooks of a module gather what the modules in it hold, too.
        sharded = sharded or hooked
        cls = _class_of(head)
        if cls is nn.Linear:
            return _with_plain_tensors(head, sharded)
        inner = _called_by_peft(head)
        if inner is not None:
            head = inner
        elif qualified_name(cls) == LAYER:
            return _with_lora(head, sharded)
        else:
            return f"its head is a {qualified_name(cls)}, not a torch.nn.Linear"


def _with_lora(layer: Any, sharded: bool) -> nn.Linear | LoraHead | str:
    base = _linear_in(layer.base_layer, sharded)
    adapters = adapters_of(layer)
    if isinstance(base, str):
        return base
    if isinstance(adapters, str):
        return adapters
    if isinstance(base, LoraHead):
        return f"its head is a {LAYER} of another"
    for name in adapters.names:
        reason = call_side_effect(layer.lora_dropout[name], "an adapter of its head")
        if reason is not None:
            return reason
    over_words = tensor_parallel.over_words(base) if is_over_words(base) else None
    for lora_a, lora_b in adapters.layers:
        if over_words is not None:
            reason = _sharded_adapter_obstacle(lora_a, lora_b, base, over_words)
            if reason is not None:
                return reason
            continue
        for part in (lora_a, lora_b):
            reason = call_side_effect(part, "an adapter of its head")
            if reason is not None:
                return reason
            plain = _with_plain_tensors(part, sharded)
            if isinstance(plain, str):
                return plain
    return LoraHead(layer, base, adapters.names) if adapters.names else base


def _sharded_adapter_obstacle(
    lora_a: nn.Linear, lora_b: nn.Linear, head: nn.Linear, over_words: OverWords
) -> str | None:
    """Return the reason to leave an adapter of a head that is sharded over words, or None.

    lora_A is called as it is, with any style. lora_B must be sharded as the head is: by the head's
    style; or it is whole, and the head gathers the logits of all words. If peft added the adapter
    to a head that was sharded already, lora_B has the words of the rank.
    """
    what = "an adapter of its head"
    is_styled = tensor_parallel.has_style(lora_a)
    reason = call_side_effect(lora_a, what, allow_sharding=is_styled)
    is_styled = tensor_parallel.has_style(lora_b)
    reason = reason or call_side_effect(lora_b, what, allow_sharding=is_styled)
    if reason is not None:
        return reason
    if is_styled:
        sharded = tensor_parallel.over_words(lora_b)
        is_sharded_alike = sharded is not None and sharded.gathers == over_words.gathers
    else:
        is_sharded_alike = over_words == OverWords(None, True)
    if not is_sharded_alike or lora_b.weight.shape[0] != head.weight.shape[0]:
        return f"{what} is not sharded over words as its head is"
    return None


def child_of(model: Any, path: str) -> Any:
    """Return the module at a path, or None."""
    for name in path.split("."):
        model = getattr(model, name, None)
    return model


def _class_of(module: Any) -> type:
    # FSDP2 gives a class of its own to a module that it shards by itself, and so does `fuse` to
    # the head of a model.
    return classes.class_before(module) if isinstance(module, nn.Module) else type(module)


def qualified_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}".removeprefix("builtins.")


def call_side_effect(module: Any, what: str, allow_sharding: bool = False) -> str | None:
    """Return what a call of a module does besides its forward, as a reason, or None.

    With `allow_sharding`, hooks and a forward that is set on the instance are allowed: the caller
    has checked that they are those of sharding.
    """
    if not isinstance(module, nn.Module):
        return None
    if is_set_on(module, "forward") and not allow_sharding:
        return f"{what} has a forward of its own"
    if module._compiled_call_impl is not None:
        return f"{what} is compiled by itself"
    return f"{what} has hooks" if has_hooks(module) and not allow_sharding else None


def _with_plain_tensors(head: nn.Linear, sharded: bool) -> nn.Linear | str:
    weight, bias = (parameter_of(head, name) for name in ("weight", "bias"))
    for tensor in (weight, bias):
        # A replica of DataParallel holds plain tensors; under torch.export they are fake.
        if tensor is None or type(tensor) in (nn.Parameter, Tensor, FakeTensor):
            continue
        if not (sharded and type(tensor).__name__ == "DTensor"):
            return f"its head holds a {type(tensor).__name__}, not a plain tensor"
    if len(shape_of(weight)) != 2:
        return "its head holds a part of its weight, as after FullyShardedDataParallel"
    return head


def parameter_of(head: nn.Linear, name: str) -> Any:
    parameters = head._parameters
    if torch.compiler.is_compiling() or type(parameters) is dict:
        return getattr(head, name)
    # DeepSpeed's dictionary gathers a parameter that is read in a forward of another module.
    return dict.get(parameters, name)


def _called_by_peft(head: Any) -> Any:
    """Return the module whose output a wrapper of peft returns unchanged, or None.

    peft is recognised by its class names, and need not be installed. Its ModulesToSaveWrapper calls
    the copy of the active adapter, or the original if adapters are disabled or the active adapter
    has no copy. Its LoRA Linear calls only the base layer while the adapters are disabled, or
    merged into the base layer's weight. If disabled and merged, its next call first unmerges them,
    which must be left to peft.
    """
    name = qualified_name(_class_of(head))
    if name == "peft.utils.other.ModulesToSaveWrapper":
        active = head.active_adapters
        if head.disable_adapters or not active or active[0] not in head.modules_to_save:
            return head.original_module
        return head.modules_to_save[active[0]]
    if name == LAYER and head.merged != head.disable_adapters:
        return head.base_layer
    return None
