"""LoRA of experts by peft: the adapters become arguments of moe_experts.

peft wraps the module of the experts once for each parameter in `target_parameters`. Its forward
adds the LoRA to the weights, and sets the sums on the module. The new forward of the outermost
wrapper passes the LoRAs themselves to the forward of the experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from .. import classes
from ..assumptions import is_set_on, warn_once
from ..sharding import has_hooks, is_held_by_fsdp
from ..versions import read
from .head import NUMBERS

NAME = "experts with LoRA"
# The method of fused experts that takes moe_experts' arguments for LoRAs, then those of forward. It
# returns None for a call that the op does not compute.
ADAPTED = "_liger_ops_adapted"
# The methods of a wrapper that compute an adapted weight.
METHODS = ("_activate_lora", "get_delta_weight", "get_delta_factors", "get_param")
WRAPPER = ("peft.tuners.lora.layer", "ParamWrapper")
# Parameters that may have a LoRA -> the prefix of moe_experts' arguments for it.
PREFIXES = {"gate_up_proj": "gate_up", "up_proj": "gate_up", "down_proj": "down"}


def is_wrapper(module: Any) -> bool:
    cls = classes.class_of(module)
    return (cls.__module__, cls.__qualname__) == WRAPPER


def wrapped(module: Any) -> Any:
    """Return the module inside all wrappers."""
    while is_wrapper(module):
        module = module.base_layer
    return module


@classes.kind(NAME)
def methods(base: Any, facts: None) -> dict[str, Callable[..., Any]]:
    original = base.forward

    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        given, experts = loras(self), wrapped(self)
        adapted: Any = getattr(experts, ADAPTED, None)
        if given and adapted is None:
            given = f"its {type(experts).__name__} is not fused"
        if isinstance(given, str):
            warn_once(self, given)
        elif given:
            y = adapted(given, x, *args, **kwargs)
            if y is not None:
                return y
        return original(self, x, *args, **kwargs)

    return {"forward": forward}


def loras(wrapper: Any) -> dict[str, Any] | str:
    """Return moe_experts' arguments for the LoRAs that peft adds in a call, {} if it adds none; or
    the reason that the op does not compute them."""
    found: dict[str, Any] = {}
    layer, experts = wrapper, wrapped(wrapper)
    while layer is not experts:
        # In such a call peft's code undoes a merge, and adds nothing.
        if layer.merged or layer.disable_adapters:
            return {}
        names = [name for name in layer.active_adapters if name in layer.lora_A]
        if reason := _obstacle(layer, experts, names):
            return reason
        for name in names:
            found |= _arguments(layer, experts, name)
        layer = layer.base_layer
        if has_hooks(layer) or "forward" in vars(layer):
            return f"a {classes.class_of(layer).__name__}, which would not be called, has hooks"
    return found


def _obstacle(wrapper: Any, experts: Any, names: list[str]) -> str | None:
    parameter = wrapper.parameter_name
    if names and parameter not in PREFIXES:
        return f"{parameter} has a LoRA"
    if len(names) > 1:
        return f"{parameter} has several active adapters: {', '.join(names)}"
    is_swapped = read(wrapper, "_did_swap_in_out_features")
    if read(wrapper, "num_experts") == 1 or is_swapped is read(experts, "is_transposed"):
        return f"the LoRA of {parameter} is not one of experts in the layout of its weights"
    layers = [part[name] for name in names for part in (wrapper.lora_A, wrapper.lora_B)]
    if any(
        type(layer.weight) is not nn.Parameter and not is_held_by_fsdp(layer) for layer in layers
    ):
        return f"the LoRA of {parameter} has no plain Parameters"
    if parameter not in experts._parameters:
        return f"its {type(experts).__name__} holds no Parameter {parameter}"
    if any(type(wrapper.scaling[name]) not in NUMBERS for name in names):
        return f"the scaling of {parameter} is not a number"
    for method in METHODS:
        if is_set_on(wrapper, method):
            return f"a {classes.class_of(wrapper).__name__} has a {method} of its own"
    return None


def _arguments(wrapper: Any, experts: Any, name: str) -> dict[str, Any]:
    a, b = (part[name].weight for part in (wrapper.lora_A, wrapper.lora_B))
    E, prefix = wrapper.num_experts, PREFIXES[wrapper.parameter_name]
    dtype = experts._parameters[wrapper.parameter_name].dtype
    return {
        # The expert is the slowest index of a's rows, and the fastest of b's columns.
        f"{prefix}_lora_a": a.unflatten(0, (E, -1)).to(dtype),
        # Contiguous for the kernels: in peft's layout, an expert's neighbours are E elements apart.
        f"{prefix}_lora_b": b.unflatten(1, (-1, E)).permute(2, 0, 1).to(dtype).contiguous(),
        f"{prefix}_lora_scale": wrapper.scaling[name],
    }
