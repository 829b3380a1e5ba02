"""Swapping a model's norms for the fused modules, and back."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from .nn import FusedAddRMSNorm, GroupNorm, LayerNorm, RMSNorm
from .probe import Dtypes, Norm, NotAnOp, own_attributes, probe

__all__ = ["FuseReport", "Fused", "Left", "fuse", "unfuse"]

FUSED_CLASSES = (RMSNorm, FusedAddRMSNorm, LayerNorm, GroupNorm)

# Where a fused module keeps the module that it stands for: outside of the module tree.
ORIGINAL = "_fused_from"

HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)

# What a module may do beside computing: a class that overrides one of these does more.
BEYOND_FORWARD = (
    "__call__",
    "_apply",
    "_load_from_state_dict",
    "_save_to_state_dict",
    "get_extra_state",
    "set_extra_state",
)


@dataclass(frozen=True)
class Fused:
    """A module that `fuse` replaced: its name and class, the op and the op's options."""

    name: str
    class_name: str
    op: str
    options: dict[str, Any]

    def __str__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return f"{self.class_name} -> {self.op}({options})"


@dataclass(frozen=True)
class Left:
    """A module that looks like a norm and that `fuse` left: its name and class, and why."""

    name: str
    class_name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.class_name}: {self.reason}"


@dataclass(frozen=True)
class FuseReport:
    """What `fuse` replaced and what it left. Its length is the number of modules replaced."""

    fused: tuple[Fused, ...] = ()
    left: tuple[Left, ...] = ()

    def __len__(self) -> int:
        return len(self.fused)

    def __str__(self) -> str:
        count = len(self.fused) or "no"
        lines = [f"{count} norm{'s' * (count != 1)} fused", *_table(self.fused)]
        if self.left:
            lines += [f"{len(self.left)} left", *_table(self.left)]
        return "\n".join(lines)


def fuse(model: nn.Module) -> FuseReport:
    """Replace every norm of a model by the fused module that computes the same.

    What a norm computes decides, not its class: a copy of each module without children, and with no
    parameters but a weight and a bias of one size, runs on the CPU and is compared with `rms_norm`,
    `layer_norm` and `group_norm` under every offset, eps and casting mode: values in float32,
    bfloat16 and float16, and gradients. A norm of any class, from transformers or not, is replaced
    if it agrees, and left if it does not.

    The fused module has the same Parameter objects under the same names: optimizers, tied weights
    and the state dict, keys and values, do not notice. `requires_grad` and the training mode stay.
    A module in several places of the model remains one module. The model can then be copied,
    pickled, saved, moved, cast, loaded into and compiled. Nothing outside of the model changes, and
    the state of no random number generator.

    A norm is left, and the report says why, where replacing it could change what the model does: it
    computes something else (a gate, another dimension), or does something beside (hooks, a forward
    of its own on the instance, as accelerate sets it, parametrizations, buffers), or its parameters
    are no plain tensors (DTensor: fuse before sharding). A norm whose class returns the weight's
    dtype is left where the model's other parameters have another dtype than its weight.

    Norms that are fused already are passed over: a second call replaces nothing.

    Args:
        model: a transformers model, or any module. It is changed in place.

    Returns:
        A report: `report.fused` and `report.left` list modules, `str(report)` is a table,
        `len(report)` the number of modules replaced.

    Raises:
        TypeError: model is not a torch.nn.Module.

    Example:
        >>> print(liger_ops.fuse(torch.nn.Sequential(torch.nn.LayerNorm(8))))
        1 norm fused
          1 x LayerNorm -> layer_norm(eps=1e-05)  0
    """
    _check_module("fuse", model)
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
    return FuseReport(tuple(fused), tuple(left))


