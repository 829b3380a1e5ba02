"""Norms: replace modules by the fused modules that compute the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from .. import library
from ..nn import FusedAddRMSNorm, GatedRMSNorm, GroupNorm, LayerNorm, RMSNorm
from . import classes, modulated_norms, sharding, tensor_parallel
from .norm_obstacles import obstacle
from .norm_trace import Dtypes, Norm, norm_of
from .planning import Plan
from .probing import NotAnOp, Probes, attributes_key

KIND = "norm"

FUSED_CLASSES = (RMSNorm, FusedAddRMSNorm, GatedRMSNorm, LayerNorm, GroupNorm)

# Attribute in which a fused module keeps the original, outside of the module tree.
ORIGINAL = "_fused_from"


def plan(model: nn.Module) -> Plan:
    """Replace every norm of a model by the fused module that computes the same.

    A norm with a gate, and one whose parameters FSDP2, tensor parallelism or DeepSpeed holds, stays
    in place, and its forward is overridden, as is that of a module that modulates norms.
    """
    probes = _Probes(model)
    replacements: dict[nn.Module, nn.Module] = {}
    modulated = modulated_norms.plan(model, probes.width)
    told = {finding.where for finding in modulated.findings}

    def look(plan: Plan, name: str, module: nn.Module) -> None:
        kinds = {KIND, modulated_norms.KIND}
        is_fused = isinstance(module, FUSED_CLASSES) or kinds & classes.overrides(module).keys()
        if is_fused or name in told or "parametrizations" in name.split("."):
            return
        try:
            norm = probes.norm(module)
            # In training the mixers of Mamba 2 read the weight and the eps of their gated norm.
            if sharding.is_managed(module) or norm.op == "gated_rms_norm":
                facts = norm.op, tuple(norm.options.items()), norm.width
                plan.changes.append(lambda: _override(module, facts))
            elif module is model:
                raise NotAnOp("it is the model itself; fuse replaces the modules inside a model")
            else:
                replacements[module] = _replacement(module, norm)
        except NotAnOp:
            if not _looks_like_a_norm(name, module):
                return
            raise
        plan.fuse(name, module, norm.op, norm.options)

    plan = Plan(KIND, model, look)
    plan.changes.append(lambda: _swap(model, replacements.get))
    plan.findings += modulated.findings
    plan.changes += modulated.changes
    return plan


def check_unfuse(model: nn.Module) -> None:
    """Raise if FSDP2, tensor parallelism or DeepSpeed holds parameters of modules that would be
    replaced.

    Raises:
        RuntimeError: there is such a module.
    """
    for name, module in model.named_modules():
        if ORIGINAL in vars(module) and sharding.is_managed(module):
            raise RuntimeError(
                f"unfuse: fully_shard, parallelize_module or DeepSpeed holds the parameters of"
                f" {name}, which fuse had replaced before; unfuse a model before it is sharded"
            )


def unfuse(model: nn.Module) -> int:
    """Put back the norms that `fuse` replaced, with the current parameters and training mode."""
    originals = {
        module: _restored(module) for module in model.modules() if ORIGINAL in vars(module)
    }
    _swap(model, originals.get)
    return len(originals)


def _override(module: nn.Module, facts: Any) -> None:
    classes.override(module, KIND, facts)
    style = tensor_parallel.style_of(module)
    if style is not None:
        tensor_parallel.call_class(module, style)


@classes.kind(KIND)
def methods(base: Any, facts: Any) -> dict[str, Callable[..., Any]]:
    op, options, width = facts
    norm = Norm(op, dict(options), width)

    def forward(self: Any, *inputs: Tensor) -> Tensor:
        parameters = self._parameters
        return norm.computed_by(overload, inputs, parameters.get("weight"), parameters.get("bias"))

    overload = library.OPS[op].overload
    return {"forward": classes.in_place_of(base.forward, forward)}


class _Probes:
    """The probes of one call of `fuse`, on modules with the parameters that a forward sees."""

    def __init__(self, model: nn.Module) -> None:
        self.whole = sharding.whole_parameters(model)
        dtypes = {parameter.dtype for parameter in (*model.parameters(), *self.whole.values())}
        self.dtypes = [
            dtype for dtype in (torch.float32, torch.bfloat16, torch.float16) if dtype in dtypes
        ]
        self.probes = Probes()

    def norm(self, module: nn.Module) -> Norm:
        if sharding.is_managed(module):
            module = sharding.with_whole_parameters(module, self.whole)
        reason = obstacle(module)
        if reason is not None:
            raise NotAnOp(reason)
        return self.probes.once(
            _probe_key(module), lambda: norm_of(module, self.mixed_dtypes(module))
        )

    def width(self, module: nn.Module) -> int | None:
        """The width of an rms_norm or layer_norm, None for any."""
        if isinstance(module, (RMSNorm, LayerNorm)):
            width: Any = module.hidden_size
            return None if width is None else int(width)
        norm = self.norm(module)
        if norm.op not in ("rms_norm", "layer_norm"):
            raise NotAnOp(f"it is {norm.op}")
        return norm.width

    def mixed_dtypes(self, module: nn.Module) -> list[Dtypes]:
        """Pairs of an input dtype, from the model's other parameters, and the module's dtype."""
        own = {parameter.dtype for parameter in module.parameters()}
        return [(other, dtype) for dtype in own for other in self.dtypes if other is not dtype]


def _probe_key(module: nn.Module) -> Any:
    """Key of everything that a probe can depend on."""
    parameters = tuple(
        (name, None if parameter is None else (tuple(parameter.shape), parameter.dtype))
        for name, parameter in module._parameters.items()
    )
    return type(module), parameters, attributes_key(module)


def _looks_like_a_norm(name: str, module: nn.Module) -> bool:
    """Whether a reader of the report expects this module in it. It has no other effect."""
    class_name = classes.class_of(module).__name__
    if class_name.endswith(("RMSNorm", "LayerNorm", "GroupNorm")):
        return True
    is_leaf = all(child is None for child in module._modules.values())
    named = "norm" in f"{class_name}.{name.rpartition('.')[2]}".lower()
    has_weight = "Norm" in class_name and "weight" in module._parameters
    return (named and (is_leaf or parametrize.is_parametrized(module))) or has_weight


def _replacement(original: nn.Module, norm: Norm) -> nn.Module:
    has_weight = original._parameters.get("weight") is not None
    module: nn.Module
    # The parameters made here are on the meta device, and are replaced at once.
    if norm.op == "rms_norm":
        module = RMSNorm(norm.width, elementwise_affine=has_weight, device="meta", **norm.options)
    elif norm.op == "layer_norm":
        module = LayerNorm(norm.width, elementwise_affine=has_weight, device="meta", **norm.options)
    else:
        assert norm.width is not None
        module = GroupNorm(
            num_channels=norm.width, affine=has_weight, device="meta", **norm.options
        )
    for name in module._parameters:
        module.register_parameter(name, original._parameters.get(name))
    module.training = original.training
    vars(module)[ORIGINAL] = original
    return module


def _restored(module: nn.Module) -> nn.Module:
    original: nn.Module = vars(module)[ORIGINAL]
    for name, parameter in module._parameters.items():
        if name in original._parameters:
            original.register_parameter(name, parameter)
    original.training = module.training
    return original


def _swap(model: nn.Module, new: Callable[[nn.Module], nn.Module | None]) -> None:
    """Replace every child in the model by new(child), unless that is None."""
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            module = None if child is None else new(child)
            if module is not None:
                parent.set_submodule(name, module)
