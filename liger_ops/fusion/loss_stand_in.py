"""A stand-in for a model while its loss is probed: its own code, with stubs for its children."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from .loss_head import child_of
from .probing import DEVICE, uniform


def stand_in(
    module: nn.Module, path: list[str], hidden: Tensor, head: nn.Module, any_buffers: bool = False
) -> nn.Module:
    """A module in training mode, with stubs for all children except those on the path to its head.

    any_buffers: whether its own buffers are replaced by others of the same shapes, on the CPU,
            with floating point buffers in the dtype of hidden.
    """
    if not path:
        return head
    copied: nn.Module = object.__new__(type(module))
    vars(copied).update(vars(module))
    copied.training = True
    children: dict[str, nn.Module | None] = {}
    for name, child in module._modules.items():
        children[name] = None if child is None else _Body(child, hidden)
    children[path[0]] = stand_in(getattr(module, path[0]), path[1:], hidden, head, any_buffers)
    vars(copied)["_modules"] = children
    if any_buffers:
        vars(copied)["_buffers"] = {
            name: _any(buffer, hidden.dtype) for name, buffer in module._buffers.items()
        }
    return copied


def _any(buffer: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if buffer is None:
        return None
    if buffer.is_floating_point():
        return uniform(buffer.shape, 7).to(dtype)
    return torch.zeros(buffer.shape, dtype=buffer.dtype, device=DEVICE)


class _Body(nn.Module):
    """Stub for a child: returns hidden states that it is given, and otherwise makes them."""

    def __init__(self, child: nn.Module, hidden: Tensor) -> None:
        super().__init__()
        vars(self).update(child=child, hidden=hidden)

    def __getattr__(self, name: str) -> Any:
        value = getattr(vars(self)["child"], name)
        return _Body(value, self.hidden) if isinstance(value, nn.Module) else value

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], Tensor) and args[0].is_floating_point():
            return args[0]
        return _BodyOutput(last_hidden_state=self.hidden)


class _BodyOutput(OrderedDict[str, Any]):
    """Like a ModelOutput of transformers: an absent field is None."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.get(name)

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(key) if isinstance(key, str) else tuple(self.values())[key]


class RecordingHead:
    """Record the calls of a head and a loss; the head can be made to return a given output."""

    def __init__(self, model: nn.Module, path: str, output: Tensor | None) -> None:
        self.head = child_of(model, path)
        self.original_loss: Any = model.loss_function
        self.output = output
        self.calls = 0
        self.logits: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.head, name)

    def __call__(self, hidden: Tensor) -> Tensor:
        self.calls += 1
        return self.head(hidden) if self.output is None else self.output.clone()

    def loss_function(self, logits: Any, *args: Any, **kwargs: Any) -> Any:
        self.logits.append(logits)
        return self.original_loss(logits, *args, **kwargs)
