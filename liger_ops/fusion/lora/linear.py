"""LoRA of linear layers: peft's layer calls lora_linear, also for the activation of a gated MLP.

The new forward reads peft's layer in each call, as the loss reads an adapted head: the adapter, its
factor and the parameters of its modules, which it does not call. Peft's own code runs where the op
does not compute the same: for merged, disabled or several adapters, dropout, and variants of LoRA.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ... import library
from ...ops.activations.tiled_mlp import ACTIVATIONS
from ...ops.lora_linear import lora_linear
from ...torch_private import FakeTensor
from .. import classes, sharding
from ..assumptions import is_set_on, warn_once
from ..layers.installed import ModuleFacts
from ..layers.program import CHILD, OP, Program, ProgramStep, Value
from ..loss.head import call_side_effect
from ..planning import FusionPlan
from ..probing import NotAnOp, Probes
from ..versions import read
from . import experts
from .head import LAYER, NUMBERS, adapters_of

KIND = "lora"
# Attribute of a fused layer's class: a function that returns the layer's `Lora`, or None if the
# layer has to be called.
READER = "_liger_ops_lora"
PLAIN = (nn.Parameter, Tensor, FakeTensor)
# Methods that a layer's forward calls, and that the new forward does not.
METHODS = ("_cast_input_dtype", "_check_forward_args")
LINEAR = nn.Linear.forward


class Lora(NamedTuple):
    """The arguments of lora_linear after x: the tensors and the factor of a layer's adapter."""

    weight: Tensor
    a: Tensor
    b: Tensor
    scale: float
    bias: Tensor | None


def plan(model: nn.Module) -> FusionPlan:
    """Plan to override the forward of every LoRA Linear of peft."""
    probes = Probes()

    def look(plan: FusionPlan, name: str, module: Any) -> None:
        cls = classes.class_of(module)
        if KIND in classes.overrides(module) or not hasattr(module, "lora_dropout"):
            return
        if experts.is_wrapper(module):
            # It adapts parameters of experts, and is planned with them.
            return
        if not cls.__module__.startswith("peft.tuners.lora"):
            return
        if f"{cls.__module__}.{cls.__qualname__}" != LAYER:
            raise NotAnOp(f"it is a {cls.__module__}.{cls.__qualname__}, not a {LAYER}")
        if "forward" in vars(module):
            raise NotAnOp("the instance has a forward of its own")
        if _computes_base(module):
            raise NotAnOp("its adapters are merged or disabled")
        lora = lora_of(module, sharding.is_held_by_fsdp(module.base_layer))
        if isinstance(lora, str):
            raise NotAnOp(lora)
        probes.once(cls, lambda: _check_class(module))
        plan.fuse(name, module, "lora_linear", {"rank": lora.a.shape[0], "scale": lora.scale})
        plan.changes.append(lambda: classes.override(module, KIND, None))

    return FusionPlan(KIND, model, look)


