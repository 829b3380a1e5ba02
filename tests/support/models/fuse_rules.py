"""Modules that a reader expects in the report of `fuse`, fused or left, judged by names alone."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

from torch import nn

NORM = re.compile(r"(RMSNorm|LayerNorm|GroupNorm)$")
MODULATED = re.compile(r"Ada(ptive)?(Layer|Rms|RMS)Norm")
GATED = re.compile(r"(GEGLU|GeGLU|SwiGLU|Swiglu|ReGLU)")
MLP = re.compile(r"MLP|Mlp|FeedForward|FFN")
ROTARY = re.compile(r"apply\w*_(rotary|rope)")
CAUSAL = re.compile(r"create_(sliding_window_|chunked_)?causal_mask")

HYPER = re.compile(r"Hyper(Connection|Head)")


def norms(model: nn.Module) -> Iterator[str]:
    for name, module in model.named_modules():
        class_name = type(module).__name__
        weight = module._parameters.get("weight")
        if NORM.search(class_name) or (
            "Norm" in class_name and weight is not None and weight.dim() == 1
        ):
            yield name


def modulated_norms(model: nn.Module) -> Iterator[str]:
    for name, module in model.named_modules():
        if MODULATED.search(type(module).__name__) and module._modules:
            yield name


def activations(model: nn.Module) -> Iterator[str]:
    for name, module in model.named_modules():
        class_name = type(module).__name__
        has_gate = any(child == "gate_proj" or "gate_up" in child for child in module._modules)
        is_mlp = MLP.search(class_name) and (has_gate or is_packed(module))
        is_experts = class_name.endswith("Experts") and "gate_up_proj" in module._parameters
        if GATED.search(class_name) or is_mlp or is_experts:
            yield name


def is_packed(module: nn.Module) -> bool:
    """Return whether a module has two linear layers, of which the first returns twice the columns
    that the second takes."""
    linears = [child for child in module._modules.values() if isinstance(child, nn.Linear)]
    return len(linears) == 2 and linears[0].out_features == 2 * linears[1].in_features


def rotary_embeddings(model: nn.Module) -> Iterator[str]:
    for name, module in model.named_modules():
        forward = inspect.unwrap(type(module).forward)
        code = getattr(forward, "__code__", None)
        for used in code.co_names if code else ():
            if ROTARY.search(used) and callable(forward.__globals__.get(used)):
                yield name
                break


def attentions(model: nn.Module) -> Iterator[str]:
    """Yield the models that make causal masks."""
    for name, module in model.named_modules():
        code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
        if code is not None and any(map(CAUSAL.fullmatch, code.co_names)):
            yield name


def losses(model: nn.Module) -> Iterator[str]:
    """Yield the models that compute a loss from labels: with a head, or as classifiers."""
    for name, module in model.named_modules():
        cls = type(module)
        if not hasattr(cls, "get_output_embeddings"):
            continue
        if "labels" not in inspect.signature(cls.forward).parameters:
            continue
        try:
            head = module.get_output_embeddings()
        except (AttributeError, NotImplementedError):
            continue
        if head is not None or "Classification" in cls.__name__:
            yield name


def hyper_connections(model: nn.Module) -> Iterator[str]:
    for name, module in model.named_modules():
        if HYPER.search(type(module).__name__) and module._parameters:
            yield name


RULES = (
    norms, modulated_norms, activations, rotary_embeddings, attentions, losses, hyper_connections,
)  # fmt: skip