def unfuse(model: nn.Module) -> int:
    """Put back the modules that `fuse` replaced, with the parameters and training mode of now.

    The modules are the very objects that were there before. They get the Parameter objects that the
    fused modules hold by now, which loading or casting may have replaced. Hooks registered on a
    fused module go with it.

    Args:
        model: a module that was given to `fuse`, or a copy of one. It is changed in place.

    Returns:
        The number of modules put back.

    Raises:
        TypeError: model is not a torch.nn.Module.
    """
    _check_module("unfuse", model)
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
        obstacle = _obstacle(module)
        if obstacle is not None:
            raise NotAnOp(obstacle)
        key = _probe_key(module)
        if key not in self.found:
            try:
                self.found[key] = probe(module, self.mixed_dtypes(module))
            except NotAnOp as reason:
                self.found[key] = reason
        found = self.found[key]
        if isinstance(found, NotAnOp):
            raise NotAnOp(*found.args)
        return found

    def mixed_dtypes(self, module: nn.Module) -> list[Dtypes]:
        """The model's other dtypes as those of an input that the module may be given."""
        own = {parameter.dtype for parameter in module.parameters()}
        return [(other, dtype) for dtype in own for other in self.dtypes if other is not dtype]


def _obstacle(module: nn.Module) -> str | None:
    """Why a module cannot be replaced whatever it computes, or None."""
    if parametrize.is_parametrized(module):
        return "it is parametrized"
    if isinstance(module, torch.jit.ScriptModule):
        return "it is a ScriptModule"
    if any(child is not None for child in module._modules.values()):
        return "it holds other modules"
    if "forward" in vars(module):
        return "the instance has a forward of its own"
    if any(getattr(module, hooks, None) for hooks in HOOKS):
        return "it has hooks"
    if module._compiled_call_impl is not None:
        return "it is compiled by itself"
    return _parameters_obstacle(module) or _class_obstacle(module) or _forward_obstacle(module)


def _class_obstacle(module: nn.Module) -> str | None:
    for name in BEYOND_FORWARD:
        if getattr(type(module), name) is not getattr(nn.Module, name):
            return f"its class overrides {name}"
    return None


def _parameters_obstacle(module: nn.Module) -> str | None:
    if module._buffers:
        return f"it has buffers: {', '.join(module._buffers)}"
    unknown = [name for name in module._parameters if name not in ("weight", "bias")]
    if unknown:
        return f"it has other parameters than weight and bias: {', '.join(unknown)}"
    shapes = set()
    for name, parameter in module._parameters.items():
        if parameter is None:
            continue
        if type(parameter) is not nn.Parameter:
            return f"{name} is a {type(parameter).__name__}, not a plain Parameter"
        if not parameter.is_floating_point():
            return f"{name} is {parameter.dtype}"
        shapes.add(tuple(parameter.shape))
    if len(shapes) > 1 or any(len(shape) != 1 for shape in shapes):
        return f"its parameters have shapes {sorted(shapes)}, not one size"
    return None


def _forward_obstacle(module: nn.Module) -> str | None:
    try:
        arguments = inspect.signature(module.forward).parameters.values()
    except ValueError:
        return "its forward has no signature"
    if len(arguments) == 1 and all(
        argument.kind in (argument.POSITIONAL_ONLY, argument.POSITIONAL_OR_KEYWORD)
        for argument in arguments
    ):
        return None
    names = (str(argument.replace(annotation=argument.empty)) for argument in arguments)
    return f"its forward takes ({', '.join(names)})"


def _probe_key(module: nn.Module) -> Any:
    """What a probe can depend on. An attribute that is no plain value equals itself alone."""
    parameters = tuple(
        (name, None if parameter is None else (tuple(parameter.shape), parameter.dtype))
        for name, parameter in module._parameters.items()
    )
    attributes = tuple(
        (name, type(value), _value_key(value)) for name, value in own_attributes(module).items()
    )
    return type(module), parameters, attributes


def _value_key(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
        return value
    if isinstance(value, (tuple, list)):
        return tuple((type(item), _value_key(item)) for item in value)
    return id(value)


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


def _table(entries: Sequence[Fused | Left]) -> list[str]:
    """One line for each kind of entry: how many, what, and where the first is."""
    counts = Counter(str(entry) for entry in entries)
    first = {str(entry): entry.name for entry in reversed(entries)}
    return [
        f"  {count} x {text}  {first[text]}{', ...' if count > 1 else ''}".rstrip()
        for text, count in counts.items()
    ]


def _check_module(function: str, model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{function}: model must be a torch.nn.Module, got {type(model).__name__}")
