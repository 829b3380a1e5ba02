"""The forward of a language model that computes head and loss with one op."""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from . import classes, head_hooks, loss_output, loss_written, tensor_parallel
from .loss_head import called_for, head_of
from .loss_lora import LoraHead
from .loss_options import CHECKS, DEFAULTS, LossOptions, taken_from
from .loss_value import CausalLoss
from .loss_view import asked_for, view_class, with_logits, without_logits


@classes.kind("loss")
def methods(base: type, loss: CausalLoss) -> dict[str, Callable[..., Any]]:
    """A forward that computes the loss without logits unless they are asked for."""
    original: Any = base.forward  # type: ignore[attr-defined]
    signature = inspect.signature(original)
    positional = tuple(signature.parameters)[1:]
    # An argument of the same name in the model's own forward is left to the model.
    options_taken = tuple(name for name in CHECKS if name not in (*positional, *loss.own_arguments))
    view = view_class(base)
    skipping = loss_written.calling(original) if loss.written else original
    # torch.compile calls _warn once while it traces, and leaves it out of the graph. It is marked
    # here, because marking it where it is defined would import the compiler with liger_ops.
    torch.compiler.assume_constant_result(_warn)
    # Dynamo does not read the closures of hooks.
    torch.compiler.assume_constant_result(tensor_parallel.constants_of)
    if loss.output_class is not None:
        loss_output.prepare(loss.output_class)

    def forward(self: Any, *args: Any, skip_logits: bool | None = None, **kwargs: Any) -> Any:
        options, kwargs = taken_from(base.__name__, kwargs, options_taken)
        if loss.takes_shift_labels and "shift_labels" not in positional:
            args, kwargs = _with_labels(positional, args, kwargs)
        arguments = {**dict(zip(positional, args, strict=False)), **kwargs}
        if arguments.get("labels") is None:
            _check_unlabelled(base.__name__, options, skip_logits)
            return original(self, *args, **kwargs)
        head = head_of(self, loss.head)
        reason = _obstacle(self, loss, head, arguments, options)
        if skip_logits and reason is not None:
            raise ValueError(f"{base.__name__}: skip_logits=True and {reason}")
        if self.training if skip_logits is None else skip_logits:
            if reason is None and not isinstance(head, str):
                return without_logits(skipping, view, self, head, loss, args, kwargs, options)
            _say_once(self, base.__name__, str(reason))
        if options == DEFAULTS:
            return original(self, *args, **kwargs)
        if loss.written:
            names = ", ".join(asked_for(options))
            raise ValueError(
                f"{base.__name__}: {names} is computed where logits are skipped, as in training or"
                " for skip_logits=True, and they are not"
            )
        if head_hooks.keep_words_apart(called_for(self, loss.head)[-1]):
            names = ", ".join(asked_for(options))
            raise ValueError(
                f"{base.__name__}: {names} is computed where logits are skipped, and its head"
                f" returns the logits of a rank's words ({reason or 'they are not skipped'})"
            )
        if not _has_its_loss(self, loss):
            names = ", ".join(asked_for(options))
            raise ValueError(
                f"{base.__name__}: its loss_function was replaced after liger_ops.fuse, and does"
                f" not compute {names}; accepted are the arguments of the new one"
            )
        return with_logits(original, view, self, loss, args, kwargs, options)

    # Trainer and generate read the signature to see what the model takes. functools.wraps would
    # set it too, but accelerate follows __wrapped__ when it removes its own wrappers.
    forward.__signature__ = signature  # type: ignore[attr-defined]
    forward.__doc__ = original.__doc__
    return {"forward": forward}


def _with_labels(
    positional: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call; if only shift_labels are given, they are passed as labels too.

    A forward computes a loss only if it has labels. That loss then uses shift_labels.
    """
    shift_labels = kwargs.get("shift_labels")
    if shift_labels is None or kwargs.get("labels") is not None:
        return args, kwargs
    named = dict(zip(positional, args, strict=False))
    if "labels" not in named:
        return args, {**kwargs, "labels": shift_labels}
    if named["labels"] is not None:
        return args, kwargs
    place = positional.index("labels")
    return (*args[:place], shift_labels, *args[place + 1 :]), kwargs


def _check_unlabelled(name: str, options: LossOptions, skip_logits: bool | None) -> None:
    """Raise if a call without labels asks for anything that belongs to the loss."""
    if skip_logits:
        raise ValueError(f"{name}: skip_logits=True and no labels were given")
    if options != DEFAULTS:
        names = ", ".join(asked_for(options))
        raise ValueError(f"{name}: {names} needs labels, and no labels were given")


def _obstacle(
    model: nn.Module, loss: CausalLoss,
    head: nn.Linear | LoraHead | str, arguments: dict[str, Any], options: LossOptions,
) -> str | None:  # fmt: skip
    """Reason that a call with labels has to compute all logits, or None."""
    keep = arguments.get("logits_to_keep")
    if isinstance(keep, Tensor) or keep:
        return "logits_to_keep were given"
    for name in loss.own_arguments:
        if name in arguments:
            return f"{name} was given, an argument of its loss_function"
    # The loss may have been replaced or the head wrapped after fuse.
    if not _has_its_loss(model, loss):
        return "its loss_function was replaced after liger_ops.fuse"
    if loss.written and any(map(head_hooks.are_known, called_for(model, loss.head))):
        return "its head is sharded by itself, and its forward calls CrossEntropyLoss"
    if options.wants_predicted and head_hooks.are_over_words(head):
        return "the predicted tokens were asked for, and its head is sharded over words"
    if loss.adds_to_logits and torch.compiler.is_compiling():
        return "torch.compile does not trace what its forward adds to skipped logits"
    return head if isinstance(head, str) else None


def _has_its_loss(model: nn.Module, loss: CausalLoss) -> bool:
    return loss.written or getattr(model, "loss_function", None) is loss.loss_function


_said: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()


def _say_once(model: nn.Module, name: str, reason: str) -> None:
    """Warn that a step computes all logits, once per model and reason."""
    if torch.compiler.is_compiling():
        _warn(name, reason)
        return
    # DataParallel makes new replicas in each step, so the class is the key.
    reasons = _said.setdefault(type(model) if "_is_replica" in vars(model) else model, set())
    if reason not in reasons:
        reasons.add(reason)
        _warn(name, reason)


def _warn(name: str, reason: str) -> None:
    warnings.warn(
        f"liger_ops: {name} computes its loss from all logits, as it did before fuse: {reason}",
        stacklevel=3,
    )
