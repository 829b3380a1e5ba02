"""Root-mean-square normalisation with a gate, as models write it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..engine.canonical import is_tensor, same, value
from ..engine.pattern import Match, Pattern
from ..engine.rewrite import Refused, before_widening, number

Activation = Callable[[Tensor], Tensor]
ACTIVATIONS: dict[str, Activation] = {"silu": F.silu, "sigmoid": torch.sigmoid}


def qwen3_next(activation: Activation) -> Callable[..., Tensor]:
    return lambda x, gate, weight, eps: (
        weight * _norm(x.to(torch.float32), eps).to(x.dtype) * activation(gate.to(torch.float32))
    ).to(x.dtype)


def kimi_linear(activation: Activation) -> Callable[..., Tensor]:
    return lambda x, gate, weight, eps: (
        weight.to(torch.float32) * _norm(x.to(torch.float32), eps)
        * activation(gate.to(torch.float32))
    ).to(x.dtype)  # fmt: skip


def one_group_after(activation: Activation) -> Callable[..., Tensor]:
    """Mamba 2 in versions of transformers without groups."""
    return lambda x, gate, weight, eps: (
        weight * _norm(x.to(torch.float32) * activation(gate.to(torch.float32)), eps).to(x.dtype)
    )


def mamba2(activation: Activation) -> Callable[..., Tensor]:
    return lambda x, gate, weight, eps, groups, whole: (
        weight
        * _norm((x.to(torch.float32) * activation(gate.to(torch.float32))).view(groups), eps)
        .view(whole)
        .to(x.dtype)
    )


def falcon_h1(activation: Activation) -> Callable[..., Tensor]:
    return lambda x, gate, weight, eps, groups, weight_groups, whole: (
        (weight.view(weight_groups) * _norm(x.to(torch.float32).view(groups), eps)).view(whole)
        * activation(gate.to(torch.float32))
    ).to(x.dtype)


def falcon_h1_after(activation: Activation) -> Callable[..., Tensor]:
    return lambda x, gate, weight, eps, groups, weight_groups, whole: (
        (
            weight.view(weight_groups)
            * _norm((x * activation(gate.to(torch.float32))).view(groups), eps)
        )
        .view(whole)
        .to(x.dtype)
    )


def _norm(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def _op(norm_before_gate: bool, activation: str, casting_mode: str) -> Any:
    def replacement(match: Match) -> tuple[Any, tuple[Any, ...]]:
        # Under autocast the op and this code run in the dtypes of their inputs.
        x, weight = match["x"], match["weight"]
        if not is_tensor(weight, dim=1):
            raise Refused("the weight is not a row")
        options = (norm_before_gate, _group_size(match), activation, casting_mode)
        # The op widens gate itself.
        args = (x, before_widening(match["gate"]), weight, number(match["eps"]), *options)
        return torch.ops.liger.gated_rms_norm.default, args

    return replacement


def _group_size(match: Match) -> Any:
    """The size of a group, or None for whole rows."""
    if "groups" not in match.values:
        return None
    N = value(match["x"]).shape[-1]
    groups = value(match["groups"])
    if "weight_groups" in match.values and not same(match["weight_groups"], groups[-2:]):
        raise Refused("its weight has other groups than x")
    if N % value(groups[-1]) != 0:
        raise Refused("its groups are not parts of a row")
    return None if same(groups[-1], N) else groups[-1]


_ROWS: dict[str, Any] = {"x": (2, 3, 8), "gate": (2, 3, 8), "weight": (8,), "eps": 1e-6}
_GROUPS: dict[str, Any] = {**_ROWS, "groups": [2, 3, 2, 4], "whole": [2, 3, 8]}
_ALL_GROUPS: dict[str, Any] = {**_GROUPS, "weight_groups": [2, 4]}
# The code, its examples, whether the norm is before the gate, and where the code rounds.
FORMS: tuple[tuple[Callable[[Activation], Callable[..., Tensor]], dict[str, Any], bool, str], ...]
FORMS = (
    (qwen3_next, _ROWS, True, "llama"),
    (kimi_linear, _ROWS, True, "gemma"),
    (falcon_h1, _ALL_GROUPS, True, "gemma"),
    (one_group_after, _ROWS, False, "llama"),
    (mamba2, _GROUPS, False, "llama"),
    (falcon_h1_after, _ALL_GROUPS, False, "gemma"),
)
SPELLINGS = [
    (Pattern(form(activation), **examples), _op(norm_before_gate, name, casting_mode))
    for form, examples, norm_before_gate, casting_mode in FORMS
    for name, activation in ACTIVATIONS.items()
]
