"""The head in a view of a model: its calls return deferred logits, and it computes their losses."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import checkpoint

from . import head_hooks, place
from .deferral import Deferral
from .deferred import DeferredLogits, deferred
from .form import Form
from .head_call import HeadCall, Say, codes
from .lora import LoraHead
from .options import LossOptions
from .value import OfHidden, OfLogits, OfShardedHead, Source, value_of


class DeferringHead:
    """A head whose logits are computed only if something but a loss needs them.

    head: the linear layer, or None if the logits are kept, as for a head that is none.
    modules: those that a call of the head calls.
    options: those of the call of the model.
    beside: what the options ask for beside the loss, by name.
    has_computed: whether the logits of any call were computed.
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
        self.has_computed = False
        self.depth = 0 if torch.compiler.is_compiling() else len(codes()) - 1

    def __call__(self, hidden: Any, *args: Any, **kwargs: Any) -> Any:
        is_tensor = isinstance(hidden, Tensor) and not isinstance(hidden, DeferredLogits)
        if args or kwargs or not is_tensor:
            return place.call(self.modules[0], hidden, *args, **kwargs)
        if self.in_checkpoint():
            # The backward calls the head again, when it is no longer in the place of another.
            self.has_computed = True
            self.say("its forward calls its head in a checkpoint", ())
            return place.call(self.modules[0], hidden)
        call = HeadCall(self, hidden)
        self.calls.append(call)
        # If they are kept, later operations choose and shape rows of the logits themselves.
        value = self.real(hidden) if self.head is None else None
        root = hidden if value is None else value
        rows = tuple(root.shape[:-1])
        logits = Deferral(call, root, Form(), rows, rows)
        if value is None:
            call.made.append(logits)
        logits.value = value
        return deferred(logits)

    def in_checkpoint(self) -> bool:
        """Whether a checkpoint within the model's forward calls the head."""
        if torch.compiler.is_compiling():
            return False
        inside = codes()[: -self.depth]
        return any(code.co_filename == checkpoint.__file__ for code in inside)

    def real(self, hidden: Tensor) -> Tensor:
        """The logits that the head itself returns."""
        logits: Tensor = place.call(self.modules[0], hidden)
        return logits

    def loss(self, logits: Deferral, target: Tensor, options: dict[str, Any]) -> Tensor:
        """The cross-entropy of logits, under the options of the model's call."""
        call = logits.call
        self.losses += 1
        reason = logits.obstacle()
        if reason is not None:
            logits.computed(reason)
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

    def source(self, logits: Deferral, hidden: Tensor) -> Source:
        assert self.head is not None
        of = OfShardedHead if head_hooks.are_over_words(self.head) else OfHidden
        return of(logits, hidden, self.head, self.options)

    def finish(self) -> None:
        """Forget the logits, which would live in a circle of references."""
        for call in self.calls:
            call.made, call.is_over = [], True
        self.calls = []


def _widens(x: Tensor) -> bool:
    """Whether autocast is on, and PyTorch's cross_entropy of bfloat16 returns float32 in it."""
    if not torch.is_autocast_enabled(x.device.type):
        return False
    row = x.new_zeros((1, 1), dtype=torch.bfloat16)
    return F.cross_entropy(row, row.new_zeros(1, dtype=torch.int64)).dtype is torch.float32
