"""The call of a causal language model whose head and loss are one op.

The model's own forward runs, and does all that it did. It is not given the model for its `self`,
but a view of it, made for this one call: every attribute is the model's, except the head and
`loss_function`. The view's head keeps the hidden states and returns logits of no columns, which
cost nothing whatever is done to them; its loss function computes the loss of what the head kept.
What the head hands to the loss thus lives as long as the call, and nothing is written into the
model: calls from several threads, recomputed calls and calls that raise do not meet. torch.compile
traces the making of a view as it does any object's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from ..ops.linear_cross_entropy import linear_cross_entropy
from . import classes

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True)
class CausalLoss:
    """What a causal language model does with its hidden states.

    Its child `head`, a linear layer, makes logits of them, and loss_function, which is the model's
    attribute of that name, the cross-entropy of

        softcap * tanh(logits * logit_scale / softcap)

    or without softcap of logits * logit_scale, and of the labels, shifted by one.
    """

    head: str
    loss_function: Callable[..., Any]
    logit_scale: float
    softcap: float | None


@classes.kind("loss")
def methods(base: type, loss: CausalLoss) -> dict[str, Callable[..., Any]]:
    """A forward that computes the loss without logits where nobody asks for them."""
    original: Any = base.forward  # type: ignore[attr-defined]
    signature = inspect.signature(original)
    positional = tuple(signature.parameters)[1:]
    view = view_class(base)

    def forward(self: Any, *args: Any, skip_logits: bool | None = None, **kwargs: Any) -> Any:
        arguments = {**dict(zip(positional, args, strict=False)), **kwargs}
        if not _skips_logits(self, loss, arguments, skip_logits):
            return original(self, *args, **kwargs)
        return without_logits(original, view, self, loss, args, kwargs)

    # Trainer and generate look at the signature for what the model takes. functools.wraps would
    # give it as well, but accelerate follows __wrapped__ when it takes its own wrappers off again.
    forward.__signature__ = signature  # type: ignore[attr-defined]
    forward.__doc__ = original.__doc__
    return {"forward": forward}


def head_obstacle(head: Any) -> str | None:
    """Why a head cannot be replaced by a product with its weight, or None."""
    if type(head) is not nn.Linear:
        return f"its head is a {type(head).__name__}, not a torch.nn.Linear"
    if "forward" in vars(head):
        return "its head has a forward of its own"
    if head._compiled_call_impl is not None:
        return "its head is compiled by itself"
    for hooks in HOOKS:
        if getattr(head, hooks):
            return "its head has hooks"
    for tensor in (head.weight, head.bias):
        # A replica of DataParallel holds plain tensors, a model that torch.export traces fake ones.
        if tensor is not None and type(tensor) not in (nn.Parameter, Tensor, FakeTensor):
            return f"its head holds a {type(tensor).__name__}, not a plain tensor"
    return None


def view_class(base: type) -> type[View]:
    """The class of the views of a class's models."""
    namespace = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "_liger_ops_defaults": tuple(name for name in dir(base) if _is_default(base, name)),
    }
    return type(base.__name__, (View, base), namespace)


def _is_default(base: type, name: str) -> bool:
    """Whether an attribute of a class is one that its instances may replace by a value."""
    attribute = inspect.getattr_static(base, name)
    return not name.startswith("__") and (
        isinstance(attribute, type) or not hasattr(attribute, "__get__")
    )


def without_logits(
    original: Callable[..., Any],
    view: type[View],
    model: nn.Module,
    loss: CausalLoss,
    args: Any,
    kwargs: Any,
) -> Any:
    """What `original` returns for a model, with the loss computed by the op and without logits."""
    head = DeferredHead(getattr(model, loss.head), loss)
    output = original(view(model, loss.head, head), *args, **kwargs)
    if head.hidden is not None:
        raise RuntimeError(
            f"{type(model).__name__}: forward did not call loss_function for labels, as it did when"
            " liger_ops.fuse was called; skip_logits=False keeps it from skipping the logits"
        )
    return output if head.logits is None else drop(output, head.logits)


