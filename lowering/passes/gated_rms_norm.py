"""Root-mean-square normalisation with a gate, as models write it. `fuse` alone looks for it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from .canonical import is_tensor, value
from .pattern import Match, Pattern
from .report import Report
from .rewrite import Refused, before_widening, not_under_autocast, number, replace_all


def qwen3_next(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    y = weight * wide.to(x.dtype)
    return (y * F.silu(gate.to(torch.float32))).to(x.dtype)


def qwen4(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    y = weight * wide.to(x.dtype)
    return (y * torch.sigmoid(gate.to(torch.float32))).to(x.dtype)


def kimi_linear(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    wide = weight.to(torch.float32) * wide
    return (wide * torch.sigmoid(gate.to(torch.float32))).to(x.dtype)


def mamba2(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: list[int], whole: list[int]
) -> Tensor:
    wide = x.to(torch.float32)
    wide = wide * F.silu(gate.to(torch.float32))
    wide = wide.view(groups)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.view(whole).to(x.dtype)


def mamba2_of_one_group(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.float32)
    wide = wide * F.silu(gate.to(torch.float32))
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def rewrite(graph: fx.Graph, report: Report) -> None:
    replace_all(graph, report, "gated_rms_norm", SPELLINGS)


def _op(norm_before_gate: bool, activation: str, casting_mode: str) -> Any:
    def replacement(match: Match) -> tuple[Any, tuple[Any, ...]]:
        x, weight = match["x"], match["weight"]
        if not is_tensor(weight, dim=1):
            raise Refused("the weight is not a row")
        not_under_autocast(match)
        group_size = None
        if "groups" in match.values:
            group_size = value(match["groups"])[-1]
            if value(x).shape[-1] % group_size != 0:
                raise Refused("its groups are not parts of a row")
            if group_size == value(x).shape[-1]:
                group_size = None
        options = (norm_before_gate, group_size, activation, casting_mode)
        # The op widens gate itself.
        args = (x, before_widening(match["gate"]), weight, number(match["eps"]), *options)
        return torch.ops.liger.gated_rms_norm.default, args

    return replacement


_ROWS: dict[str, Any] = {"x": (2, 3, 8), "gate": (2, 3, 8), "weight": (8,), "eps": 1e-6}
SPELLINGS = [
    (Pattern(qwen3_next, **_ROWS), _op(True, "silu", "llama")),
    (Pattern(qwen4, **_ROWS), _op(True, "sigmoid", "llama")),
    (Pattern(kimi_linear, **_ROWS), _op(True, "sigmoid", "gemma")),
    (Pattern(mamba2_of_one_group, **_ROWS), _op(False, "silu", "llama")),
    (Pattern(mamba2, **_ROWS, groups=[2, 3, 2, 4], whole=[2, 3, 8]), _op(False, "silu", "llama")),
]
