"""LoRA of experts by peft, which wraps their module for each parameter in `target_parameters`.

peft's forward forms the weights with the LoRA, and sets them on the module. The new forward of the
outermost wrapper gives the experts' forward the LoRAs themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ... import classes
from ...assumptions import is_set_on, say_once
from ...loss.lora import NUMBERS
from ...sharding import has_hooks, is_held_by_fsdp
from ...versions import read

NAME = "experts with LoRA"
# The method of fused experts that takes arguments of moe_experts for LoRAs, then those of forward.
# It returns None where the op does not compute what the module's code does.
ADAPTED = "_liger_ops_adapted"
# The methods of a wrapper that form a weight.
METHODS = ("_activate_lora", "get_delta_weight", "get_delta_factors", "get_param")
WRAPPER = ("peft.tuners.lora.layer", "ParamWrapper")
# The parameters that may have a LoRA, and the names of its arguments of moe_experts.
PREFIXES = {"gate_up_proj": "gate_up", "up_proj": "gate_up", "down_proj": "down"}


def is_wrapper(module: Any) -> bool:
    cls = classes.class_of(module)
    return (cls.__module__, cls.__qualname__) == WRAPPER


def wrapped(module: Any) -> Any:
    """The module in all wrappers."""
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
            say_once(self, given)
        elif given:
            y = adapted(given, x, *args, **kwargs)
            if y is not None:
                return y
        return original(self, x, *args, **kwargs)

    return {"forward": forward}


def loras(wrapper: Any) -> dict[str, Any] | str:
    """The arguments of moe_experts for the LoRAs that peft adds in a call, without any if it adds
    none; or why the op does not compute them."""
    found: dict[str, Any] = {}
    one, experts = wrapper, wrapped(wrapper)
    while one is not experts:
        # peft's code undoes a merge, and adds nothing.
        if one.merged or one.disable_adapters:
            return {}
        names = [name for name in one.active_adapters if name in one.lora_A]
        if reason := _obstacle(one, experts, names):
            return reason
        for name in names:
            found |= _arguments(one, experts, name)
        one = one.base_layer
        if has_hooks(one) or "forward" in vars(one):
            return f"a {classes.class_of(one).__name__}, which would not be called, has hooks"
    return found


def _obstacle(one: Any, experts: Any, names: list[str]) -> str | None:
    parameter = one.parameter_name
    if names and parameter not in PREFIXES:
        return f"{parameter} has a LoRA"
    if len(names) > 1:
        return f"{parameter} has several active adapters: {', '.join(names)}"
    is_swapped = read(one, "_did_swap_in_out_features")
    if read(one, "num_experts") == 1 or is_swapped is read(experts, "is_transposed"):
        return f"the LoRA of {parameter} is not one of experts in the layout of its weights"
    layers = [part[name] for name in names for part in (one.lora_A, one.lora_B)]
    if any(type(of.weight) is not nn.Parameter and not is_held_by_fsdp(of) for of in layers):
        return f"the LoRA of {parameter} has no plain Parameters"
    if parameter not in experts._parameters:
        return f"its {type(experts).__name__} holds no Parameter {parameter}"
    if any(type(one.scaling[name]) not in NUMBERS for name in names):
        return f"the scaling of {parameter} is not a number"
    for method in METHODS:
        if is_set_on(one, method):
            return f"a {classes.class_of(one).__name__} has a {method} of its own"
    return None


def _arguments(one: Any, experts: Any, name: str) -> dict[str, Any]:
    a, b = (part[name].weight for part in (one.lora_A, one.lora_B))
    E, prefix = one.num_experts, PREFIXES[one.parameter_name]
    dtype = experts._parameters[one.parameter_name].dtype
    return {
        # The expert is the slowest index of a's rows, and the fastest of b's columns.
        f"{prefix}_lora_a": a.unflatten(0, (E, -1)).to(dtype),
        # A kernel reads what is an expert's, of which neighbours are E elements apart.
        f"{prefix}_lora_b": b.unflatten(1, (-1, E)).permute(2, 0, 1).to(dtype).contiguous(),
        f"{prefix}_lora_scale": one.scaling[name],
    }
