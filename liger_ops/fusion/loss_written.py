"""Losses that a forward computes itself, with the torch.nn.CrossEntropyLoss of its file.

Forwards of sequence-to-sequence and masked language models do so. Such a forward is copied, and the
copy calls another class under a new name, which is added to the globals of the file. The head gives
it not a tensor but an object with the few operations that such code applies to logits before
their loss; any other operation is an error, which the probe meets.
"""

from __future__ import annotations

import dis
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NAME = "CrossEntropyLoss"
ALIAS = f"_liger_ops_{NAME}"


def is_called_by(function: Any) -> bool:
    """Whether a forward, or a function that it wraps, calls CrossEntropyLoss by that name alone."""
    while inspect.isfunction(function):
        if NAME in function.__code__.co_names:
            uses = {
                instruction.opname
                for instruction in dis.get_instructions(function.__code__)
                if instruction.opcode in dis.hasname and instruction.argval == NAME
            }
            is_global = function.__globals__.get(NAME) is nn.CrossEntropyLoss
            return is_global and uses == {"LOAD_GLOBAL"}
        function = getattr(function, "__wrapped__", None)
    return False


def calling(function: Any) -> Any:
    """A copy of a forward, and of all its wrappers, that calls HeadLoss for CrossEntropyLoss."""
    code = function.__code__
    closure = function.__closure__
    attributes = dict(vars(function))
    if NAME in code.co_names:
        function.__globals__[ALIAS] = HeadLoss
        code = code.replace(co_names=tuple(ALIAS if n == NAME else n for n in code.co_names))
    else:
        wrapped = function.__wrapped__
        attributes["__wrapped__"] = inner = calling(wrapped)
        closure = tuple(
            types.CellType(inner) if cell.cell_contents is wrapped else cell
            for cell in closure or ()
        )
    made = types.FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, closure
    )
    made.__kwdefaults__ = function.__kwdefaults__
    made.__qualname__ = function.__qualname__
    made.__module__ = function.__module__
    vars(made).update(attributes)
    return made


class HeadLoss:
    """Like torch.nn.CrossEntropyLoss, except for deferred logits, which compute the loss."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.args = args
        self.options = options

    def __call__(self, logits: Any, target: Tensor) -> Tensor:
        if not isinstance(logits, DeferredLogits):
            return nn.CrossEntropyLoss(*self.args, **self.options)(logits, target)
        if self.args or set(self.options) - {"ignore_index"}:
            raise TypeError(f"{NAME} with {(*self.args, *self.options)} of the head's logits")
        return logits.loss(target, **self.options)


# (hidden, bias added to the logits or None, target, ignore_index) -> loss.
LossOfHidden = Callable[[Tensor, "Tensor | None", Tensor, int], Tensor]


class DeferredLogits:
    """Stand-in for the logits of hidden states, until their loss is computed.

    may_add: whether a bias may be added to them.
    """

    def __init__(
        self, loss_of: LossOfHidden, hidden: Tensor, vocabulary: int,
        dtype: torch.dtype, may_add: bool, bias: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.loss_of = loss_of
        self.hidden = hidden
        self.vocabulary = vocabulary
        self.dtype = dtype
        self.may_add = may_add
        self.bias = bias

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.hidden.shape[:-1], self.vocabulary)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def view(self, *shape: int) -> DeferredLogits:
        if len(shape) != 2 or shape[0] != -1 or shape[1] != self.vocabulary:
            raise TypeError(f"a view {shape} of the logits")
        return self._with(hidden=self.hidden.reshape(-1, self.hidden.shape[-1]))

    reshape = view

    def contiguous(self) -> DeferredLogits:
        return self

    def float(self) -> DeferredLogits:
        return self._with(dtype=torch.float32)

    def __add__(self, bias: Tensor) -> DeferredLogits:
        """Add a bias per class."""
        shapes = ((self.vocabulary,), (1, self.vocabulary))
        if not self.may_add or self.bias is not None or tuple(bias.shape) not in shapes:
            raise TypeError("a sum of the logits")
        dtype = torch.promote_types(self.dtype, bias.dtype)
        return self._with(bias=bias.reshape(-1), dtype=dtype)

    def loss(self, target: Tensor, ignore_index: int = -100) -> Tensor:
        if self.hidden.dim() != 2:
            raise TypeError("a loss of logits that are not flat")
        value = self.loss_of(self.hidden, self.bias, target, ignore_index)
        # The dtype that CrossEntropyLoss would return, also under autocast.
        row = self.hidden.new_zeros((1, 1), dtype=self.dtype)
        return value.to(F.cross_entropy(row, target.new_zeros(1)).dtype)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"the logits are skipped, and the model's forward uses their {name};"
            " skip_logits=False keeps them"
        )

    def _with(
        self, hidden: Tensor | None = None,
        dtype: torch.dtype | None = None, bias: Tensor | None = None,
    ) -> DeferredLogits:  # fmt: skip
        # Every field is listed because Dynamo of torch 2.11 does not trace vars(self).
        return DeferredLogits(
            self.loss_of,
            self.hidden if hidden is None else hidden,
            self.vocabulary,
            self.dtype if dtype is None else dtype,
            self.may_add,
            self.bias if bias is None else bias,
        )
