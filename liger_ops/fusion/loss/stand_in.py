"""A stand-in for a model in a dry run: its own code, with stubs for the children of its body."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from ..probing import DEVICE, NotAnOp
from .deferred import DeferredLogits

# id of a tensor -> its name in the model.
TensorNames = dict[int, str]


def stand_in(
    module: nn.Module, path: list[str], hidden: Tensor, head: nn.Module, names: TensorNames,
    prefix: str = "",
) -> nn.Module:  # fmt: skip
    """Copy a module, in training mode and with stubs for the children that are not on `path`.

    In the copy, the module's own parameters and buffers are zeros of the same shapes on the CPU,
    which take no memory.

    Args:
        module: a language model, or a module on the path.
        path: the names of the children that lead from `module` to the head.
        hidden: the hidden states that the stubs return.
        head: the module in the place of the head.
        names: filled with the names of the model's tensors.
        prefix: the path from the model to `module`, with a dot at its end.
    """
    if not path:
        return head
    copied: nn.Module = object.__new__(type(module))
    vars(copied).update(vars(module))
    copied.training = True
    children: dict[str, nn.Module | None] = {}
    for name, child in module._modules.items():
        children[name] = None if child is None else _Body(child, prefix + name, hidden)
        if child is not None:
            names.update(
                (id(x), f"parameter {prefix}{name}.{n}") for n, x in child.named_parameters()
            )
            names.update((id(x), f"buffer {prefix}{name}.{n}") for n, x in child.named_buffers())
    inner = stand_in(getattr(module, path[0]), path[1:], hidden, head, names, f"{prefix}{path[0]}.")
    children[path[0]] = inner
    parameters = {name: _like(tensor) for name, tensor in module._parameters.items()}
    buffers = {name: _like(tensor) for name, tensor in module._buffers.items()}
    vars(copied).update(_modules=children, _buffers=buffers)
    vars(copied)["_parameters"] = {
        name: None if tensor is None else nn.Parameter(tensor, tensor.is_floating_point())
        for name, tensor in parameters.items()
    }
    for kind, own in (("parameter", copied._parameters), ("buffer", buffers)):
        names.update((id(tensor), f"{kind} {prefix}{name}") for name, tensor in own.items())
    return copied


def _like(tensor: Tensor | None) -> Tensor | None:
    if tensor is None:
        return None
    return torch.zeros((), dtype=tensor.dtype, device=DEVICE).expand(tensor.shape)


class _Body(nn.Module):
    """A stub for a child: it returns the hidden states that it is given, or `hidden` if it is given
    none. Called with deferred logits, it runs the child itself."""

    def __init__(self, child: nn.Module, name: str, hidden: Tensor) -> None:
        super().__init__()
        vars(self).update(child=child, name=name, hidden=hidden)

    def __getattr__(self, name: str) -> Any:
        found = vars(self)
        value = getattr(found["child"], name)
        if isinstance(value, nn.Module):
            return _Body(value, f"{found['name']}.{name}", found["hidden"])
        return value

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(value, DeferredLogits) for value in (*args, *kwargs.values())):
            return self._of_logits(*args, **kwargs)
        if args and isinstance(args[0], Tensor) and args[0].is_floating_point():
            return args[0]
        return _BodyOutput(last_hidden_state=self.hidden)

    def _of_logits(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.child(*args, **kwargs)
        except NotAnOp as reason:
            what = f"its {self.name}, a {type(self.child).__name__},"
            raise NotAnOp(str(reason).replace("its forward", what, 1)) from None


class _BodyOutput(OrderedDict[str, Any]):
    """An output like a ModelOutput of transformers: an absent field is None."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.get(name)

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(key) if isinstance(key, str) else tuple(self.values())[key]
