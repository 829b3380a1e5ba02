"""Logits that are not computed yet: hidden states and the operations recorded on their logits,
which are a scale, a soft cap, a bias and a cast.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...accepted import is_scale
from . import head
from .head_call import HeadCall


@dataclass(frozen=True)
class LogitsTransform:
    """The transform post * tanh(pre * (logits + bias)) of logits, with the tanh only if `capped`.

    pre is multiplier / divisor. The two are kept apart so that a cap of 30 gives the scale 30 / 30.
    dtype is that of a cast or a sum, or None for the dtype of the head's output.

    It is not a NamedTuple, because Dynamo of torch 2.11 makes an empty one after a graph break.
    """

    multiplier: float = 1.0
    divisor: float = 1.0
    capped: bool = False
    post: float = 1.0
    bias: Tensor | None = None
    dtype: torch.dtype | None = None

    @property
    def softcap(self) -> float | None:
        return self.post if self.capped else None

    @property
    def logit_scale(self) -> float:
        return self.multiplier * self.post / self.divisor

    @property
    def is_untouched(self) -> bool:
        """Return whether the logits are those of the head, unchanged."""
        numbers = self.multiplier == self.divisor == 1.0 and not self.capped
        return numbers and self.bias is None and self.dtype is None

    def times(self, factor: float, divisor: float = 1.0) -> LogitsTransform:
        if self.capped:
            return replace(self, post=self.post * factor / divisor)
        return replace(self, multiplier=self.multiplier * factor, divisor=self.divisor * divisor)

    def plus(self, bias: Tensor, dtype: torch.dtype) -> LogitsTransform:
        return replace(self, bias=bias.reshape(-1), dtype=torch.promote_types(dtype, bias.dtype))


def is_factor(value: Any) -> bool:
    """Return whether a value is a number by which the op can scale logits."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and is_scale(value)


def keeps_columns(index: Any, dims: int, columns: int) -> bool:
    """Return whether an index of a tensor of `dims` dimensions selects rows, with all columns."""
    items = list(index) if isinstance(index, tuple) else [index]
    used = sum(_dims_of(item) for item in items)
    if not any(item is Ellipsis for item in items):
        return used < dims or used == dims and _is_whole(items[-1], columns)
    return used < dims and (items[-1] is Ellipsis or _is_whole(items[-1], columns))


def _dims_of(item: Any) -> int:
    if item is None or item is Ellipsis:
        return 0
    if isinstance(item, Tensor) and item.dtype is torch.bool:
        return item.dim()
    return 1


def _is_whole(item: Any, size: int) -> bool:
    if not isinstance(item, slice) or item.start not in (None, 0) or item.step not in (None, 1):
        return False
    return item.stop is None or item.stop >= size


class NotRecorded:
    """The type of NOT_RECORDED, the answer to an operation that needs the computed logits."""


NOT_RECORDED = NotRecorded()


