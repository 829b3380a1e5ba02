"""The loss of causal language models: head and cross-entropy as one op."""

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
    """Give every causal language model in a model a forward that skips the logits."""
    fused, left = [], []
    for name, module in model.named_modules():
        head = _output_embedding(module)
        if head is None or "loss" in classes.overrides(module):
            continue
        class_name = type(module).__name__
        try:
            head_name = _name_of_child(module, head)
            loss = _probed(module, head_name)
        except NotAnOp as reason:
            if _looks_like_a_causal_model(module, head):
                left.append(Left(name, class_name, str(reason)))
            continue
        classes.override(module, "loss", loss)
        options = {"logit_scale": loss.logit_scale, "softcap": loss.softcap}
        fused.append(Fused(name, class_name, OP, options, "loss"))
    return fused, left


def _output_embedding(module: nn.Module) -> Any:
    """The head of a language model, or None for any other module."""
    # Of the class: a wrapper, such as peft's, answers for the model that it holds.
    cls: Any = type(module)
    if not hasattr(cls, "get_output_embeddings") or not (
        hasattr(cls, "loss_function") or "loss_function" in vars(module)
    ):
        return None
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
    for name in vars(module):
        # A view of the model has the methods of the class.
        if name != "loss_function" and inspect.isroutine(getattr(type(module), name, None)):
            raise NotAnOp(f"the instance has a {name} of its own")
    return probe(module, head_name)


def _looks_like_a_causal_model(module: nn.Module, head: nn.Module) -> bool:
    """Whether a reader of the report expects to find the model there. It decides nothing else."""
    name = type(module).__name__
    return "CausalLM" in name or "LMHead" in name or head in module._modules.values()
