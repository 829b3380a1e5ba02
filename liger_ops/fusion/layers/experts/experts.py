"""Experts of mixture models in transformers: a layer of experts becomes moe_experts.

transformers keeps the weights of all experts of a layer in one module. Its forward is one of
`ALL_EXPERTS_FUNCTIONS`, which the configuration names, and calls the module's method `_apply_gate`
with projections, gate and up in one tensor, or without a gate its child `act_fn`. A trace of these
gives the activation; the other facts are attributes of the module.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ....ops.experts.moe_experts import moe_experts
from ... import classes, sharding, tensor_parallel
from ...lora import experts as peft_experts
from ...planning import FusionPlan
from ...probing import NotAnOp
from ...versions import read
from ..gated import Gated
from ..installed import ModuleFacts, argument_arranger, methods_of
from ..kind import obstacle, parameter_obstacle
from ..module_trace import ModuleTrace, Traced
from ..program import Program, Value
from .dense_experts import DenseExperts

# The file of transformers whose decorator makes a forward that looks its function up by name, and
# the functions that compute what the op does.
REGISTRY = "transformers.integrations.moe"
GROUPED, NAME = "grouped_mm", "liger"
REPLACED = (GROUPED, "batched_mm", NAME)
PLAIN = (Tensor, nn.Parameter)
WEIGHTS = ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")
UNGATED = ("up_proj", "down_proj", "up_proj_bias", "down_proj_bias")


class Experts(Gated):
    """Experts of transformers. `ModuleFacts.details` are the options of moe_experts, or the reason
    that only the activation is replaced by an op."""

    name = "experts"
    method = "_apply_gate"

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.dense = DenseExperts(model)
        # Experts in wrappers of peft -> whether the wrappers are fused.
        self.wrapped: dict[nn.Module, bool] = {}

    def is_expected(self, name: str, module: nn.Module) -> bool:
        is_experts = classes.class_of(module).__name__.endswith("Experts")
        holds_gates = is_experts and any("gate_up" in name for name in module._parameters)
        return holds_gates or _has_method(module, self.method)

    def obstacle(self, module: nn.Module) -> str | None:
        if not _has_method(module, self.method):
            reason = self.dense.reasons.get(module)
            text = f"it has no {self.method}: the activation is part of its forward"
            return f"{text}, and its layer is left: {reason}" if reason else text
        if reason := obstacle(module, self.method):
            return reason
        code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
        is_eager = _implementation(module) == "eager"
        if is_eager and code is not None and self.method not in code.co_names:
            return f"its experts_implementation is 'eager', which does not call {self.method}"
        return None

    def derive_facts(self, module: nn.Module) -> ModuleFacts:
        if read(module, "has_gate"):
            return super().derive_facts(module)
        activation = _Activation(module)
        trace = ModuleTrace(activation, (), self.method)
        facts = self.verify_form(activation, trace, None)
        options = (
            _options(facts.program) if _is_looked_up(classes.class_of(module)) else NO_REGISTRY
        )
        reason = options if isinstance(options, str) else _reason_left(module)
        if reason:
            raise NotAnOp(f"its experts have no gate, and {reason}")
        return replace(facts, details=options)

    def details_of(
        self, module: nn.Module, form: Any, traced: Traced, program: Program
    ) -> tuple[tuple[str, Any], ...] | str:
        return _options(program) if _is_looked_up(classes.class_of(module)) else NO_REGISTRY

    def look(self, plan: FusionPlan, name: str, module: nn.Module) -> None:
        if peft_experts.is_wrapper(module):
            self.look_at_wrapper(plan, name, module)
            return
        self.dense.look(plan, name, module)
        if module in self.dense.taken:
            return
        fused = len(plan.changes)
        super().look(plan, name, module)
        if len(plan.changes) == fused:
            return
        facts = self.facts(module)
        reason = facts.details if isinstance(facts.details, str) else _reason_left(module)
        if reason is None:
            # moe_experts computes the activation too: one finding for the module.
            plan.findings.pop()
            if not self.wrapped.get(module):
                plan.fuse(name, module, "moe_experts", dict(facts.details))
        elif reason != NO_REGISTRY:
            plan.leave(name, module, f"only its activation is fused: {reason}")

    def look_at_wrapper(self, plan: FusionPlan, name: str, wrapper: Any) -> None:
        """Plan the outermost wrapper of experts that are fused, or that this plan fuses."""
        module = peft_experts.wrapped(wrapper)
        if module in self.wrapped or peft_experts.NAME in classes.overrides(wrapper):
            return
        try:
            facts = classes.overrides(module).get(self.name) or self.facts(module)
            is_fused = not (isinstance(facts.details, str) or _reason_left(module))
        except NotAnOp:
            is_fused = False
        reason: Any = f"its {classes.class_of(module).__name__} is not fused"
        if is_fused:
            reason = obstacle(wrapper) or peft_experts.loras(wrapper)
        self.wrapped[module] = not isinstance(reason, str)
        if isinstance(reason, str):
            plan.leave(name, wrapper, f"the weights are formed with their LoRA: {reason}")
            return
        plan.fuse(name, wrapper, "moe_experts", {**dict(facts.details), "lora": True})
        plan.changes.append(lambda: classes.override(wrapper, peft_experts.NAME, None))

    @classmethod
    def methods(cls, base: Any, facts: ModuleFacts) -> dict[str, Any]:
        made = {} if isinstance(facts.details, str) else _forwards(base, facts)
        if facts.details != RELU_SQUARED:
            made |= methods_of(cls.method, cls.caller, base, facts)
        return made


class _Activation(nn.Module):
    """A module that computes the activation of experts without a gate as its `_apply_gate`."""

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self.act_fn = experts.act_fn

    def _apply_gate(self, up: Tensor) -> Any:
        return self.act_fn(up)


RELU_SQUARED = (("activation", "relu_squared"),)
NO_REGISTRY = "its forward is not one that transformers looks up by experts_implementation"


def _options(program: Program) -> tuple[tuple[str, Any], ...] | str:
    """Return the options of moe_experts with the activation of a program, or the reason that it has
    none."""
    (op, *others), options = program.steps, program.ops[0].options()
    if op.name == "relu_squared" and not others:
        return RELU_SQUARED
    is_whole = not others and op.args[:2] == (Value(0), None)
    if not is_whole or program.returned != Value(1):
        return f"the activation is {program} of parts of the projection"
    if op.name == "geglu":
        return (("activation", "gelu" if options["approximate"] == "none" else "gelu_tanh"),)
    if op.name == "swiglu" and set(options.values()) == {1.0}:
        return (("activation", "silu"),)
    if op.name != "clamped_swiglu":
        return f"moe_experts has no {program}"
    if (options["alpha"], options["limit"], options["up_offset"]) == (1.0, math.inf, 0.0):
        return (("activation", "silu"), ("interleaved", options["interleaved"]))
    return (("activation", "clamped_swiglu"), *options.items())


def _is_looked_up(cls: Any) -> bool:
    return getattr(cls.forward, "__globals__", {}).get("__name__") == REGISTRY


def _reason_left(module: Any) -> str | None:
    """Return the reason that the matrix products of a module's experts are left, or None."""
    if read(module, "has_post_expert_norm"):
        return "its experts have a norm after them (has_post_expert_norm)"
    if _implementation(module) not in REPLACED:
        return f"its experts_implementation is {_implementation(module)!r}"
    if "forward" in vars(module) and not (
        tensor_parallel.style_of(module) or tensor_parallel.dispatchers_of(module)
    ):
        return "the instance has a forward of its own"
    missing = [name for name in _names(module)[:2] if module._parameters.get(name) is None]
    if missing:
        return f"it has no parameter {missing[0]}"
    return None if sharding.is_managed(module) else parameter_obstacle(module)


