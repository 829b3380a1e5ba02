"""Run a model's forward once without its logits, or with another loss.

The model's own forward runs in full. Its `self` is not the model but a view of it, made for this
one call: every attribute is the model's, except the head and `loss_function`. If the logits are
skipped, the view's head keeps the hidden states and returns logits with 0 columns, on which every
operation is free; its loss function computes the loss from the hidden states that the head kept.
The state shared by head and loss thus lives as long as the call, and nothing is written to the
model: concurrent calls, recomputed calls and calls that raise do not interfere. torch.compile
traces a view like any other object.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from torch import Tensor, nn

from ..ops.head import cast_as_linear
from . import classes, head_hooks
from .loss_head import called_for, child_of
from .loss_lora import LoraHead
from .loss_options import DEFAULTS, LossOptions
from .loss_output import drop, extend
from .loss_value import CausalLoss, OfHidden, OfLogits, OfShardedHead, Source, value_of
from .loss_written import DeferredLogits


def view_class(base: type) -> type[View]:
    """Make the class of views for models of a class."""
    namespace = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        # FSDP2's __new__ would make an instance of the class that it wraps.
        "__new__": _new,
        "_liger_ops_defaults": tuple(name for name in dir(base) if _is_default(base, name)),
    }
    return type(base.__name__, (View, base), namespace)


def _new(cls: type, *args: Any) -> Any:
    return object.__new__(cls)


def _is_default(base: type, name: str) -> bool:
    """Whether a class's attribute is a default that its instances may replace by a value."""
    attribute = inspect.getattr_static(base, name)
    return (
        not name.startswith("__")
        and name != "loss_function"
        and (isinstance(attribute, type) or not hasattr(attribute, "__get__"))
    )


def prepare(model: nn.Module, path: str) -> None:
    """Make the classes of the views of the modules on the path to a head.

    They are made when a model is fused, because torch.compile cannot trace the making of a class.
    """
    for name in path.split(".")[:-1]:
        model = getattr(model, name)
        if type(model) not in _VIEWS:
            _VIEWS[type(model)] = view_class(_without_its_loss(type(model)))


_VIEWS: dict[type, type[View]] = {}


def _without_its_loss(cls: type) -> type:
    """The class without an override of its loss: the one under it if the model is being fused."""
    base, kind, _ = vars(cls).get(classes.OVERRIDDEN, (cls, "", None))
    return base if kind == "loss" else cls


def view_of(model: nn.Module, path: str, call: Any, view: type[View] | None = None) -> View:
    """A view of a model with `call` for its head, and with views of the modules on its path."""
    name, _, rest = path.partition(".")
    held = call
    if rest:
        child = getattr(model, name)
        if type(child) not in _VIEWS:
            prepare(model, path)
        held = view_of(child, rest, call, _VIEWS[type(child)])
    return (view or view_class(type(model)))(model, name, held, call)


def without_logits(
    original: Callable[..., Any], view: type[View], model: nn.Module, head: nn.Linear | LoraHead,
    loss: CausalLoss, args: Any, kwargs: Any, options: LossOptions = DEFAULTS,
) -> Any:  # fmt: skip
    """Run `original` on a model with the loss computed by the op, and without logits."""
    kind = WrittenHead if loss.written else DeferredHead
    call = kind(head, loss, options, called_for(model, loss.head))
    output = original(view_of(model, loss.head, call, view), *args, **kwargs)
    if call.hidden is not None:
        raise RuntimeError(
            f"{type(model).__name__}: forward did not call {loss.loss_name} for labels, as it did"
            " when liger_ops.fuse was called; skip_logits=False keeps it from skipping the logits"
        )
    skipped = loss.written or call.logits is not None
    return extend(drop(output, call.logits) if skipped else output, call.beside)


def with_logits(
    original: Callable[..., Any], view: type[View], model: nn.Module,
    loss: CausalLoss, args: Any, kwargs: Any, options: LossOptions,
) -> Any:  # fmt: skip
    """Run `original` on a model with the loss of its logits computed under the options."""
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
    """The names of the options that differ from the defaults."""
    return [
        option.name
        for option in fields(options)
        if getattr(options, option.name) != getattr(DEFAULTS, option.name)
    ]


class View:
    """A model with one child and its loss function replaced, for one call of its forward.

    It is an instance of the model's class, so that `super()` works, but holds nothing: attributes
    that the class does not have are taken from the model. The child is the head, or a view of the
    module that contains it.
    """

    # Attributes of the class that the model may replace by its own.
    _liger_ops_defaults: tuple[str, ...] = ()

    def __init__(self, model: nn.Module, name: str, child: Any, call: Any) -> None:
        object.__setattr__(self, "_liger_ops_view", (model, name, child, call))
        for name in self._liger_ops_defaults:
            object.__setattr__(self, name, getattr(model, name))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # The viewed module has no hooks, because a model with any is not fused.
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
    """A head in a view: attributes that it does not define are the real head's."""

    def __init__(self, head: nn.Module | LoraHead, loss: CausalLoss, options: LossOptions) -> None:
        self.head = head
        self.loss = loss
        self.options = options
        self.beside: dict[str, Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.head, name)

    def fused_loss(
        self, source: Source, labels: Tensor,
        vocab_size: int | None = None, num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100, shift_labels: Tensor | None = None, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        """The loss of a source, with the arguments of transformers' causal loss."""
        self.loss.check(kwargs)
        target = self.loss.target(labels, ignore_index, shift_labels)
        value, self.beside = value_of(
            source, target, ignore_index, num_items_in_batch, self.options
        )
        return value


class DeferredHead(_Head):
    """A head that keeps its first hidden states, and computes when the loss is called.

    modules: those that a call of the head calls.
    """

    def __init__(
        self, head: nn.Linear | LoraHead, loss: CausalLoss, options: LossOptions,
        modules: list[Any],
    ) -> None:  # fmt: skip
        super().__init__(head, loss, options)
        self.modules = modules
        self.hidden: Tensor | None = None
        self.logits: Tensor | None = None

    def __call__(self, hidden: Tensor) -> Tensor:
        if self.hidden is not None or self.logits is not None:
            return self.modules[0](hidden)
        self.hidden = hidden
        return hidden[..., :0]

    def loss_function(self, logits: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.hidden is None or logits.shape[-1] != 0:
            return self.loss.loss_function(logits, *args, **kwargs)
        self.logits = logits
        hidden, self.hidden = self.hidden, None
        head: Any = self.head

        def compute(hidden: Tensor) -> Tensor:
            of = OfShardedHead if head_hooks.are_over_words(head) else OfHidden
            source = of(hidden, head, self.loss, self.options)
            return self.fused_loss(source, *args, **kwargs)

        return head_hooks.called(self.modules, compute, hidden)


class WrittenHead(DeferredHead):
    """A deferred head for a forward that computes the loss itself."""

    called = False

    def __call__(self, hidden: Tensor) -> Any:
        if self.called:
            return self.modules[0](hidden)
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
        # The forward has flattened the labels.
        labels = target.reshape(self.shape)
        value, self.beside = value_of(source, labels, ignore_index, None, self.options)
        return value


class LossOfLogits(_Head):
    """A head that computes at once, and computes the loss from the first logits."""

    done = False

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)

    def loss_function(self, logits: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.done:
            return self.loss.loss_function(logits, *args, **kwargs)
        self.done = True
        return self.fused_loss(OfLogits(logits), *args, **kwargs)
