"""Parameters that FSDP2, tensor parallelism or DeepSpeed holds.

`fully_shard` remembers the module and the name of every parameter that it shards. It sets whole
tensors there for a forward, and its shards, which are DTensors, after it. Tensor parallelism makes
parameters DTensors, and registers hooks or sets a forward on the instance. ZeRO-3 of DeepSpeed sets
the data of a parameter for a forward, and an empty tensor after it; the parameter has an attribute
with its shape. Such a module is fused in place, and is probed with whole parameters. Hooks of FSDP2
and DeepSpeed only gather parameters; a module with other hooks is left.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from . import classes, tensor_parallel
from .probing import HOOKS, NotAnOp

# The modules whose hooks gather the parameters of a module for a call.
FSDP = "torch.distributed.fsdp._fully_shard"
_GATHER = (FSDP, "deepspeed.")
# Hooks of transformers that record results, such as those of routers.
_RECORD = "transformers.utils.output_capturing"

# Prefix of the attributes in which FSDP2 keeps its state in a module.
STATE = "__composable_api_state"

# (module, name of a parameter) -> the tensor that is there in a forward, on the meta device.
Whole = dict[tuple[nn.Module, str], nn.Parameter]


def is_managed(module: nn.Module) -> bool:
    """Return whether FSDP, tensor parallelism or DeepSpeed holds a module's parameters."""
    parameters = [parameter for parameter in module._parameters.values() if parameter is not None]
    by_style = bool(parameters) and tensor_parallel.style_of(module) is not None
    return is_held_by_fsdp(module) or by_style or any(map(_is_sharded, parameters))


def shape_of(parameter: Tensor) -> torch.Size:
    """Return the shape of a parameter in a forward."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


def is_held_by_fsdp(module: nn.Module) -> bool:
    """Return whether FSDP holds a module's parameters."""
    has_own = any(parameter is not None for parameter in module._parameters.values())
    return has_own and getattr(module, "_is_fsdp_managed_module", False)


def whole_parameters(model: nn.Module) -> Whole:
    """Return the whole tensors of a forward, on the meta device: those that FSDP2 sets in the place
    of shards, that DeepSpeed gathers, or that tensor parallelism replicates."""
    whole_tensors = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if _is_replicated(parameter) or _is_partitioned(parameter):
                assert parameter is not None
                whole = torch.empty(shape_of(parameter), dtype=parameter.dtype, device="meta")
                whole_tensors[module, name] = nn.Parameter(whole)
    for group in _groups(model):
        for fsdp_param in group.fsdp_params:
            if fsdp_param.is_dtensor and not _are_replicated(
                _tensor_parallel_placements(fsdp_param)
            ):
                continue
            info = fsdp_param._module_info
            dtype = group.mp_policy.param_dtype or fsdp_param.sharded_param.dtype
            whole = nn.Parameter(torch.empty(fsdp_param._orig_size, dtype=dtype, device="meta"))
            whole_tensors[info.module, info.param_name] = whole
            for shared in zip(info.shared_modules, info.shared_param_names, strict=True):
                whole_tensors[shared] = whole
    return whole_tensors


def with_whole_parameters(module: nn.Module, whole: Whole) -> nn.Module:
    """Return a copy of a module with the parameters of a forward, without hooks and styles.

    Raises:
        NotAnOp: a parameter is sharded in a forward too.
    """
    parameters: dict[str, nn.Parameter | None] = {}
    by_fsdp = is_held_by_fsdp(module)
    for name, parameter in module._parameters.items():
        plain = None if by_fsdp or _is_sharded(parameter) else parameter
        parameters[name] = None if parameter is None else whole.get((module, name), plain)
        if parameter is not None and parameters[name] is None:
            raise NotAnOp(f"{name} is held by FSDP, or sharded, and no forward here has the whole")
    stand_in: nn.Module = object.__new__(classes.class_of(module))
    # FSDP2's state in a module refers to the sharded model, and cannot be copied.
    kept = {name: value for name, value in vars(module).items() if not name.startswith(STATE)}
    vars(stand_in).update(kept, _parameters=parameters)
    vars(stand_in).update({hooks: OrderedDict() for hooks in HOOKS})
    if tensor_parallel.style_of(module) is not None:
        del vars(stand_in)["forward"]
    return stand_in


def _groups(model: nn.Module) -> Iterator[Any]:
    # If torch.distributed.fsdp was never imported, it holds no parameters.
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    mixin = getattr(fsdp, "FSDPModule", None)
    if mixin is None:
        return
    for module in model.modules():
        if isinstance(module, mixin):
            state = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)
            if groups is None:
                # Before torch 2.13 a module has one group, or none if it has no parameters.
                groups = [state._fsdp_param_group] if state._fsdp_param_group else []
            yield from groups


def _tensor_parallel_placements(fsdp_param: Any) -> Any:
    # Before torch 2.13 the attribute has the other name.
    spec = getattr(fsdp_param, "_unsharded_dtensor_spec", None) or fsdp_param._tp_spec
    return spec.placements


def _is_sharded(parameter: Any) -> bool:
    return _is_dtensor(parameter) or _is_partitioned(parameter)


def _is_dtensor(parameter: Any) -> bool:
    return type(parameter).__name__ == "DTensor"


def _is_partitioned(parameter: Any) -> bool:
    """Return whether ZeRO-3 of DeepSpeed holds a parameter, whose data may be an empty tensor."""
    return hasattr(parameter, "ds_shape")


def _is_replicated(parameter: Any) -> bool:
    return _is_dtensor(parameter) and _are_replicated(parameter.placements)


def _are_replicated(placements: Any) -> bool:
    return all(placement.is_replicate() for placement in placements)


def has_hooks(module: nn.Module) -> bool:
    """Return whether a call of a module, or its backward, runs hooks of the module."""
    own_backward = module._backward_hooks or module._backward_pre_hooks
    return bool(module._forward_hooks or module._forward_pre_hooks or own_backward)


def only_gather(module: nn.Module) -> bool:
    """Return whether a module has no parameters, and only hooks that gather its own parameters."""
    if module._backward_hooks or module._backward_pre_hooks or module._parameters:
        return False
    return all(map(gathers, tensor_parallel.forward_hooks(module)))


def keep_results(module: nn.Module) -> bool:
    """Return whether no hook of a module may change the module's result."""
    return all(gathers(hook, (*_GATHER, _RECORD)) for hook in module._forward_hooks.values())


def gathers(hook: Any, packages: tuple[str, ...] = _GATHER) -> bool:
    """Return whether a hook is one of these packages, which gather parameters."""
    return str(getattr(hook, "__module__", "")).startswith(packages)
