"""The head in a view of a model: its calls return deferred logits, and it computes their losses."""

from __future__ import annotations

import sys
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

    def loss(
        self, call: HeadCall, logits: DeferredLogits, target: Tensor, options: dict[str, Any]
    ) -> Tensor:
        """The cross-entropy of a call's logits, under the options of the model's call."""
        self.losses += 1
        reason = call.obstacle(logits)
        if logits.value is None and reason is not None:
            call.compute(logits, reason, ())
        if logits.value is not None:
            if not self.options.asked:
                return F.cross_entropy(logits.value, target, **options)
            return self.value(OfLogits(logits), target, options)
        widens = _widens(call.hidden)

        def compute(hidden: Tensor) -> Tensor:
            value = self.value(self.source(logits, hidden), target, options)
            dtype = logits.form.dtype or call.dtype_for(hidden)
            return value.to(torch.float32 if widens and dtype.itemsize < 4 else dtype)

        def computed(hidden: Tensor) -> Tensor:
            return call.in_its_autocast(compute, hidden)

        return head_hooks.called(self.modules, computed, call.hidden)

    def value(self, source: Source, target: Tensor, options: dict[str, Any]) -> Tensor:
        value, beside = value_of(source, target, options, self.options)
        # The options are those of the first loss.
        self.beside = self.beside or beside
        return value

    def source(self, logits: DeferredLogits, hidden: Tensor) -> Source:
        assert self.head is not None
        of = OfShardedHead if head_hooks.are_over_words(self.head) else OfHidden
        return of(logits, hidden, self.head, self.options)

    @property
    def has_computed(self) -> bool:
        """Whether the logits of any call were computed."""
        return any(call.computed for call in self.calls)

    def finish(self) -> None:
        """Forget the logits, which would live in a circle of references."""
        for call in self.calls:
            call.made = []
        self.calls = []


class HeadCall:
    """A call of a head, and the state of PyTorch in which it is made."""

    def __init__(self, head: DeferringHead, hidden: Tensor) -> None:
        self.head = head
        self.hidden = hidden
        self.made: list[DeferredLogits] = []
        self.computed = False
        self.with_grad = torch.is_grad_enabled()
        device = hidden.device.type
        self.in_autocast = torch.is_autocast_enabled(device)
        self.low = torch.get_autocast_dtype(device) if self.in_autocast else None

    @property
    def keeps(self) -> bool:
        """Whether the logits are computed at once, to be kept."""
        return self.head.head is None

    def root(self) -> DeferredLogits:
        if not self.keeps:
            rows = tuple(self.hidden.shape[:-1])
            logits = DeferredLogits(self, self.hidden, Form(), rows, rows)
            self.made.append(logits)
            return logits
        # Later operations choose and shape rows of the logits themselves.
        value = self.head.modules[0](self.hidden)
        rows = tuple(value.shape[:-1])
        logits = DeferredLogits(self, value, Form(), rows, rows)
        logits.value = value
        return logits

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

    def add(self, logits: DeferredLogits) -> None:
        """Note the result of a recorded operation."""
        if self.keeps:
            logits.value = self.value_of(logits)
        else:
            self.made.append(logits)

    def compute(self, logits: DeferredLogits, why: str, operands: tuple[Any, ...]) -> None:
        """Compute all logits of this call, also those after recorded operations, for a reason."""
        self.check_gradient()
        self.head.say(why, operands)
        self.computed = True
        # An operation that writes into one of them is seen in its views, and in no other.
        with torch.set_grad_enabled(self.with_grad):
            for made in (*self.made, logits):
                made.value = self.value_of(made)
        # What the model forgot need not stay.
        for made in self.made:
            made.parent = made.function = None
        self.made = []

    def value_of(self, logits: DeferredLogits) -> Tensor:
        if logits.value is not None:
            return logits.value
        if logits.parent is None or logits.function is None:
            return self.in_its_autocast(self.head.modules[0], self.hidden)
        return logits.function(self.value_of(logits.parent), *logits.args)

    def check_gradient(self) -> None:
        """Raise where the logits would be an input of an autograd.Function, which has gradients for
        tensors alone."""
        if not self.with_grad or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        forwards = _forwards_of(torch.autograd.Function)
        frame: Any = sys._getframe()
        while frame is not None:
            if frame.f_code in forwards:
                raise RuntimeError(
                    "the logits are skipped, and a torch.autograd.Function takes them;"
                    " skip_logits=False keeps them, and liger_ops.unfuse restores the model"
                )
            frame = frame.f_back

    def loss(self, logits: DeferredLogits, target: Tensor, **options: Any) -> Tensor:
        self.check_gradient()
        return self.head.loss(self, logits, target, options)

    def obstacle(self, logits: DeferredLogits) -> str | None:
        """What the op does not compute of these logits, or None."""
        if torch.is_grad_enabled() and not self.with_grad:
            return "its head is called without gradients, and its loss is computed with them"
        beside = logits.chosen or logits.form.bias is not None
        head = self.head.head
        if head is not None and beside and head_hooks.are_over_words(head):
            return "its head is sharded over words, and its forward chooses or adds to its logits"
        return None

    def in_its_autocast(self, function: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        """function(hidden) under the autocast of the call."""
        device = self.hidden.device.type
        if torch.is_autocast_enabled(device) == self.in_autocast:
            return function(hidden)
        with torch.autocast(device, self.low, enabled=self.in_autocast):
            return function(hidden)


def _widens(x: Tensor) -> bool:
    """Whether autocast is on, and PyTorch's cross_entropy of bfloat16 returns float32 in it."""
    if not torch.is_autocast_enabled(x.device.type):
        return False
    row = x.new_zeros((1, 1), dtype=torch.bfloat16)
    return F.cross_entropy(row, row.new_zeros(1, dtype=torch.int64)).dtype is torch.float32


def _forwards_of(function: Any) -> set[Any]:
    """The code of the forwards of a torch.autograd.Function and of all its subclasses."""
    own = {getattr(function.forward, "__code__", None)}
    return own.union(*map(_forwards_of, function.__subclasses__()))