@classes.kind(KIND)
def methods(base: Any, facts: Any) -> dict[str, Callable[..., Any]]:
    original = base.forward

    @functools.wraps(original)
    def forward(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or _computes_base(self) or not isinstance(x, Tensor):
            return base.forward(self, x, *args, **kwargs)
        lora = lora_of(self) if base.forward is original else "its class has another forward"
        if isinstance(lora, str):
            warn_once(self, lora)
            return base.forward(self, x)
        return lora_linear(x, *lora) if _has_dtypes_of_op(self, x, lora) else original(self, x)

    def read(layer: Any) -> Lora | None:
        is_fused = type(layer).forward is forward and base.forward is original
        return _lora_without_side_effects(layer) if is_fused else None

    return {"forward": forward, READER: read}


def below_gated(forward: Callable[..., Any], facts: ModuleFacts) -> Callable[..., Any]:
    """Return a forward for a gated MLP whose last projection may have a fused LoRA.

    The op of that projection then computes the activation too, and does not keep it for the
    backward. Without a LoRA, `forward` is called.
    """
    projections = _projections(facts.program)
    if projections is None:
        return forward
    gate_name, up_name, down_name, step, activation = projections
    gated, options = library.OPS[step.name].overload, step.args[2:]

    @functools.wraps(forward)
    def adapted(self: Any, *args: Any, **kwargs: Any) -> Any:
        down = self._modules.get(down_name)
        read = getattr(type(down), READER, None)
        lora = read(down) if read and len(args) == 1 and not kwargs else None
        if lora is None or not facts.assumptions.hold(self, args[0]):
            return forward(self, *args, **kwargs)
        gate, up = getattr(self, gate_name)(args[0]), getattr(self, up_name)(args[0])
        if not (isinstance(gate, Tensor) and isinstance(up, Tensor)):
            return forward(self, *args)
        if gate.dtype is up.dtype is _dtype(gate, lora) and _has_dtypes_of_op(down, gate, lora):
            weight, a, b, scale, bias = lora
            return lora_linear(gate, weight, a, b, scale, bias, up, activation)
        return down(gated(gate, up, *options))

    return adapted


def _projections(program: Program) -> tuple[str, str, str, ProgramStep, str] | None:
    """Return the names of gate, up and down in down(op(gate(x), up(x))), the op's step, and the
    activation of lora_linear that equals it, or None for any other program."""
    x, *values = (Value(i) for i in range(5))
    kinds = [step.kind for step in program.steps]
    if kinds != [CHILD, CHILD, OP, CHILD] or len(program.arguments) != 1:
        return None
    first, second, op, down = program.steps
    if (first.args, second.args, down.args, program.returned) != (
        (x,), (x,), (values[2],), values[3]
    ):  # fmt: skip
        return None
    called = {values[0]: first.name, values[1]: second.name}
    for activation, (name, options) in ACTIVATIONS.items():
        gate, up, *given = op.args
        if op.name == name and tuple(given) == options and {gate, up} == called.keys():
            return called[gate], called[up], down.name, op, activation
    return None


def _lora_without_side_effects(layer: Any) -> Lora | None:
    """Return a layer's `Lora`, or None if a call of the layer would do anything else."""
    if _computes_base(layer) or call_side_effect(layer, "it"):
        return None
    lora = lora_of(layer)
    return lora if isinstance(lora, Lora) else None


def _dtype(x: Tensor, lora: Lora) -> torch.dtype:
    device = x.device.type
    is_autocast = torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if is_autocast else lora.weight.dtype


def lora_of(layer: Any, sharded: bool = False) -> Lora | str:
    """Return the arguments of lora_linear for peft's LoRA Linear, or the reason to leave it.

    sharded: whether its parameters may be DTensors, in whose place FSDP2 sets plain tensors for a
        call.
    """
    base = layer.base_layer
    for method in METHODS:
        if is_set_on(layer, method):
            return f"the instance has a {method} of its own"
    if nn.Linear.forward is not LINEAR:
        return "torch.nn.Linear has another forward"
    if classes.class_before(base) is not nn.Linear:
        return f"its base_layer is a {type(base).__name__}, not a torch.nn.Linear"
    adapters = adapters_of(layer, "it")
    if isinstance(adapters, str):
        return adapters
    if len(adapters.names) != 1:
        return f"it has {len(adapters.names)} active adapters, not one"
    ((name,), ((lora_a, lora_b),)) = adapters
    dropout = layer.lora_dropout[name]
    if getattr(dropout, "p", 0.0):
        return f"its adapter has a dropout of {dropout.p}"
    parts = (base, "its base_layer"), (dropout, "its dropout"), (lora_a, "its lora_A")
    for part, what in (*parts, (lora_b, "its lora_B")):
        reason = call_side_effect(part, what)
        if reason is not None:
            return reason
    scale = layer.scaling[name]
    if type(scale) not in NUMBERS:
        return f"its scaling is a {type(scale).__name__}, not a number"
    lora = Lora(base.weight, lora_a.weight, lora_b.weight, scale, base.bias)
    accepted = {type(None), *PLAIN}
    for tensor in (lora.weight, lora.a, lora.b, lora.bias):
        if type(tensor) not in accepted and not (sharded and type(tensor).__name__ == "DTensor"):
            return f"it holds a {type(tensor).__name__}, not a plain tensor"
    return lora if lora.weight.dim() == 2 else "it holds a part of its weight"


def _computes_base(layer: Any) -> bool:
    return bool(layer.merged or layer.disable_adapters)


def _has_dtypes_of_op(layer: Any, x: Tensor, lora: Lora) -> bool:
    """Return whether the dtypes are ones that the op takes, and peft casts x to the adapter's."""
    if torch.is_autocast_enabled(x.device.type):
        return True
    a, b, weight = lora.a.dtype, lora.b.dtype, lora.weight.dtype
    if not (x.dtype is weight and a is b):
        return False
    return a is weight or (
        torch.promote_types(a, weight) is a and read(layer, "cast_input_dtype_enabled")
    )


def _check_class(layer: Any) -> None:
    """Raise NotAnOp if the code of the layer's class computes something else than lora_linear, with
    a copy of the layer that has 3 inputs and 2 outputs."""
    small, dtype = copy.copy(layer), torch.float64
    (name,) = (one for one in layer.active_adapters if one in layer.lora_A)
    base = nn.Linear(3, 2, dtype=dtype)
    a, b = nn.Linear(3, 1, bias=False, dtype=dtype), nn.Linear(1, 2, bias=False, dtype=dtype)
    parts = {"lora_A": a, "lora_B": b, "lora_dropout": nn.Identity()}
    held = {key: nn.ModuleDict({name: one}) for key, one in parts.items()}
    vars(small)["_modules"] = {**layer._modules, **held, "base_layer": base}
    x = torch.arange(6, dtype=dtype).view(2, 3)
    expected = lora_linear(x, base.weight, a.weight, b.weight, layer.scaling[name], base.bias)
    if not torch.allclose(type(layer).forward(small, x), expected):
        raise NotAnOp("its forward computes something else than lora_linear")
