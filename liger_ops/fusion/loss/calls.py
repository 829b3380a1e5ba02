"""The head in a view of a model: its calls return deferred logits, and it computes their losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import tensor_parallel
from ..sharding import shape_of
from . import head_hooks
from .deferred import DeferredLogits
from .form import Form
from .head import parameter_of
from .lora import LoraHead
from .options import LossOptions
from .value import OfHidden, OfLogits, OfShardedHead, Source, value_of

# Called when logits are computed, with the reason and with the operands of the operation.
Say = Callable[[str, tuple[Any, ...]], None]


class DeferringHead:
    """A head whose logits are computed only if something but a loss needs them.

    head: the linear layer, or None if the logits are kept, as for a head that is none.
    modules: those that a call of the head calls.
    options: those of the call of the model.
    beside: what the options ask for beside the loss, by name.
    """

    def __init__(
        self, head: nn.Linear | LoraHead | None, modules: list[Any], options: LossOptions, say: Say
    ) -> None:
        self.head = head
        self.modules = modules
        self.options = options
        self.say = say
        self.beside: dict[str, Tensor] = {}
        self.calls: list[HeadCall] = []
        self.losses = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.modules[0], name)

    def __call__(self, hidden: Any, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or not isinstance(hidden, Tensor):
            return self.modules[0](hidden, *args, **kwargs)
        call = HeadCall(self, hidden)
        self.calls.append(call)
        return call.root()

    def loss(self, logits: DeferredLogits, target: Tensor, **options: Any) -> Tensor:
        """The cross-entropy of a call's logits, under the options of the model's call."""
        self.losses += 1
        call: Any = logits.call
        reason = self.obstacle(logits)
        if logits.value is None and reason is not None:
            call.compute(reason, ())
        if logits.value is not None:
            if not self.options.asked:
                return F.cross_entropy(logits.value, target, **options)
            return self.value(OfLogits(logits.value), logits, target, options)

        def compute(hidden: Tensor) -> Tensor:
            return self.value(self.source(logits, hidden), logits, target, options)

        def computed(hidden: Tensor) -> Tensor:
            return call.in_its_autocast(compute, hidden)

        value = head_hooks.called(self.modules, computed, call.hidden)
        dtype = logits.form.dtype or call.dtype
        if dtype is None:
            return value
        if dtype is not value.dtype and torch.is_autocast_enabled(value.device.type):
            # The dtype that PyTorch returns here.
            row = value.new_zeros((1, 1), dtype=dtype)
            dtype = F.cross_entropy(row, target.new_zeros(1)).dtype
        return value.to(dtype)

    def value(
        self, source: Source, logits: DeferredLogits, target: Tensor, options: dict[str, Any]
    ) -> Tensor:
        value, beside = value_of(source, target, logits.tokens, options, self.options)
        # The options are those of the first loss.
        self.beside = self.beside or beside
        return value

    def source(self, logits: DeferredLogits, hidden: Tensor) -> Source:
        assert self.head is not None
        of = OfShardedHead if head_hooks.are_over_words(self.head) else OfHidden
        return of(logits, hidden, self.head, self.options)

    def obstacle(self, logits: DeferredLogits) -> str | None:
        """What the op does not compute of deferred logits, or None."""
        if torch.is_grad_enabled() and not logits.call.with_grad:
            return "its head is called without gradients, and its loss is computed with them"
        beside = logits.chosen or logits.form.bias is not None
        if self.head is not None and beside and head_hooks.are_over_words(self.head):
            return "its head is sharded over words, and its forward chooses or adds to its logits"
        return None

    def finish(self) -> None:
        """Forget the calls, which refer to this object."""
        self.calls = []


class HeadCall:
    """A call of a head, and the state of PyTorch in which it is made."""

    def __init__(self, head: DeferringHead, hidden: Tensor) -> None:
        self.head = head
        self.hidden = hidden
        self.made: list[DeferredLogits] = []
        self.with_grad = torch.is_grad_enabled()
        device = hidden.device.type
        self.in_autocast = torch.is_autocast_enabled(device)
        self.low = torch.get_autocast_dtype(device) if self.in_autocast else None

    def root(self) -> DeferredLogits:
        hidden = self.hidden
        if self.head.head is None:
            # Rows of the logits themselves are what later operations choose.
            hidden = self.head.modules[0](hidden)
        logits = DeferredLogits(self, hidden, Form(), tuple(hidden.shape[:-1]))
        if self.head.head is None:
            logits.value = hidden
        self.made.append(logits)
        return logits

    @property
    def vocabulary(self) -> int:
        head = self.head.head
        if head is None:
            columns: Tensor = self.made[0].computed("")
            return columns.shape[-1]
        layer = head.base if isinstance(head, LoraHead) else head
        return shape_of(parameter_of(layer, "weight"))[0]

    @property
    def dtype(self) -> torch.dtype | None:
        if any(head_hooks.are_known(module) for module in self.head.modules):
            # FSDP2 may cast the hidden states.
            return None
        return self.low if self.in_autocast else self.hidden.dtype

    @property
    def rows(self) -> tuple[int, ...] | None:
        head = self.head.head
        layer = head.base if isinstance(head, LoraHead) else head
        if layer is not None and head_hooks.are_over_words(layer):
            sharded = tensor_parallel.over_words(layer)
            if sharded is None or sharded.input_dim is not None:
                return None
        return tuple(self.hidden.shape[:-1])

    def may_record(self) -> bool:
        kept = self.head.head is None
        return kept or self.made[0].value is None and torch.is_grad_enabled() == self.with_grad

    def add(self, logits: DeferredLogits) -> None:
        if self.head.head is None:
            assert logits.parent is not None and logits.function is not None
            logits.value = logits.function(logits.parent.computed(""), *logits.args)
        else:
            self.made.append(logits)

    def compute(self, why: str, operands: tuple[Any, ...]) -> None:
        self.head.say(why, operands)
        with torch.set_grad_enabled(self.with_grad):
            for logits in self.made:
                if logits.parent is None or logits.function is None:
                    logits.value = self.in_its_autocast(self.head.modules[0], self.hidden)
                else:
                    logits.value = logits.function(logits.parent.value, *logits.args)
        # An operation that writes sees all of them, and what the model forgot need not stay.
        for logits in self.made[1:]:
            logits.parent = logits.function = None
        del self.made[1:]

    def loss(self, logits: DeferredLogits, target: Tensor, **options: Any) -> Tensor:
        return self.head.loss(logits, target, **options)

    def in_its_autocast(self, function: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        """function(hidden) under the autocast of the call."""
        device = self.hidden.device.type
        if torch.is_autocast_enabled(device) == self.in_autocast:
            return function(hidden)
        with torch.autocast(device, self.low, enabled=self.in_autocast):
            return function(hidden)
