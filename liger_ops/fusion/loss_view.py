"""A model without its logits, or with another loss, for one call of its forward.

The model's own forward runs, and does all that it did. It is not given the model for its `self`,
but a view of it, made for this one call: every attribute is the model's, except the head and
`loss_function`. Where the logits are skipped, the view's head keeps the hidden states and returns
logits of no columns, which cost nothing whatever is done to them; its loss function computes the
loss of what the head kept. What the head hands to the loss thus lives as long as the call, and
nothing is written into the model: calls from several threads, recomputed calls and calls that raise
do not meet. torch.compile traces the making of a view as it does any object's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from torch import Tensor, nn

from ..ops.head import cast_as_linear
from . import classes
from .loss_head import child_of
from .loss_options import DEFAULTS, LossOptions
from .loss_output import drop, extend
from .loss_value import CausalLoss, OfHidden, OfLogits, value_of
from .loss_written import DeferredLogits


def view_class(base: type) -> type[View]:
    """The class of the views of a class's models."""
    namespace = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        # That of FSDP2 would make an instance of the class that it wraps.
        "__new__": _new,
        "_liger_ops_defaults": tuple(name for name in dir(base) if _is_default(base, name)),
    }
    return type(base.__name__, (View, base), namespace)


def _new(cls: type, *args: Any) -> Any:
    return object.__new__(cls)


def _is_default(base: type, name: str) -> bool:
    """Whether an attribute of a class is one that its instances may replace by a value."""
    attribute = inspect.getattr_static(base, name)
    return (
        not name.startswith("__")
        and name != "loss_function"
        and (isinstance(attribute, type) or not hasattr(attribute, "__get__"))
    )


def prepare(model: nn.Module, path: str) -> None:
    """Make the classes of the views of what is on the way to a head.

    They are made when a model is fused: torch.compile traces no making of a class.
    """
    for name in path.split(".")[:-1]:
        model = getattr(model, name)
        if type(model) not in _VIEWS:
            _VIEWS[type(model)] = view_class(_without_its_loss(type(model)))


_VIEWS: dict[type, type[View]] = {}


def _without_its_loss(cls: type) -> type:
    """The class of which a class overrides the loss, that of the model it is in being fused."""
    base, kind, _ = vars(cls).get(classes.OVERRIDDEN, (cls, "", None))
    return base if kind == "loss" else cls


def view_of(model: nn.Module, path: str, call: Any, view: type[View] | None = None) -> View:
    """A view of a model with `call` for its head, and views of what is on the way there."""
    name, _, rest = path.partition(".")
    held = call
    if rest:
        child = getattr(model, name)
        if type(child) not in _VIEWS:
            prepare(model, path)
        held = view_of(child, rest, call, _VIEWS[type(child)])
    return (view or view_class(type(model)))(model, name, held, call)


def without_logits(
    original: Callable[..., Any],
    view: type[View],
    model: nn.Module,
    head: nn.Linear,
    loss: CausalLoss,
    args: Any,
    kwargs: Any,
    options: LossOptions = DEFAULTS,
) -> Any:
    """What `original` returns for a model, with the loss computed by the op and without logits."""
    call = (WrittenHead if loss.written else DeferredHead)(head, loss, options)
    output = original(view_of(model, loss.head, call, view), *args, **kwargs)
    if call.hidden is not None:
        raise RuntimeError(
            f"{type(model).__name__}: forward did not call {loss.loss_name} for labels, as it did"
            " when liger_ops.fuse was called; skip_logits=False keeps it from skipping the logits"
        )
    skipped = loss.written or call.logits is not None
    return extend(drop(output, call.logits) if skipped else output, call.beside)


