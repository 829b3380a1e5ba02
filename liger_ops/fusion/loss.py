"""The losses of language models: head and cross-entropy as one op."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from . import classes, loss_call  # noqa: F401 (the kind "loss" is registered there)
from .loss_probe import probe
from .loss_value import CausalLoss
from .probing import NotAnOp
from .report import Fused, Left

OP = "linear_cross_entropy"


def fuse(model: nn.Module) -> tuple[list[Fused], list[Left]]:
    """Give every language model in a model a forward that skips the logits."""
    fused, left = [], []
    for name, module in model.named_modules():
        if "loss" in classes.overrides(module) or not _has_a_loss(type(module)):
            continue
        class_name = type(module).__name__
        head = _output_embedding(module)
        if head is None:
            if _is_classifier(class_name):
                left.append(Left(name, class_name, "its loss is a classifier's, of no vocabulary"))
            continue
        try:
            loss = _probed(module, _name_of_child(module, head))
        except NotAnOp as reason:
            left.append(Left(name, class_name, str(reason)))
            continue
        classes.override(module, "loss", loss)
        options = {"logit_scale": loss.logit_scale, "softcap": loss.softcap}
        fused.append(Fused(name, class_name, OP, options, "loss"))
    return fused, left


def _has_a_loss(cls: Any) -> bool:
    """Whether a class is of models that compute a loss of labels, and may have a head.

    Of the class: a wrapper, such as peft's, answers for the model that it holds.
    """
    if not hasattr(cls, "get_output_embeddings"):
        return False
    return "labels" in inspect.signature(cls.forward).parameters


def _is_classifier(class_name: str) -> bool:
    return "For" in class_name and "Classification" in class_name


def _output_embedding(module: nn.Module) -> Any:
    """The head of a language model, or None for any other module."""
    cls: Any = type(module)
    try:
        return cls.get_output_embeddings(module)
    except Exception:
        return None


def _name_of_child(module: nn.Module, head: nn.Module) -> str:
    for name, child in module._modules.items():
        if child is head:
            return name
    raise NotAnOp("its head is not a child of it")


def _probed(module: nn.Module, head_name: str) -> CausalLoss:
    if not hasattr(module, "loss_function"):
        raise NotAnOp("it has no loss_function")
    for name in vars(module):
        # A view of the model has the methods of the class.
        if name != "loss_function" and inspect.isroutine(getattr(type(module), name, None)):
            raise NotAnOp(f"the instance has a {name} of its own")
    return probe(module, head_name)
