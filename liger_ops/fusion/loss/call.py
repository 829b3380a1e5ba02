"""The forward of a fused language model: head and loss are one op, and logits are skipped."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .. import classes, tensor_parallel
from ..assumptions import first_time
from ..lora.head import LoraHead
from . import calls, deferred
from .calls import DeferringHead
from .deferred import function_name
from .dry_run import LossFacts, with_traced_loss
from .head import head_of, is_over_words, keeps_words_apart, modules_called
from .options import CHECKS, ForwardLossOptions, split_options


@classes.kind("loss")
def methods(base: type, facts: LossFacts) -> dict[str, Callable[..., Any]]:
    """Make the forward that computes the loss without logits, unless they are asked for."""
    original: Any = base.forward  # type: ignore[attr-defined]
    signature = inspect.signature(original)
    positional = tuple(signature.parameters)[1:]
    # An argument of the same name in the model's own forward is left to the model.
    options_taken = tuple(
        name for name in CHECKS if name not in (*positional, *facts.own_arguments)
    )
    traced = with_traced_loss(original) if facts.rebinds else original
    # torch.compile calls _warn once while it traces, and leaves it out of the graph. It is marked
    # here, because marking it where it is defined would import the compiler with liger_ops.
    torch.compiler.assume_constant_result(_warn)
    # Dynamo does not know the name of every function of PyTorch.
    torch.compiler.assume_constant_result(function_name)
    # Dynamo does not read the closures of hooks.
    torch.compiler.assume_constant_result(tensor_parallel.constants_of)
    if facts.output_class is not None:
        deferred.prepare(facts.output_class)

    def forward(self: Any, *args: Any, skip_logits: bool | None = None, **kwargs: Any) -> Any:
        modules = modules_called(self, facts.head)
        if calls.is_replaced(modules[0]):
            # A model that contains this one is fused too, and its forward computes the loss.
            return original(self, *args, **kwargs)
        options, kwargs = split_options(base.__name__, kwargs, options_taken)
        if facts.takes_shift_labels and "shift_labels" not in positional:
            args, kwargs = _with_labels(positional, args, kwargs)
        arguments = {**dict(zip(positional, args, strict=False)), **kwargs}
        if arguments.get("labels") is None:
            _check_unlabelled(base.__name__, options, skip_logits)
            return original(self, *args, **kwargs)
        head: nn.Linear | LoraHead | str | None = head_of(self, facts.head)
        unprepared = calls.prepare(modules[0])
        reason = _obstacle(facts, head, arguments, options) or unprepared
        if skip_logits and reason is not None:
            raise ValueError(f"{base.__name__}: skip_logits=True and {reason}")
        skips = self.training if skip_logits is None else skip_logits
        if skips and reason is not None:
            _warn_once(self, base.__name__, reason)
        if not skips or isinstance(head, str) or reason is not None:
            if not options.asked:
                return original(self, *args, **kwargs)
            # The options have to be applied to the model's own cross_entropy: keep the logits.
            head = None
            if keeps_words_apart(modules[-1]):
                raise ValueError(
                    f"{base.__name__}: {options.names} is computed where logits are skipped,"
                    " and its head returns the logits of a rank's words"
                    f" ({reason or 'they are not skipped'})"
                )

        def on_computed(reason: str, operands: Any) -> None:
            if skip_logits:
                raise ValueError(f"{base.__name__}: skip_logits=True and {reason}")
            _warn_once(self, base.__name__, reason)

        deferring = DeferringHead(head, modules, options, on_computed)
        # Dynamo has a trace of its own for CrossEntropyLoss, which takes only tensors.
        function = traced if torch.compiler.is_compiling() else original
        before = calls.REPLACED.active
        calls.REPLACED.active = (*before, (modules[0], deferring))
        try:
            result = function(self, *args, **kwargs)
        finally:
            calls.REPLACED.active = before
        if options.asked and not deferring.losses:
            raise ValueError(
                f"{base.__name__}: {options.names} is computed by the cross_entropy of the"
                " head's logits, and its forward computes its loss in another way"
            )
        if head is not None and not deferring.losses and not deferring.has_computed:
            on_computed(deferred.NO_LOSS, ())
        result = deferred.without_deferred(result, skips=deferring.losses > 0)
        deferring.finish()
        return deferred.extend(result, deferring.extra_outputs)

    # Trainer and generate read the signature to see what the model takes. functools.wraps would
    # set it too, but accelerate follows __wrapped__ when it removes its own wrappers.
    forward.__signature__ = signature  # type: ignore[attr-defined]
    forward.__doc__ = original.__doc__
    return {"forward": forward}


def _with_labels(
    positional: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call, with shift_labels as labels too if no labels are given.

    A forward computes a loss only if it has labels. That loss then uses shift_labels.
    """
    labels, named = kwargs.get("shift_labels"), dict(zip(positional, args, strict=False))
    if labels is None or kwargs.get("labels", named.get("labels")) is not None:
        return args, kwargs
    if "labels" not in named:
        return args, {**kwargs, "labels": labels}
    position = positional.index("labels")
    return (*args[:position], labels, *args[position + 1 :]), kwargs


def _check_unlabelled(name: str, options: ForwardLossOptions, skip_logits: bool | None) -> None:
    """Raise if a call without labels asks for anything that belongs to the loss."""
    if skip_logits:
        raise ValueError(f"{name}: skip_logits=True and no labels were given")
    if options.asked:
        raise ValueError(f"{name}: {options.names} needs labels, and no labels were given")


def _obstacle(
    facts: LossFacts, head: nn.Linear | LoraHead | str | None,
    arguments: dict[str, Any], options: ForwardLossOptions,
) -> str | None:  # fmt: skip
    """Return the reason that a call with labels has to compute all logits, or None."""
    logits_to_keep = arguments.get("logits_to_keep")
    if isinstance(logits_to_keep, Tensor) or logits_to_keep:
        return "logits_to_keep were given"
    if isinstance(head, str):
        return head
    if options.has_parts and is_over_words(head):
        return "more than the loss was asked for, and its head is sharded over words"
    if facts.makes_loss and not facts.rebinds and torch.compiler.is_compiling():
        return "torch.compile traces the CrossEntropyLoss that its forward makes for tensors alone"
    return None


def _warn_once(model: nn.Module, name: str, reason: str) -> None:
    """Warn that a step computes all logits, once per model and reason."""
    if torch.compiler.is_compiling() or first_time(model, reason):
        _warn(name, reason)


def _warn(name: str, reason: str) -> None:
    warnings.warn(
        f"liger_ops: {name} computes its loss from all logits, as it did before fuse: {reason}",
        stacklevel=3,
    )