def _names(module: Any) -> tuple[str, ...]:
    return WEIGHTS if read(module, "has_gate") else UNGATED


def _implementation(module: Any) -> Any:
    return read(read(module, "config"), "_experts_implementation")


def _has_method(module: nn.Module, name: str) -> bool:
    return inspect.isfunction(getattr(classes.class_of(module), name, None))


def _forwards(base: Any, facts: ModuleFacts) -> dict[str, Callable[..., Any]]:
    """Return the forward that calls the op, or the module's own code where the op computes
    something else, and the method ADAPTED, which calls the op with LoRAs."""
    original, hold, options = base.forward, facts.assumptions.hold, dict(facts.details)
    arranged = argument_arranger(original, tuple(inspect.signature(original).parameters)[1:4])

    def adapted(self: Any, loras: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor | None:
        given = arranged(args, kwargs)
        if given is not None and hold(self, given[0]):
            return experts(self, {**options, **loras}, *given)
        return None

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        y = adapted(self, {}, *args, **kwargs)
        return original(self, *args, **kwargs) if y is None else y

    return {"forward": forward, peft_experts.ADAPTED: adapted}


def experts(
    module: Any, options: dict[str, Any], x: Tensor, index: Tensor, weights: Tensor
) -> Tensor | None:
    """Compute by the op what transformers' function computes, or return None if the op does not.

    Under autocast, `grouped_mm` computes in the dtype of the weights; `batched_mm`, and "liger",
    compute in autocast's dtype.
    """
    implementation = _implementation(module)
    gate_up, down, gate_up_bias, down_bias = (
        getattr(module, name, None) for name in _names(module)
    )
    given = (gate_up, down, gate_up_bias, down_bias, *options.values())
    tensors = [tensor for tensor in given if isinstance(tensor, Tensor)]
    if (
        implementation not in REPLACED or read(module, "has_post_expert_norm")
        or read(module, "has_gate") is (options["activation"] == "relu_squared")
        or gate_up is None or down is None or not all(type(tensor) in PLAIN for tensor in tensors)
        or x.dim() != 2 or index.dim() != 2 or index.shape != weights.shape
    ):  # fmt: skip
        return None
    if read(module, "is_transposed"):
        gate_up, down = gate_up.mT, down.mT
    if not read(module, "has_bias"):
        gate_up_bias = down_bias = None
    is_autocast = torch.is_autocast_enabled(x.device.type)
    if is_autocast and implementation != GROUPED:
        y = moe_experts(x, gate_up, down, index, weights, gate_up_bias, down_bias, **options)
        return y.to(x.dtype)
    if any(tensor.dtype is not gate_up.dtype for tensor in tensors):
        return None
    arguments = (x.to(gate_up.dtype), gate_up, down, index, weights, gate_up_bias, down_bias)
    if not is_autocast:
        return moe_experts(*arguments, **options).to(x.dtype)
    with torch.autocast(x.device.type, enabled=False):
        return moe_experts(*arguments, **options).to(x.dtype)


def registered(
    module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Compute experts as the function that transformers calls for experts_implementation="liger".

    Raises:
        ValueError: the experts are not those of moe_experts; the text gives the reason.
    """
    options = _recognised(module)
    if not isinstance(options, str):
        y = experts(module, dict(options), hidden_states, top_k_index, top_k_weights)
        if y is not None:
            return y
        options = _reason_left(module) or "its arguments or parameters are not those of moe_experts"
    raise ValueError(
        f"experts_implementation={NAME!r}: {type(module).__name__} cannot be computed by"
        f" moe_experts: {options}"
    )


_known_facts: weakref.WeakKeyDictionary[Any, ModuleFacts] = weakref.WeakKeyDictionary()


# Dynamo calls it while it traces, and takes the result for a constant.
@torch.compiler.assume_constant_result
def _recognised(module: nn.Module) -> tuple[tuple[str, Any], ...] | str:
    """Return the options of moe_experts for a module, or the reason that it has none."""
    try:
        if module in _known_facts:
            with contextlib.suppress(NotAnOp):
                _known_facts[module].assumptions.check(module)
                return _known_facts[module].details
        _known_facts[module] = Experts(module).facts(_unparametrized(module))
    except NotAnOp as reason:
        return str(reason)
    return _known_facts[module].details


def _unparametrized(module: Any) -> nn.Module:
    """Return a module with the same activation, without the parametrizations by which a LoRA of
    peft computes the parameters."""
    if not parametrize.is_parametrized(module):
        return module
    cls: Any = parametrize.type_before_parametrizations(module)
    plain: nn.Module = cls.__new__(cls)
    vars(plain).update(vars(module))
    children = {
        name: child for name, child in module._modules.items() if name != "parametrizations"
    }
    vars(plain)["_modules"] = children
    return plain
