"""What is known of logits that are not computed: the operations that were recorded of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from . import head_hooks
from .form import Form, is_factor, keeps_columns
from .head_call import HeadCall


class NotRecorded:
    """What a method returns for an operation that needs the logits."""


NOT_RECORDED = NotRecorded()


class Deferral:
    """The logits of hidden states after recorded operations.

    A method answers the function of PyTorch that has its name: with another Deferral, with itself
    where the function returns the tensor that it is given, with what the function reads of it, or
    with NOT_RECORDED.

    hidden: the hidden states of the rows, after the last operation that chose some.
    rows: the shape of the rows. The hidden states keep theirs: torch 2.11 does not flatten those of
        a DTensor that is sharded over a sequence.
    tokens: the shape of the rows before the last operations that only shape them.
    chosen: whether an operation chose rows.
    parent, function, args: the logits that the last operation was done to, and the operation.
    value: the logits, if they are computed.
    """

    def __init__(
        self, call: HeadCall, hidden: Tensor, form: Form,
        tokens: tuple[int, ...], rows: tuple[int, ...], chosen: bool = False,
        parent: Deferral | None = None,
        function: Callable[..., Tensor] | None = None, args: tuple[Any, ...] = (),
    ) -> None:  # fmt: skip
        self.call = call
        self.hidden = hidden
        self.form = form
        self.tokens = tokens
        self.rows = rows
        self.chosen = chosen
        self.parent = parent
        self.function = function
        self.args = args
        self.value: Tensor | None = None

    def computed(self, why: str, operands: tuple[Any, ...] = ()) -> Tensor:
        """The logits, for the reason `why`, such as an operation with other operands. All logits of
        the head's call are computed, also those after recorded operations."""
        call = self.call
        if self.value is None:
            call.check_gradient()
            call.head.say(why, operands)
            call.computed = call.head.has_computed = True
            # An operation that writes into one of them is seen in its views, and in no other.
            with torch.set_grad_enabled(call.with_grad):
                for made in (*call.made, self):
                    made.value = made.done_now()
            # What the model forgot need not stay.
            for made in call.made:
                made.parent = made.function = None
            call.made = []
        assert self.value is not None
        return self.value

    def done_now(self) -> Tensor:
        if self.value is not None:
            return self.value
        if self.parent is None or self.function is None:
            return self.call.in_its_autocast(self.call.head.real, self.call.hidden)
        return self.function(self.parent.done_now(), *self.args)

    def obstacle(self) -> str | None:
        """What the op does not compute of these logits, or None."""
        call = self.call
        if self.value is not None:
            return None
        if torch.is_grad_enabled() and not call.with_grad:
            return "its head is called without gradients, and its loss is computed with them"
        beside = self.chosen or self.form.bias is not None
        if beside and head_hooks.are_over_words(call.head.head):
            return "its head is sharded over words, and its forward chooses or adds to its logits"
        return None

    @property
    def columns(self) -> int:
        return self.call.vocabulary if self.value is None else self.value.shape[-1]

    # What is read of the logits.

    def shape(self) -> Any:
        if self.value is not None:
            return self.value.shape
        return NOT_RECORDED if self.call.rows is None else torch.Size((*self.rows, self.columns))

    def dtype(self) -> Any:
        known = self.form.dtype or self.call.dtype if self.value is None else self.value.dtype
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

    # Operations.

    def mul(self, other: Any) -> Any:
        if not is_factor(other):
            return NOT_RECORDED
        return self._record(Tensor.mul, other, form=self.form.times(other))

    def div(self, other: Any) -> Any:
        if not is_factor(other):
            return NOT_RECORDED
        return self._record(Tensor.div, other, form=self.form.times(1.0, other))

    def add(self, other: Any) -> Any:
        if not self._is_bias(other) or self.dtype() is NOT_RECORDED:
            return NOT_RECORDED
        return self._record(Tensor.add, other, form=self.form.plus(other, self.dtype()))

    def tanh(self) -> Any:
        if self.form.capped:
            return NOT_RECORDED
        return self._record(Tensor.tanh, form=replace(self.form, capped=True))

    def contiguous(self) -> Any:
        is_whole = self.value is None and not self.chosen
        return self if is_whole else self._record(Tensor.contiguous, form=self.form)

    def to(self, *args: Any, **options: Any) -> Any:
        given = (*args, *options.values())
        if len(given) == 1 and isinstance(given[0], torch.dtype):
            if given[0] is not torch.float32:
                return self if given[0] is self.dtype() else NOT_RECORDED
            # A mode, such as one that widens a model, may cast to another dtype.
            dtype = torch.empty(0, dtype=torch.bfloat16).to(torch.float32).dtype
            if dtype is self.dtype():
                return self
            return self._record(Tensor.to, torch.float32, form=replace(self.form, dtype=dtype))
        is_device = len(given) == 1 and isinstance(given[0], torch.device)
        return self if is_device and given[0] == self.device() else NOT_RECORDED

    def float(self) -> Any:
        return self.to(torch.float32)

    def reshape(self, *shape: Any) -> Any:
        if len(shape) == 1 and isinstance(shape[0], (tuple, list)):
            shape = tuple(shape[0])
        words = self.columns
        sizes = len(shape) > 1 and all(isinstance(size, int) for size in shape)
        if sizes and shape[-1] == -1 and math.prod(shape[:-1]) == math.prod(self.rows):
            shape = (*shape[:-1], words)
        # Without the number of rows, only one size can be left open.
        open_rows = self.call.rows is not None or len(shape) == 2 and shape[0] == -1
        of_rows = sizes and shape[-1] == words and open_rows
        rows = with_size(shape[:-1], math.prod(self.rows)) if of_rows else None
        if rows is None:
            return NOT_RECORDED
        return self._record(Tensor.reshape, *shape, form=self.form, rows=rows)

    view = reshape

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Any:
        last = end_dim % self.dim()
        if last == self.dim() - 1 or self.call.rows is None:
            return NOT_RECORDED
        first = start_dim % self.dim()
        flat = math.prod(self.rows[first : last + 1])
        return self.reshape(*self.rows[:first], flat, *self.rows[last + 1 :], self.columns)

    def __getitem__(self, index: Any) -> Any:
        of_rows = self.call.rows is not None and keeps_columns(index, self.dim(), self.columns)
        if not of_rows or not self.call.may_record():
            return NOT_RECORDED
        hidden = self.hidden.reshape(*self.rows, self.hidden.shape[-1])[index]
        rows = tuple(hidden.shape[:-1])
        return self._record(Tensor.__getitem__, index, form=self.form, rows=rows, chosen=hidden)

    def _record(
        self, function: Callable[..., Any], *args: Any, form: Form,
        rows: tuple[int, ...] | None = None, chosen: Tensor | None = None,
    ) -> Any:  # fmt: skip
        """Record an operation.

        rows: the shape of the rows after it, if it shapes or chooses them.
        chosen: the hidden states of those that it chooses.
        """
        if not self.call.may_record():
            return NOT_RECORDED
        rows = self.rows if rows is None else rows
        hidden, tokens = (self.hidden, self.tokens) if chosen is None else (chosen, rows)
        logits = Deferral(
            self.call, hidden, form, tokens, rows,
            self.chosen or chosen is not None, self, function, args,
        )  # fmt: skip
        if self.call.keeps:
            logits.value = logits.done_now()
        else:
            self.call.made.append(logits)
        return logits

    def _is_bias(self, other: Any) -> bool:
        """Whether a summand is a bias per class, which the head's layer can add."""
        words = self.columns
        if not isinstance(other, Tensor) or hasattr(other, "_liger_ops_deferral"):
            return False
        if not 0 < other.dim() <= self.dim():
            return False
        if not self.form.is_untouched or not other.numel() == other.shape[-1] == words:
            return False
        # Under autocast a linear layer casts its bias.
        return other.dtype is self.dtype() or torch.is_autocast_enabled(self.device().type)

    def rows_of(self, x: Tensor) -> Tensor:
        """A tensor with the rows of the head's output, after the operations on rows."""
        if self.parent is None:
            return x
        x = self.parent.rows_of(x)
        if self.function is Tensor.__getitem__:
            return x[self.args[0]]
        return x.reshape(*self.args[:-1], x.shape[-1]) if self.function is Tensor.reshape else x


def with_size(shape: tuple[int, ...], count: int) -> tuple[int, ...] | None:
    """A shape of `count` elements whose size of -1, if it has one, is known, or None."""
    if -1 not in shape:
        return shape if math.prod(shape) == count else None
    place = shape.index(-1)
    others = math.prod(shape[:place] + shape[place + 1 :])
    if others == 1:
        return (*shape[:place], count, *shape[place + 1 :])
    if others < 1 or count % others:
        return None
    return (*shape[:place], count // others, *shape[place + 1 :])
