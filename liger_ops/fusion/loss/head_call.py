"""A call of a head whose logits are deferred, and what is known of them."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .. import tensor_parallel
from ..asked import asked
from ..sharding import shape_of
from . import head_hooks
from .head import parameter_of
from .lora import LoraHead

# The error where logits are needed, and computing them would lose their gradient.
TAKEN = (
    "the logits are skipped, and {} takes them; skip_logits=False keeps them, and"
    " liger_ops.unfuse restores the model"
)

# Called when logits are computed, with the reason and with the operands of the operation.
Say = Callable[[str, tuple[Any, ...]], None]


class HeadCall:
    """A call of a head, a `DeferringHead`, and the state of PyTorch in which it is made. `made` are
    its logits that are not computed, `is_over` whether the model's call has returned."""

    def __init__(self, head: Any, hidden: Tensor) -> None:
        self.head = head
        self.hidden = hidden
        self.made: list[Any] = []
        self.is_over = False
        self.computed = False
        self.with_grad = torch.is_grad_enabled()
        device = hidden.device.type
        self.in_autocast = torch.is_autocast_enabled(device)
        self.low = torch.get_autocast_dtype(device) if self.in_autocast else None

    @property
    def keeps(self) -> bool:
        """Whether the logits are computed at once, to be kept."""
        return self.head.head is None

    @property
    def vocabulary(self) -> int:
        head = self.head.head
        assert head is not None
        layer = head.base if isinstance(head, LoraHead) else head
        return shape_of(parameter_of(layer, "weight"))[0]

    def dtype_for(self, hidden: Tensor) -> torch.dtype:
        low = self.low is not None and hidden.dtype is not torch.float64
        return self.low if low and self.low is not None else hidden.dtype

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of the logits, None if it is only known when they are computed."""
        # FSDP2 may cast the hidden states.
        known = any(head_hooks.are_known(module) for module in self.head.modules)
        return None if known else self.dtype_for(self.hidden)

    @property
    def rows(self) -> tuple[int, ...] | None:
        """The shape of the rows, None if it is only known when they are computed."""
        head = self.head.head
        layer = head.base if isinstance(head, LoraHead) else head
        if layer is not None and head_hooks.are_over_words(layer):
            sharded = tensor_parallel.over_words(layer)
            if sharded is None or sharded.input_dim is not None:
                return None
        return tuple(self.hidden.shape[:-1])

    def may_record(self) -> bool:
        """Whether a recorded operation would have the same gradient as one that is done now."""
        return self.keeps or not self.computed and torch.is_grad_enabled() == self.with_grad

    def check_gradient(self) -> None:
        """Raise where the logits would be an input of an autograd.Function, which has gradients for
        tensors alone, and where they are needed after the call, when the weights may be others."""
        if self.is_over:
            raise RuntimeError(TAKEN.format("code that keeps them after the call"))
        if not self.with_grad or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        forwards = _forwards_of(torch.autograd.Function)
        if not forwards.isdisjoint(codes()):
            raise RuntimeError(TAKEN.format("a torch.autograd.Function"))

    def check_class(self, is_stand_in: Callable[[Any], bool]) -> None:
        """Raise where code that changed after `fuse` has asked for the class of the logits."""
        if torch.compiler.is_compiling():
            return
        for frame in frames():
            if asked(frame, is_stand_in) is not None:
                raise RuntimeError(TAKEN.format("code that asks for their class"))

    def in_its_autocast(self, function: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        """function(hidden) under the autocast of the call."""
        device = self.hidden.device.type
        if torch.is_autocast_enabled(device) == self.in_autocast:
            return function(hidden)
        with torch.autocast(device, self.low, enabled=self.in_autocast):
            return function(hidden)


def frames() -> Iterator[Any]:
    """The frames that are running, from the innermost out. One that is kept would keep itself."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def codes() -> list[types.CodeType]:
    """The code of the frames that are running, from the caller's out."""
    found, frame = [], sys._getframe().f_back
    while frame is not None:
        found.append(frame.f_code)
        frame = frame.f_back
    return found


def _forwards_of(function: Any) -> set[Any]:
    """The code of the forwards of a torch.autograd.Function and of all its subclasses."""
    own = {getattr(function.forward, "__code__", None)}
    return own.union(*map(_forwards_of, function.__subclasses__()))
