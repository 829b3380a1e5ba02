"""Norms: modules replaced by the fused modules that compute the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from ..nn import FusedAddRMSNorm, GroupNorm, LayerNorm, RMSNorm
from .norm_obstacles import obstacle
from .norm_probe import Dtypes, Norm, probe
from .probing import NotAnOp, attributes_key
from .report import Fused, Left

FUSED_CLASSES = (RMSNorm, FusedAddRMSNorm, LayerNorm, GroupNorm)

# Where a fused module keeps the module that it stands for: outside of the module tree.
ORIGINAL = "_fused_from"


def fuse(model: nn.Module) -> tuple[list[Fused], list[Left]]:
    """Replace every norm of a model by the fused module that computes the same."""
    probes = _Probes(model)
    fused, left = [], []
    replacements: dict[nn.Module, nn.Module] = {}
    for name, module in model.named_modules():
        if isinstance(module, FUSED_CLASSES) or "parametrizations" in name.split("."):
            continue
        class_name = type(module).__name__
        try:
            norm = probes.norm(module)
            if module is model:
                raise NotAnOp("it is the model itself; fuse replaces the modules inside a model")
        except NotAnOp as reason:
            if _looks_like_a_norm(name, module):
                left.append(Left(name, class_name, str(reason)))
            continue
        replacements[module] = _replacement(module, norm)
        fused.append(Fused(name, class_name, norm.op, norm.options))
    _swap(model, replacements.get)
    return fused, left


def unfuse(model: nn.Module) -> int:
    """Put back the norms that `fuse` replaced, with the parameters and training mode of now."""
    originals = {
        module: _restored(module) for module in model.modules() if ORIGINAL in vars(module)
    }
    _swap(model, originals.get)
    return len(originals)


class _Probes:
    """The probes of one call of `fuse`: modules that differ in name only are probed once."""

    def __init__(self, model: nn.Module) -> None:
        dtypes = {parameter.dtype for parameter in model.parameters()}
        self.dtypes = [
            dtype for dtype in (torch.float32, torch.bfloat16, torch.float16) if dtype in dtypes
        ]
        self.found: dict[Any, Norm | NotAnOp] = {}

    def norm(self, module: nn.Module) -> Norm:
        reason = obstacle(module)
        if reason is not None:
            raise NotAnOp(reason)
        key = _probe_key(module)
        if key not in self.found:
            try:
                self.found[key] = probe(module, self.mixed_dtypes(module))
            except NotAnOp as refusal:
                self.found[key] = refusal
        found = self.found[key]
        if isinstance(found, NotAnOp):
            raise NotAnOp(*found.args)
        return found

    def mixed_dtypes(self, module: nn.Module) -> list[Dtypes]:
        """The model's other dtypes as those of an input that the module may be given."""
        own = {parameter.dtype for parameter in module.parameters()}
        return [(other, dtype) for dtype in own for other in self.dtypes if other is not dtype]


def _probe_key(module: nn.Module) -> Any:
    """What a probe can depend on."""
    parameters = tuple(
        (name, None if parameter is None else (tuple(parameter.shape), parameter.dtype))
        for name, parameter in module._parameters.items()
    )
    return type(module), parameters, attributes_key(module)


def _looks_like_a_norm(name: str, module: nn.Module) -> bool:
    """Whether a reader of the report expects to find the module there. It decides nothing else."""
    is_leaf = all(child is None for child in module._modules.values())
    named = "norm" in f"{type(module).__name__}.{name.rpartition('.')[2]}".lower()
    return named and (is_leaf or parametrize.is_parametrized(module))


def _replacement(original: nn.Module, norm: Norm) -> nn.Module:
    has_weight = original._parameters.get("weight") is not None
    module: nn.Module
    # The parameters made here hold no memory and are replaced at once.
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
    """Put new(child), where it is not None, in the place of every child in the model."""
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            module = None if child is None else new(child)
            if module is not None:
                parent.set_submodule(name, module)
