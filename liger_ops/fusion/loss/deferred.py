"""Logits that are not computed unless something needs them.

The head of a view returns `DeferredLogits` for hidden states, and the model's own code works on
them as on a tensor. Operations that `linear_cross_entropy` computes too are recorded: a positive
factor, tanh, a cast to float32, a bias per class, and the choice and shape of rows. Their
cross-entropy is the op. Every other operation computes the logits: the head is called, the recorded
operations are done to its output by PyTorch's own functions, and the operation to the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from . import head_hooks
from .form import Form, is_factor, keeps_columns
from .head_call import HeadCall

NO_OPTIONS: dict[str, Any] = {}


def _recorded(form_of: Callable[..., Form | None]) -> Callable[..., Any]:
    """A method of the name of one of Tensor's: it records an operation of which `form_of` returns
    the form, and does any other."""
    name = form_of.__name__
    function = getattr(Tensor, name)

    def method(self: DeferredLogits, *args: Any, **options: Any) -> Any:
        form = None if options else form_of(self, *args)
        return self._record(name, function, args, form, options)

    return method


class DeferredLogits:
    """The logits of hidden states after recorded operations.

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
        parent: DeferredLogits | None = None,
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

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is F.cross_entropy:
            return cross_entropy(*args, **kwargs)
        if args and function in RECORDED:
            if isinstance(args[0], DeferredLogits):
                return getattr(args[0], RECORDED[function])(*args[1:], **kwargs)
            if RECORDED[function] == "add" and len(args) == 2 and not kwargs:
                return args[1].add(args[0])
        return done(function, getattr(function, "__name__", "a function"), args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.computed(applies(name)), name)

    def computed(self, why: str, operands: tuple[Any, ...] = ()) -> Tensor:
        """The logits, for the reason `why`, such as an operation with other operands. All logits of
        the head's call are computed, also those after recorded operations."""
        call = self.call
        if self.value is None:
            call.check_gradient()
            call.head.say(why, operands)
            call.computed = True
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
            return self.call.in_its_autocast(self.call.head.modules[0], self.call.hidden)
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
    def shape(self) -> torch.Size:
        if self.value is not None or self.call.rows is None:
            return self.computed(applies("shape")).shape
        return torch.Size((*self.rows, self.columns))

    @property
    def columns(self) -> int:
        return self.call.vocabulary if self.value is None else self.value.shape[-1]

    @property
    def dtype(self) -> torch.dtype:
        known = None if self.value is not None else self.form.dtype or self.call.dtype
        return self.computed(applies("dtype")).dtype if known is None else known

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    @property
    def ndim(self) -> int:
        return self.dim()

    def dim(self) -> int:
        return len(self.rows) + 1

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def __len__(self) -> int:
        return self.shape[0]

    @_recorded
    def mul(self, other: Any) -> Form | None:
        return self.form.times(other) if is_factor(other) else None

    @_recorded
    def div(self, other: Any) -> Form | None:
        return self.form.times(1.0, other) if is_factor(other) else None

    @_recorded
    def add(self, other: Any) -> Form | None:
        return self.form.plus(other, self.dtype) if self._is_bias(other) else None

    @_recorded
    def tanh(self) -> Form | None:
        return None if self.form.capped else replace(self.form, capped=True)

    @_recorded
    def contiguous(self) -> Form | None:
        return self.form

    def to(self, *args: Any, **options: Any) -> Any:
        given = (*args, *options.values())
        if len(given) == 1 and isinstance(given[0], torch.dtype):
            if given[0] is torch.float32:
                # A mode, such as one that widens a model, may cast to another dtype.
                dtype = torch.empty(0, dtype=torch.bfloat16).to(torch.float32).dtype
                form = replace(self.form, dtype=dtype)
                return self._record("to", Tensor.to, (torch.float32,), form)
            if given[0] is self.dtype:
                return self
        elif len(given) == 1 and isinstance(given[0], torch.device) and given[0] == self.device:
            return self
        return self._record("to", Tensor.to, args, None, options)

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
        form = None if rows is None else self.form
        return self._record("reshape", Tensor.reshape, shape, form, rows=rows)

    view = reshape

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Any:
        last = end_dim % self.dim()
        if last == self.dim() - 1 or self.call.rows is None:
            return self._record("flatten", Tensor.flatten, (start_dim, end_dim), None)
        first = start_dim % self.dim()
        flat = math.prod(self.rows[first : last + 1])
        return self.reshape(*self.rows[:first], flat, *self.rows[last + 1 :], self.columns)

    def __getitem__(self, index: Any) -> Any:
        of_rows = self.call.rows is not None and keeps_columns(index, self.dim(), self.columns)
        if not of_rows or not self.call.may_record():
            return self._record("index", Tensor.__getitem__, (index,), None)
        hidden = self.hidden.reshape(*self.rows, self.hidden.shape[-1])[index]
        rows = tuple(hidden.shape[:-1])
        return self._record(
            "index", Tensor.__getitem__, (index,), self.form, rows=rows, chosen=hidden
        )

    def _record(
        self, name: str, function: Callable[..., Any], args: tuple[Any, ...], form: Form | None,
        options: dict[str, Any] = NO_OPTIONS, rows: tuple[int, ...] | None = None,
        chosen: Tensor | None = None,
    ) -> Any:  # fmt: skip
        """Record an operation, or do it if it has no form.

        options: the keyword arguments of one that has none.
        rows: the shape of the rows after it, if it shapes or chooses them.
        chosen: the hidden states of those that it chooses.
        """
        if form is None or not self.call.may_record():
            return done(function, name, (self, *args), options)
        rows = self.rows if rows is None else rows
        hidden, tokens = (self.hidden, self.tokens) if chosen is None else (chosen, rows)
        logits = DeferredLogits(
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
        if not isinstance(other, Tensor) or not 0 < other.dim() <= self.dim():
            return False
        if not self.form.is_untouched or not other.numel() == other.shape[-1] == words:
            return False
        # Under autocast a linear layer casts its bias.
        return other.dtype is self.dtype or torch.is_autocast_enabled(self.device.type)

    def rows_of(self, x: Tensor) -> Tensor:
        """A tensor with the rows of the head's output, after the operations on rows."""
        if self.parent is None:
            return x
        x = self.parent.rows_of(x)
        if self.function is Tensor.__getitem__:
            return x[self.args[0]]
        return x.reshape(*self.args[:-1], x.shape[-1]) if self.function is Tensor.reshape else x


# The functions of torch that methods of DeferredLogits record.
RECORDED: dict[Any, str] = {
    **dict.fromkeys((torch.mul, torch.multiply), "mul"),
    **dict.fromkeys((torch.div, torch.divide, torch.true_divide), "div"),
    **dict.fromkeys((torch.add, Tensor.add, Tensor.__add__), "add"),
    torch.tanh: "tanh", torch.reshape: "reshape", torch.flatten: "flatten",
}  # fmt: skip


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


def applies(name: str) -> str:
    return f"its forward applies {name} to its logits"


def done(function: Any, name: str, args: Any, kwargs: Any) -> Any:
    """What a function returns for the logits that are among its arguments."""
    operands = tuple(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
    for one in pytree.tree_leaves((args, kwargs)):
        if isinstance(one, DeferredLogits):
            one.computed(applies(name), operands)
    args, kwargs = pytree.tree_map_only(DeferredLogits, lambda one: one.value, (args, kwargs))
    return function(*args, **kwargs)


def cross_entropy(
    input: Any, target: Any, weight: Any = None, size_average: Any = None,
    ignore_index: int = -100, reduce: Any = None,
    reduction: str = "mean", label_smoothing: float = 0.0,
) -> Tensor:  # fmt: skip
    """torch.nn.functional.cross_entropy of deferred logits."""
    options = {
        "ignore_index": ignore_index,
        "reduction": reduction,
        "label_smoothing": label_smoothing,
    }
    plain = weight is None and size_average is None and reduce is None
    rows = isinstance(input, DeferredLogits) and input.dim() == 2
    labels = isinstance(target, Tensor) and target.dim() == 1 and target.dtype is torch.int64
    if plain and rows and labels:
        input.call.check_gradient()
        return input.call.head.loss(input, target, options)
    others = {"weight": weight, "size_average": size_average, "reduce": reduce}
    loss: Tensor = done(F.cross_entropy, "cross_entropy", (input, target), {**others, **options})
    return loss


def _operator(name: str) -> Callable[..., Any]:
    def operate(self: DeferredLogits, *args: Any) -> Any:
        return done(getattr(Tensor, name), name.strip("_"), (self, *args), {})

    return operate


# Python looks operators up in the class.
for _name in (
    "neg", "abs", "invert", "sub", "rsub", "rtruediv", "pow", "rpow", "floordiv", "rfloordiv",
    "mod", "rmod", "matmul", "rmatmul", "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "xor",
    "iadd", "isub", "imul", "itruediv", "ipow", "setitem", "bool", "float", "int", "contains",
    "iter",
):  # fmt: skip
    setattr(DeferredLogits, f"__{_name}__", _operator(f"__{_name}__"))
DeferredLogits.__hash__ = object.__hash__  # type: ignore[method-assign]
for _name, _method in {
    "mul": "mul", "rmul": "mul", "truediv": "div", "add": "add", "radd": "add",
}.items():  # fmt: skip
    setattr(DeferredLogits, f"__{_name}__", getattr(DeferredLogits, _method))
