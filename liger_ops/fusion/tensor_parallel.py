"""Modules that tensor parallelism shards.

`parallelize_module` makes the parameters DTensors, and registers hooks that make the input a
DTensor and the output a tensor again. The `tp_plan` of transformers does the same in a forward that
it sets on the instance, around the module's own. A fused loss does not call the head, and converts
the input as the head's style does.
"""

from __future__ import annotations

import types
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_TORCH = "torch.distributed.tensor"
_TRANSFORMERS = "transformers.distributed.tensor_parallel"
_ORIGINAL = "original_forward"
_EXPERTS = "transformers.distributed.expert_parallel"


class OverWords(NamedTuple):
    """A head's sharding over words.

    input_dim is the dimension along which an input that is a plain tensor is sharded, None if every
    rank has the whole input. gathers says whether the head gathers the logits of all words.
    """

    input_dim: int | None
    gathers: bool


def is_hook(hook: Any) -> bool:
    """Return whether a hook was registered by a style of torch.distributed.tensor.parallel."""
    return str(getattr(hook, "__module__", "")).startswith(_TORCH)


def forward_hooks(module: Any) -> list[Any]:
    """Return the hooks that run before and after a module's forward."""
    return [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]


def has_style(module: nn.Module) -> bool:
    """Return whether a module has hooks or a forward set on the instance, all hooks are those of a
    style of torch, and the forward, if set, is that of a style of transformers."""
    if module._backward_hooks or module._backward_pre_hooks:
        return False
    hooks = forward_hooks(module)
    own = "forward" in vars(module)
    return bool(hooks or own) and all(map(is_hook, hooks)) and (not own or _is_of_style(module))


def over_words(head: Any) -> OverWords | None:
    """Return how a style ColwiseParallel, of torch or transformers, shards a linear layer, or None
    if the layer has no such style, or a further one."""
    functions = [hook for hook in forward_hooks(head) if is_hook(hook)]
    if "forward" in vars(head):
        functions.append(vars(head)["forward"])
        if not _is_of_style(head):
            return None
    constants = constants_of(*functions)
    return None if constants is None else OverWords(*constants)


def _is_of_style(module: Any) -> bool:
    """Return whether the forward that is set on a module is that of a style of transformers."""
    if getattr(vars(module)["forward"], "__module__", None) != _TRANSFORMERS:
        return False
    return torch.compiler.is_compiling() or style_of(module) is not None


def constants_of(*functions: Any) -> tuple[int | None, bool] | None:
    """Return the fields of OverWords, from the closures of the two hooks of a style of torch or of
    the one forward of a style of transformers, or None for other functions."""
    closures = [_closure(function) for function in functions]
    if len(closures) == 1:
        style: Any = closures[0].get("self")
        if type(style).__name__ != "ColwiseParallel":
            return None
        inputs, outputs = [style.input_layouts], [style.output_layouts]
    elif len(closures) == 2:
        first: Any = closures[0].get("input_fn")
        last: Any = closures[1].get("output_fn")
        if not _is_partial_of(first, "ColwiseParallel._prepare_input_fn"):
            return None
        if not _is_partial_of(last, "ColwiseParallel._prepare_output_fn"):
            return None
        inputs, outputs = first.args[0], last.args[0]
    else:
        return None
    if len(inputs) != 1 or not (inputs[0].is_replicate() or inputs[0].is_shard()):
        return None
    dim = None if inputs[0].is_replicate() else inputs[0].dim
    return dim, all(placement.is_replicate() for placement in outputs)


def as_input(head: Any, hidden: Tensor) -> Tensor:
    """Return the input of a head that is sharded over words as a DTensor, whole or sharded over
    rows."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    sharded = over_words(head)
    assert sharded is not None
    if not isinstance(hidden, DTensor):
        dim, mesh = sharded.input_dim, head.weight.device_mesh
        layout = Replicate() if dim is None else Shard(dim)
        hidden = DTensor.from_local(hidden, mesh, [layout], run_check=False)
    placement = hidden.placements[0]
    if placement.is_partial() or placement.is_shard(hidden.dim() - 1):
        hidden = hidden.redistribute(placements=[Replicate()])
    return hidden


def adapter(lora_b: Any, lora_x: Tensor, x: Any) -> tuple[Tensor, Tensor]:
    """Return the input of an adapter's lora_B with the placement of x, and the weight of lora_B
    sharded over words, for a head that is sharded over words.

    A lora_B that no style shards is whole on every rank, and so is its gradient, which is gathered.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh, weight = x.device_mesh, lora_b.weight
    if over_words(lora_b) is not None:
        lora_x = as_input(lora_b, lora_x)
    else:
        if not isinstance(weight, DTensor):
            weight = DTensor.from_local(weight, mesh, [Replicate()], run_check=False)
        # Dynamo of torch 2.11 does not know the placement that results: its graph breaks.
        weight = weight.redistribute(placements=[Shard(0)])
    if not isinstance(lora_x, DTensor):
        lora_x = DTensor.from_local(lora_x, mesh, [Replicate()], run_check=False)
    return lora_x.redistribute(placements=x.placements), weight


class InstanceForward(NamedTuple):
    """A style of transformers, and the closure cell of its forward that holds the module's own."""

    style: Any
    mesh: Any
    own: types.CellType


def style_of(module: Any) -> InstanceForward | None:
    """Return the style whose forward transformers set on a module, or None for another forward."""
    forward = vars(module).get("forward")
    if getattr(forward, "__module__", None) != _TRANSFORMERS:
        return None
    cells = _cells(forward)
    own = cells.get(_ORIGINAL)
    if own is None or getattr(own.cell_contents, "__self__", None) is not module:
        return None
    values = {name: cell.cell_contents for name, cell in cells.items()}
    return InstanceForward(values.get("self"), values.get("mesh"), own)


def call_class(module: nn.Module) -> None:
    """Make the forward that transformers set on a module, for tensor parallelism or for experts,
    look up the module's class in each call, and call its forward.

    Without this it calls the forward of the class that the module had when the model was loaded,
    and not the one that `fuse` installs.
    """
    own = types.MethodType(_forward_of_class, module)
    style = style_of(module)
    if style is not None:
        style.own.cell_contents = own
    for dispatcher in dispatchers_of(module):
        dispatcher.experts_forward = own


def dispatchers_of(module: Any) -> list[Any]:
    """Return the objects that call a module's forward with the tokens that are sent to this rank,
    from the forward that transformers set on a module of experts."""
    forward = vars(module).get("forward")
    if getattr(forward, "__module__", None) != _EXPERTS:
        return []
    outer = _closure(forward).get("implementation")
    candidates = [outer, *vars(outer).values()]
    forwards = [getattr(candidate, "experts_forward", None) for candidate in candidates]
    return [
        candidate
        for candidate, own in zip(candidates, forwards, strict=True)
        if getattr(own, "__self__", None) is module
    ]


def _forward_of_class(self: Any, *args: Any, **kwargs: Any) -> Any:
    return type(self).forward(self, *args, **kwargs)


def _is_partial_of(function: Any, name: str) -> bool:
    called = getattr(function, "func", None)
    module = str(getattr(called, "__module__", ""))
    return module.startswith(_TORCH) and getattr(called, "__qualname__", "") == name


def _closure(function: Any) -> dict[str, Any]:
    return {name: cell.cell_contents for name, cell in _cells(function).items()}


def _cells(function: Any) -> dict[str, types.CellType]:
    code = getattr(function, "__code__", None)
    return dict(zip(code.co_freevars, function.__closure__ or (), strict=True)) if code else {}
