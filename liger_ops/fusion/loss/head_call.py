"""One call of a head whose logits are deferred."""

from __future__ import annotations

import operator
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .. import tensor_parallel
from ..asked import stand_in_asked
from ..lora.head import LoraHead
from ..sharding import shape_of
from .head import has_known_hooks, is_over_words, parameter_of

# The error where logits are needed, and computing them would lose their gradient or be wrong.
TAKEN = (
    "the logits are skipped, and {} takes them; skip_logits=False keeps them, and"
    " liger_ops.unfuse restores the model"
)

# Called when logits have to be computed, with the reason and the tensors of the operation.
OnComputed = Callable[[str, tuple[Any, ...]], None]


class HeadCall:
    """A call of a `DeferringHead`, and the modes of PyTorch in which it was made.

    Attributes:
        pending: the deferrals of this call that are not computed.
        is_over: whether the call of the model has returned.
        is_computed: whether the logits were computed.
        with_grad, in_autocast, autocast_dtype: the gradient and autocast modes of the call.
    """

    def __init__(self, head: Any, hidden: Tensor) -> None:
        self.head = head
        self.hidden = hidden
        self.pending: list[Any] = []
        self.is_over = False
        self.is_computed = False
        self.with_grad = torch.is_grad_enabled()
        device = hidden.device.type
        self.in_autocast = torch.is_autocast_enabled(device)
        self.autocast_dtype = torch.get_autocast_dtype(device) if self.in_autocast else None

    @property
    def keeps_logits(self) -> bool:
        """Return whether the logits are computed at once, to be kept."""
        return self.head.head is None

    @property
    def vocabulary(self) -> int:
        head = self.head.head
        assert head is not None
        layer = head.base if isinstance(head, LoraHead) else head
        return shape_of(parameter_of(layer, "weight"))[0]

    def dtype_for(self, hidden: Tensor) -> torch.dtype:
        # Autocast leaves float64 as it is.
        casts = self.autocast_dtype is not None and hidden.dtype is not torch.float64
        return self.autocast_dtype if casts and self.autocast_dtype is not None else hidden.dtype

    @property
    def dtype(self) -> torch.dtype | None:
        """Return the dtype of the logits, or None if it is only known once they are computed."""
        # FSDP2's hooks of the head may cast the hidden states.
        is_sharded = any(has_known_hooks(module) for module in self.head.modules)
        return None if is_sharded else self.dtype_for(self.hidden)

    @property
    def rows(self) -> tuple[int, ...] | None:
        """Return the shape of the rows, or None if it is only known once they are computed: a head
        that tensor parallelism shards may be given a shard of the sequence, and gather it."""
        head = self.head.head
        layer = head.base if isinstance(head, LoraHead) else head
        if layer is not None and is_over_words(layer):
            sharded = tensor_parallel.over_words(layer)
            if sharded is None or sharded.input_dim is not None:
                return None
        return tuple(self.hidden.shape[:-1])

    def may_record(self) -> bool:
        """Return whether a recorded operation gets the same gradient as one that is run now."""
        return (
            self.keeps_logits or not self.is_computed and torch.is_grad_enabled() == self.with_grad
        )

    def check_gradient(self) -> None:
        """Raise RuntimeError if computing the logits now would lose their gradient or be wrong.

        In the forward of a torch.autograd.Function, where gradients are off, the logits would be
        computed without any. After the call of the model the weights may have changed.
        """
        if self.is_over:
            raise RuntimeError(TAKEN.format("code that keeps them after the call"))
        if not self.with_grad or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        forwards = _forward_codes(torch.autograd.Function)
        if not forwards.isdisjoint(running_codes()):
            raise RuntimeError(TAKEN.format("a torch.autograd.Function"))

    def check_class(self, is_stand_in: Callable[[Any], bool]) -> None:
        """Raise RuntimeError if a running function asks for the class of the logits.

        A dry run refuses such a model, so that this is code that changed after `fuse`.
        """
        if torch.compiler.is_compiling():
            return
        for frame in running_frames():
            if stand_in_asked(frame, is_stand_in) is not None:
                raise RuntimeError(TAKEN.format("code that asks for their class"))

    def in_autocast_of_call(self, function: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        """Return function(hidden), computed under the autocast mode of the call."""
        device = self.hidden.device.type
        if torch.is_autocast_enabled(device) == self.in_autocast:
            return function(hidden)
        with torch.autocast(device, self.autocast_dtype, enabled=self.in_autocast):
            return function(hidden)


def running_frames() -> Iterator[Any]:
    """Yield the frames on the stack, from the caller's out.

    Callers must not keep one: a frame in a variable of its own function is a reference cycle.
    """
    frame: Any = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def running_codes() -> list[types.CodeType]:
    """Return the code of each frame on the stack, from the caller's out."""
    # The first frame is this function's. A comprehension is a frame too before Python 3.12.
    return list(map(operator.attrgetter("f_code"), running_frames()))[1:]


def _forward_codes(function: Any) -> set[Any]:
    """Return the code of the forwards of a torch.autograd.Function and of all its subclasses."""
    codes = {getattr(function.forward, "__code__", None)}
    return codes.union(*map(_forward_codes, function.__subclasses__()))