class Deferral:
    """The logits of hidden states, after the operations that were recorded on them.

    Each method answers the PyTorch function of its name. It returns another Deferral; or itself,
    where the function returns its argument; or the value that the function reads, such as a shape;
    or NOT_RECORDED, for an operation that needs the computed logits.

    Attributes:
        call: the call of the head.
        hidden: the hidden states, after the last operation that selected rows.
        transform: the scale, soft cap, bias and cast that were recorded.
        rows: the shape of the rows. The hidden states keep their own shape: torch 2.11 does not
            flatten a DTensor that is sharded over a sequence.
        tokens: the shape of the rows before the last operations that only reshape them.
        selects_rows: whether an operation selected rows.
        parent, function, args: the logits before the last operation, and that operation.
        value: the logits, if they are computed.
    """

    def __init__(
        self, call: HeadCall, hidden: Tensor, transform: LogitsTransform,
        tokens: tuple[int, ...], rows: tuple[int, ...], selects_rows: bool = False,
        parent: Deferral | None = None,
        function: Callable[..., Tensor] | None = None, args: tuple[Any, ...] = (),
    ) -> None:  # fmt: skip
        self.call = call
        self.hidden = hidden
        self.transform = transform
        self.tokens = tokens
        self.rows = rows
        self.selects_rows = selects_rows
        self.parent = parent
        self.function = function
        self.args = args
        self.value: Tensor | None = None

    def compute(self, reason: str, operands: tuple[Any, ...] = ()) -> Tensor:
        """Compute and return the logits. All logits of the head's call are computed, also those
        after recorded operations.

        Args:
            reason: why they are needed, such as an operation that the op does not compute.
            operands: the tensors of that operation.
        """
        call = self.call
        if self.value is None:
            call.check_gradient()
            call.head.on_computed(reason, operands)
            call.is_computed = call.head.has_computed = True
            # All at once, in order: the views among them share memory, so that an in-place
            # operation on one is seen in its views, and in no other, as without `fuse`.
            with torch.set_grad_enabled(call.with_grad):
                for deferral in (*call.pending, self):
                    deferral.value = deferral.evaluate()
            # Do not keep logits alive that the model no longer holds.
            for deferral in call.pending:
                deferral.parent = deferral.function = None
            call.pending = []
        assert self.value is not None
        return self.value

    def evaluate(self) -> Tensor:
        """Return the logits by running the head and the recorded operations."""
        if self.value is not None:
            return self.value
        if self.parent is None or self.function is None:
            return self.call.in_autocast_of_call(self.call.head.compute_logits, self.call.hidden)
        return self.function(self.parent.evaluate(), *self.args)

    def obstacle(self) -> str | None:
        """Return the reason that the op cannot compute a loss of these logits, or None."""
        call = self.call
        if self.value is not None:
            return None
        if torch.is_grad_enabled() and not call.with_grad:
            return "its head is called without gradients, and its loss is computed with them"
        needs_plain_head = self.selects_rows or self.transform.bias is not None
        if needs_plain_head and head.is_over_words(call.head.head):
            return "its head is sharded over words, and its forward chooses or adds to its logits"
        return None

    @property
    def columns(self) -> int:
        return self.call.vocabulary if self.value is None else self.value.shape[-1]

    # Functions that read a property of the logits.

    def shape(self) -> Any:
        if self.value is not None:
            return self.value.shape
        return NOT_RECORDED if self.call.rows is None else torch.Size((*self.rows, self.columns))

    def dtype(self) -> Any:
        known = self.transform.dtype or self.call.dtype if self.value is None else self.value.dtype
        return NOT_RECORDED if known is None else known

    def device(self) -> torch.device:
        return self.hidden.device

    def ndim(self) -> int:
        return len(self.rows) + 1

    def dim(self) -> int:
        return len(self.rows) + 1

    def size(self, dim: int | None = None) -> Any:
        shape = self.shape()
        return shape if dim is None or shape is NOT_RECORDED else shape[dim]

    def __len__(self) -> Any:
        return self.size(0)

    # Operations that can be recorded.

    def mul(self, other: Any) -> Any:
        if not is_factor(other):
            return NOT_RECORDED
        return self._record(Tensor.mul, other, transform=self.transform.times(other))

    def div(self, other: Any) -> Any:
        if not is_factor(other):
            return NOT_RECORDED
        return self._record(Tensor.div, other, transform=self.transform.times(1.0, other))

    def add(self, other: Any) -> Any:
        if not self._is_class_bias(other) or self.dtype() is NOT_RECORDED:
            return NOT_RECORDED
        return self._record(Tensor.add, other, transform=self.transform.plus(other, self.dtype()))

    def tanh(self) -> Any:
        # The op caps once.
        if self.transform.capped:
            return NOT_RECORDED
        return self._record(Tensor.tanh, transform=replace(self.transform, capped=True))

    def contiguous(self) -> Any:
        # Rows that were selected may be strided, so that contiguous() copies them.
        is_whole = self.value is None and not self.selects_rows
        return self if is_whole else self._record(Tensor.contiguous, transform=self.transform)

    def to(self, *args: Any, **options: Any) -> Any:
        target = (*args, *options.values())
        if len(target) == 1 and isinstance(target[0], torch.dtype):
            if target[0] is not torch.float32:
                return self if target[0] is self.dtype() else NOT_RECORDED
            # Ask a real cast: a mode that is active, such as the one that runs a model in float64,
            # may replace float32 by another dtype.
            dtype = torch.empty(0, dtype=torch.bfloat16).to(torch.float32).dtype
            if dtype is self.dtype():
                return self
            return self._record(
                Tensor.to, torch.float32, transform=replace(self.transform, dtype=dtype)
            )
        is_device = len(target) == 1 and isinstance(target[0], torch.device)
        return self if is_device and target[0] == self.device() else NOT_RECORDED

    def float(self) -> Any:
        return self.to(torch.float32)

    def reshape(self, *shape: Any) -> Any:
        if len(shape) == 1 and isinstance(shape[0], (tuple, list)):
            shape = tuple(shape[0])
        words = self.columns
        sizes = len(shape) > 1 and all(isinstance(size, int) for size in shape)
        if sizes and shape[-1] == -1 and math.prod(shape[:-1]) == math.prod(self.rows):
            shape = (*shape[:-1], words)
        # If the number of rows is not known, only (-1, vocabulary) is certain to fit.
        open_rows = self.call.rows is not None or len(shape) == 2 and shape[0] == -1
        keeps_words = sizes and shape[-1] == words and open_rows
        rows = _complete_shape(shape[:-1], math.prod(self.rows)) if keeps_words else None
        if rows is None:
            return NOT_RECORDED
        return self._record(Tensor.reshape, *shape, transform=self.transform, rows=rows)

    view = reshape

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Any:
        last = end_dim % self.dim()
        if last == self.dim() - 1 or self.call.rows is None:
            return NOT_RECORDED
        first = start_dim % self.dim()
        flat = math.prod(self.rows[first : last + 1])
        return self.reshape(*self.rows[:first], flat, *self.rows[last + 1 :], self.columns)

    def __getitem__(self, index: Any) -> Any:
        chooses_rows = self.call.rows is not None and keeps_columns(index, self.dim(), self.columns)
        if not chooses_rows or not self.call.may_record():
            return NOT_RECORDED
        hidden = self.hidden.reshape(*self.rows, self.hidden.shape[-1])[index]
        rows = tuple(hidden.shape[:-1])
        return self._record(
            Tensor.__getitem__, index, transform=self.transform, rows=rows, selected=hidden
        )

    def _record(
        self, function: Callable[..., Any], *args: Any, transform: LogitsTransform,
        rows: tuple[int, ...] | None = None, selected: Tensor | None = None,
    ) -> Any:  # fmt: skip
        """Record an operation, and return the logits after it.

        Args:
            function, args: the operation and its arguments behind the logits.
            transform: the transform after it.
            rows: the shape of the rows after it, if it reshapes or selects them.
            selected: the hidden states of the rows that it selects.
        """
        if not self.call.may_record():
            return NOT_RECORDED
        rows = self.rows if rows is None else rows
        hidden, tokens = (self.hidden, self.tokens) if selected is None else (selected, rows)
        logits = Deferral(
            self.call, hidden, transform, tokens, rows,
            self.selects_rows or selected is not None, self, function, args,
        )  # fmt: skip
        if self.call.keeps_logits:
            logits.value = logits.evaluate()
        else:
            self.call.pending.append(logits)
        return logits

    def _is_class_bias(self, other: Any) -> bool:
        """Return whether a summand is a bias per class, which the op can add as the head's bias."""
        words = self.columns
        if not isinstance(other, Tensor) or hasattr(other, "_liger_ops_deferral"):
            return False
        if not 0 < other.dim() <= self.dim():
            return False
        # The op adds a bias to the product, before scale and cap.
        if not self.transform.is_untouched or not other.numel() == other.shape[-1] == words:
            return False
        # Under autocast a linear layer casts its bias.
        return other.dtype is self.dtype() or torch.is_autocast_enabled(self.device().type)

    def rows_of(self, x: Tensor) -> Tensor:
        """Apply the recorded operations on rows to a tensor that has a row for each row of the
        head's output."""
        if self.parent is None:
            return x
        x = self.parent.rows_of(x)
        if self.function is Tensor.__getitem__:
            return x[self.args[0]]
        return x.reshape(*self.args[:-1], x.shape[-1]) if self.function is Tensor.reshape else x


def _complete_shape(shape: tuple[int, ...], count: int) -> tuple[int, ...] | None:
    """Return a shape of `count` elements with its -1 filled in, or None if it does not fit."""
    if -1 not in shape:
        return shape if math.prod(shape) == count else None
    position = shape.index(-1)
    others = math.prod(shape[:position] + shape[position + 1 :])
    if others == 1:
        return (*shape[:position], count, *shape[position + 1 :])
    if others < 1 or count % others:
        return None
    return (*shape[:position], count // others, *shape[position + 1 :])