def drop(output: Any, logits: Tensor) -> Any:
    """A model's output without its logits, as transformers leaves out what is absent."""
    if isinstance(output, tuple):
        return tuple(value for value in output if value is not logits)
    return type(output)(**{name: value for name, value in output.items() if value is not logits})


class View:
    """A model but for its head and its loss function, for one call of its forward.

    It is an instance of the model's class, for the sake of `super()`, that holds nothing: what is
    not found in the class is taken from the model.
    """

    # Attributes of the class, instead of which the model may have its own.
    _liger_ops_defaults: tuple[str, ...] = ()

    def __init__(self, model: nn.Module, head_name: str, head: Any) -> None:
        object.__setattr__(self, "_liger_ops_view", (model, head_name, head))
        for name in self._liger_ops_defaults:
            object.__setattr__(self, name, getattr(model, name))

    def __getattr__(self, name: str) -> Any:
        model, head_name, head = self._liger_ops_view
        return head if name == head_name else getattr(model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._liger_ops_view[0], name, value)
        if name in self._liger_ops_defaults:
            object.__setattr__(self, name, value)

    @property
    def loss_function(self) -> Callable[..., Any]:
        return self._liger_ops_view[2].loss_function


class DeferredHead:
    """A head that computes when the loss is wanted, for the first hidden states it is given."""

    def __init__(self, head: nn.Linear, loss: CausalLoss) -> None:
        self.head = head
        self.loss = loss
        self.hidden: Tensor | None = None
        self.logits: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.head, name)

    def __call__(self, hidden: Tensor) -> Tensor:
        if self.hidden is not None or self.logits is not None:
            return self.head(hidden)
        self.hidden = hidden
        return hidden[..., :0]

    def loss_function(self, logits: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.hidden is None or logits.shape[-1] != 0:
            return self.loss.loss_function(logits, *args, **kwargs)
        self.logits = logits
        hidden, self.hidden = self.hidden, None
        return self.fused_loss(hidden, *args, **kwargs)

    def fused_loss(
        self,
        hidden: Tensor,
        labels: Tensor,
        vocab_size: int | None = None,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """The loss of hidden states, from the arguments that transformers' causal loss takes."""
        if shift_labels is None:
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        count, shape = _count_of_items(num_items_in_batch, hidden)
        value = linear_cross_entropy(
            hidden.reshape(-1, hidden.shape[-1]),
            self.head.weight,
            shift_labels.reshape(-1).to(hidden.device),
            self.head.bias,
            num_items_in_batch=count,
            ignore_index=ignore_index,
            softcap=self.loss.softcap,
            logit_scale=self.loss.logit_scale,
        )
        return value.reshape(shape)


def _count_of_items(items: Tensor | int | None, hidden: Tensor) -> tuple[Tensor | None, Any]:
    """What the op divides by, and the shape that dividing by `items` would give."""
    if items is None:
        return None, ()
    if not isinstance(items, Tensor):
        return torch.full((), items, device=hidden.device), ()
    # Trainer hands (1, 1) to each replica of DataParallel.
    return items.to(hidden.device).reshape(()), items.shape


def _skips_logits(
    model: nn.Module, loss: CausalLoss, arguments: dict[str, Any], skip_logits: bool | None
) -> bool:
    """Whether a call asks for the loss alone, and the model still computes what it did."""
    keep = arguments.get("logits_to_keep")
    keeps = isinstance(keep, Tensor) or bool(keep)
    if arguments.get("labels") is None or keeps:
        if skip_logits:
            what = "logits_to_keep" if keeps else "no labels"
            raise ValueError(f"{type(model).__name__}: skip_logits=True and {what} were given")
        return False
    wanted = model.training if skip_logits is None else skip_logits
    return (
        wanted
        # The head may have been wrapped and the loss replaced since fuse.
        and getattr(model, "loss_function", None) is loss.loss_function
        and head_obstacle(getattr(model, loss.head, None)) is None
    )
