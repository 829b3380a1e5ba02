"""Fuse the losses of language models: the head and the cross-entropy become one op."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from ...rewrites.engine.report import logits_bytes
from .. import classes
from ..planning import FusionPlan
from ..probing import NotAnOp
from ..report import FuseReport
from . import (
    call,  # noqa: F401 (the kind "loss" is registered there)
    calls,
)
from .dry_run import LossFacts, dry_run
from .head import child_of

OP = "linear_cross_entropy"


def fuse(model: nn.Module) -> FuseReport:
    """Give every language model in `model` a forward that skips the logits."""

    def look(plan: FusionPlan, name: str, module: nn.Module) -> None:
        cls = classes.class_of(module)
        if "loss" in classes.overrides(module) or not _has_a_loss(cls):
            return
        head = _output_embedding(module)
        if head is None:
            if _is_classifier(cls.__name__):
                raise NotAnOp("its loss is a classifier's, of no vocabulary")
            return
        facts, options = dry_run(module, _path_to(module, head))
        plan.changes.append(lambda: install(module, facts))
        plan.fuse(name, module, OP, options, logits_bytes(head.weight))

    def install(module: nn.Module, facts: LossFacts) -> None:
        calls.prepare(child_of(module, facts.head))
        classes.override(module, "loss", facts)

    plan = FusionPlan("loss", model, look)
    for change in plan.changes:
        change()
    return FuseReport(tuple(plan.findings))


def _has_a_loss(cls: Any) -> bool:
    """Return whether models of a class compute a loss from labels, and may have a head.

    The class is inspected and not the model, because a wrapper, such as peft's, passes attribute
    lookups on to the model that it holds.
    """
    if not hasattr(cls, "get_output_embeddings"):
        return False
    return "labels" in inspect.signature(cls.forward).parameters


def _is_classifier(class_name: str) -> bool:
    return "For" in class_name and "Classification" in class_name


def _output_embedding(module: nn.Module) -> Any:
    """Return the head of a language model, or None for any other module."""
    cls: Any = type(module)
    try:
        return cls.get_output_embeddings(module)
    except Exception:
        return None


def _path_to(module: nn.Module, head: nn.Module) -> str:
    for name, child in module.named_modules():
        if child is head:
            return _checked_path(module, name)
    raise NotAnOp("its head is not a child of it")


def _checked_path(module: nn.Module, path: str) -> str:
    """Return the path if `stand_in` can copy every module on it but the last.

    Raises:
        NotAnOp: the head is in a container without a forward, or in a Sequential, or a module on
            the path has a method of its class set on the instance.
    """
    names = path.split(".")
    for i in range(len(names)):
        holder = module.get_submodule(".".join(names[:i]))
        if type(holder).forward is nn.Module.forward or isinstance(holder, nn.Sequential):
            raise NotAnOp(f"its head is in a {type(holder).__name__}, not a child of it")
        for name in vars(holder):
            if name != "loss_function" and inspect.isroutine(getattr(type(holder), name, None)):
                what = f"its {names[i - 1]}" if i else "the instance"
                raise NotAnOp(f"{what} has a {name} of its own")
    return path