def with_logits(
    original: Callable[..., Any],
    view: type[View],
    model: nn.Module,
    loss: CausalLoss,
    args: Any,
    kwargs: Any,
    options: LossOptions,
) -> Any:
    """What `original` returns for a model, with the loss of its logits under the options."""
    call = LossOfLogits(child_of(model, loss.head), loss, options)
    output = original(view_of(model, loss.head, call, view), *args, **kwargs)
    if not call.done:
        raise RuntimeError(
            f"{type(model).__name__}: forward did not call loss_function for labels, as it did when"
            " liger_ops.fuse was called, which is what computes"
            f" {', '.join(asked_for(options))}"
        )
    return extend(output, call.beside)


def asked_for(options: LossOptions) -> list[str]:
    """The names of the options that are not the defaults."""
    return [
        option.name
        for option in fields(options)
        if getattr(options, option.name) != getattr(DEFAULTS, option.name)
    ]


class View:
    """A model but for one child and its loss function, for one call of its forward.

    It is an instance of the model's class, for the sake of `super()`, that holds nothing: what is
    not found in the class is taken from the model. The child is the head, or a view of what holds
    it.
    """

    # Attributes of the class, instead of which the model may have its own.
    _liger_ops_defaults: tuple[str, ...] = ()

    def __init__(self, model: nn.Module, name: str, child: Any, call: Any) -> None:
        object.__setattr__(self, "_liger_ops_view", (model, name, child, call))
        for name in self._liger_ops_defaults:
            object.__setattr__(self, name, getattr(model, name))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # What is viewed has no hooks, or its model would not be fused.
        return self.forward(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        model, child_name, child, _ = self._liger_ops_view
        return child if name == child_name else getattr(model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._liger_ops_view[0], name, value)
        if name in self._liger_ops_defaults:
            object.__setattr__(self, name, value)

    @property
    def loss_function(self) -> Callable[..., Any]:
        return self._liger_ops_view[3].loss_function


class _Head:
    """A head in a view: what it does not define is the head's."""

    def __init__(self, head: nn.Module, loss: CausalLoss, options: LossOptions) -> None:
        self.head = head
        self.loss = loss
        self.options = options
        self.beside: dict[str, Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.head, name)

    def fused_loss(
        self,
        source: OfHidden | OfLogits,
        labels: Tensor,
        vocab_size: int | None = None,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """The loss of a source, from the arguments that transformers' causal loss takes."""
        self.loss.check(kwargs)
        target = self.loss.target(labels, ignore_index, shift_labels)
        value, self.beside = value_of(
            source, target, ignore_index, num_items_in_batch, self.options
        )
        return value


class DeferredHead(_Head):
    """A head that computes when the loss is wanted, for the first hidden states it is given."""

    def __init__(self, head: nn.Linear, loss: CausalLoss, options: LossOptions) -> None:
        super().__init__(head, loss, options)
        self.hidden: Tensor | None = None
        self.logits: Tensor | None = None

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
        head: Any = self.head
        return self.fused_loss(OfHidden(hidden, head, self.loss, self.options), *args, **kwargs)


class WrittenHead(DeferredHead):
    """A head of a forward that computes the loss itself."""

    called = False

    def __call__(self, hidden: Tensor) -> Any:
        if self.called:
            return self.head(hidden)
        self.called = True
        self.hidden = hidden
        self.shape = hidden.shape[:-1]
        head: Any = self.head
        x, weight, _ = cast_as_linear(hidden, head.weight, None)
        adds = self.loss.adds_to_logits
        return DeferredLogits(self.loss_of, hidden, weight.shape[0], x.dtype, adds)

    def loss_of(
        self, hidden: Tensor, added: Tensor | None, target: Tensor, ignore_index: int
    ) -> Tensor:
        self.hidden = None
        head: Any = self.head
        source = OfHidden(hidden, head, self.loss, self.options, added)
        # The forward has made the labels flat.
        labels = target.reshape(self.shape)
        value, self.beside = value_of(source, labels, ignore_index, None, self.options)
        return value


class LossOfLogits(_Head):
    """A head that computes at once, and the loss of the first logits."""

    done = False

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)

    def loss_function(self, logits: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.done:
            return self.loss.loss_function(logits, *args, **kwargs)
        self.done = True
        return self.fused_loss(OfLogits(logits), *args, **kwargs)
