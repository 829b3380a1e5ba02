"""Root-mean-square normalisation with a gate, as models write it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..engine.canonical import is_tensor, same, value
from ..engine.insertion import Refused
from ..engine.pattern import Match, Pattern
from ..engine.rewrite import before_widening, number

Activation = Callable[[Tensor], Tensor]
ACTIVATIONS: dict[str, Activation] = {"silu": F.silu, "sigmoid": torch.sigmoid}


def _norm(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def _op(norm_before_gate: bool, activation: str, casting_mode: str) -> Any:
    def replacement(match: Match) -> tuple[Any, tuple[Any, ...]]:
        # Under autocast the op and this code run in the dtypes of their inputs.
        x, weight = match["x"], match["weight"]
        if not is_tensor(weight, dim=1):
            raise Refused("the weight is not a row")
        options = (norm_before_gate, _group_size(match), activation, casting_mode)
        # The op computes with the gate in float32 itself.
        args = (x, before_widening(match["gate"]), weight, number(match["eps"]), *options)
        return torch.ops.liger.gated_rms_norm.default, args

    return replacement


def _group_size(match: Match) -> Any:
    """Return the size of a group, or None if the norm is over whole rows."""
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


def model_codes(activation: Activation) -> tuple[tuple[Callable[..., Tensor], Any, bool, str], ...]:
    """Return the models' code for an activation of the gate.

    Each item has the code, examples of its arguments, whether the norm is before the gate, and the
    casting mode.
    """

    def opened(gate: Tensor) -> Tensor:
        return activation(gate.float())

    qwen3_next = lambda x, gate, weight, eps: (
        weight * _norm(x.float(), eps).to(x.dtype) * opened(gate)
    ).to(x.dtype)
    kimi_linear = lambda x, gate, weight, eps: (
        weight.float() * _norm(x.float(), eps) * opened(gate)
    ).to(x.dtype)
    falcon_h1 = lambda x, gate, weight, eps, groups, weight_groups, whole: (
        (weight.view(weight_groups) * _norm(x.float().view(groups), eps)).view(whole) * opened(gate)
    ).to(x.dtype)
    # Mamba 2 in versions of transformers without groups.
    one_group_after = lambda x, gate, weight, eps: (
        weight * _norm(x.float() * opened(gate), eps).to(x.dtype)
    )
    mamba2 = lambda x, gate, weight, eps, groups, whole: (
        weight * _norm((x.float() * opened(gate)).view(groups), eps).view(whole).to(x.dtype)
    )
    falcon_h1_after = lambda x, gate, weight, eps, groups, weight_groups, whole: (
        (weight.view(weight_groups) * _norm((x * opened(gate)).view(groups), eps))
        .view(whole)
        .to(x.dtype)
    )
    return (
        (qwen3_next, _ROWS, True, "llama"),
        (kimi_linear, _ROWS, True, "gemma"),
        (falcon_h1, _ALL_GROUPS, True, "gemma"),
        (one_group_after, _ROWS, False, "llama"),
        (mamba2, _GROUPS, False, "llama"),
        (falcon_h1_after, _ALL_GROUPS, False, "gemma"),
    )


SPELLINGS = [
    (Pattern(code, **examples), _op(norm_before_gate, name, casting_mode))
    for name, activation in ACTIVATIONS.items()
    for code, examples, norm_before_gate, casting_mode in model_codes(activation)
]
