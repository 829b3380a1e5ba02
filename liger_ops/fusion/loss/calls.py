"""Replace the calls of a model's head during one call of the model: they return deferred logits,
and the replacement computes their losses.

The model's own forward runs, on the model itself with its own head. The class of the head gets a
`__call__` that looks for a replacement in a list of the current thread. Nothing is written to the
model, so that calls in other threads, and calls that raise, do not interfere. torch.compile traces
the look-up.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import checkpoint

from .. import classes
from ..lora.head import LoraHead
from .deferral import Deferral, LogitsTransform
from .deferred import DeferredLogits, tensor_of
from .head import call_between_hooks, is_over_words
from .head_call import HeadCall, OnComputed, running_codes
from .options import ForwardLossOptions
from .value import HeadLoss, LogitsLoss, LossSource, ShardedHeadLoss, loss_of

HEAD = "head of a loss"


class _ReplacedHeads(threading.local):
    """Pairs of a head and its replacement in the current thread, the outermost model's first."""

    active: tuple[tuple[Any, Any], ...] = ()


REPLACED = _ReplacedHeads()


def is_replaced(head: Any) -> bool:
    """Return whether the calls of a head are replaced."""
    return any(replaced is head for replaced, _ in REPLACED.active)


@classes.kind(HEAD, counts=False)
def methods(base: Any, facts: None) -> dict[str, Any]:
    original = base.__call__

    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        for head, replacement in REPLACED.active:
            if head is self:
                return replacement(*args, **kwargs)
        return original(self, *args, **kwargs)

    return {"__call__": called, "_liger_ops_call": original}


def call_itself(head: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a head itself, also while its calls are replaced."""
    if hasattr(type(head), "_liger_ops_call"):
        return head._liger_ops_call(*args, **kwargs)
    return head(*args, **kwargs)


def prepare(head: Any) -> str | None:
    """Give the head a class whose `__call__` can be replaced, or return why it cannot get one."""
    if not isinstance(head, nn.Module):
        return "its head is not a module"
    if HEAD in classes.overrides(head):
        return None
    if torch.compiler.is_compiling():
        return "its head was replaced after fuse, and has not been called before torch.compile"
    classes.override(head, HEAD, None)
    return None


class DeferringHead:
    """A head whose logits are computed only if something but a loss needs them.

    Attributes:
        head: the linear layer, or None if every call computes its logits at once and keeps them.
        modules: the model's head and the modules that a call of it calls in turn, down to the
            linear layer.
        options: the options that the call of the model gave for the loss.
        on_computed: called with the reason when logits have to be computed.
        extra_outputs: the tensors that the options ask for in addition to the loss, by name.
        calls: the calls of the head in this forward.
        losses: the number of cross-entropies of this head's logits.
        has_computed: whether the logits of any call were computed.
        depth: the number of frames on the stack up to the fused forward, which makes this object.
    """

    def __init__(
        self, head: nn.Linear | LoraHead | None, modules: list[Any],
        options: ForwardLossOptions, on_computed: OnComputed,
    ) -> None:  # fmt: skip
        self.head = head
        self.modules = modules
        self.options = options
        self.on_computed = on_computed
        self.extra_outputs: dict[str, Tensor] = {}
        self.calls: list[HeadCall] = []
        self.losses = 0
        self.has_computed = False
        self.depth = 0 if torch.compiler.is_compiling() else len(running_codes()) - 1

    def __call__(self, hidden: Any, *args: Any, **kwargs: Any) -> Any:
        is_tensor = isinstance(hidden, Tensor) and not isinstance(hidden, DeferredLogits)
        if args or kwargs or not is_tensor:
            return call_itself(self.modules[0], hidden, *args, **kwargs)
        if self.in_checkpoint():
            # The backward runs the checkpoint again, when this object no longer replaces the head:
            # a deferred result now and a tensor then would not match.
            self.has_computed = True
            self.on_computed("its forward calls its head in a checkpoint", ())
            return call_itself(self.modules[0], hidden)
        call = HeadCall(self, hidden)
        self.calls.append(call)
        # Kept logits are the root: later operations choose and shape rows of them. Otherwise
        # the hidden states are, and the rows are chosen before the product with the weight.
        value = self.compute_logits(hidden) if self.head is None else None
        root = hidden if value is None else value
        rows = tuple(root.shape[:-1])
        logits = Deferral(call, root, LogitsTransform(), rows, rows)
        if value is None:
            call.pending.append(logits)
        logits.value = value
        return tensor_of(logits)

    def in_checkpoint(self) -> bool:
        """Return whether a checkpoint within the model's forward calls the head."""
        if torch.compiler.is_compiling():
            return False
        # A checkpoint around the whole model is below `depth`, and runs this forward again.
        inside = running_codes()[: -self.depth]
        return any(code.co_filename == checkpoint.__file__ for code in inside)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits that the model's head itself computes."""
        logits: Tensor = call_itself(self.modules[0], hidden)
        return logits

    def loss(self, logits: Deferral, target: Tensor, options: dict[str, Any]) -> Tensor:
        """Compute the cross-entropy of logits, under the options of the model's call."""
        call = logits.call
        self.losses += 1
        reason = logits.obstacle()
        if reason is not None:
            logits.compute(reason)
        if logits.value is not None:
            if not self.options.asked:
                return F.cross_entropy(logits.value, target, **options)
            return self.loss_value(LogitsLoss(logits), target, options)
        is_widened = _autocast_widens_loss(call.hidden)

        def compute(hidden: Tensor) -> Tensor:
            value = self.loss_value(self.source(logits, hidden), target, options)
            # The dtype that PyTorch's cross_entropy of these logits returns.
            dtype = logits.transform.dtype or call.dtype_for(hidden)
            return value.to(torch.float32 if is_widened and dtype.itemsize < 4 else dtype)

        def compute_as_called(hidden: Tensor) -> Tensor:
            return call.in_autocast_of_call(compute, hidden)

        return call_between_hooks(self.modules, compute_as_called, call.hidden)

    def loss_value(self, source: LossSource, target: Tensor, options: dict[str, Any]) -> Tensor:
        value, extra = loss_of(source, target, options, self.options)
        # Of several losses in a forward, the first gives the extra outputs.
        self.extra_outputs = self.extra_outputs or extra
        return value

    def source(self, logits: Deferral, hidden: Tensor) -> LossSource:
        assert self.head is not None
        source = ShardedHeadLoss if is_over_words(self.head) else HeadLoss
        return source(logits, hidden, self.head, self.options)

    def finish(self) -> None:
        """Forget the logits, which would otherwise live on in a reference cycle."""
        for call in self.calls:
            call.pending, call.is_over = [], True
        self.calls = []


def _autocast_widens_loss(x: Tensor) -> bool:
    """Return whether autocast is on, and casts bfloat16 logits of a cross_entropy to float32."""
    if not torch.is_autocast_enabled(x.device.type):
        return False
    row = x.new_zeros((1, 1), dtype=torch.bfloat16)
    return F.cross_entropy(row, row.new_zeros(1, dtype=torch.int64)).dtype is torch.float32
