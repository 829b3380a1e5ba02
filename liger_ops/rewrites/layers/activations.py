"""Activations as models write them.

These are SwiGLU, the clamped SwiGLU of GPT-OSS and DeepSeek-V4 with or without a limit, GEGLU with
the exact GELU or its approximation by tanh, and the squared ReLU of Nemotron. The halves of a
packed projection are views, and are not copied.

The ops of gated activations compute in float32 and round once. In a narrower dtype, eager code also
rounds the activation before the product, which the same code compiled by Inductor does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ..engine.canonical import same, value
from ..engine.insertion import Refused
from ..engine.pattern import Match, Pattern
from ..engine.report import Report
from ..engine.rewrite import before_widening, number, replace_all, require_same_shape


def rewrite_unlimited(graph: fx.Graph, report: Report) -> None:
    """Replace code of a clamped_swiglu without a limit: only `fuse` does, not the backend."""
    replace_all(graph, report, "clamped_swiglu", UNLIMITED)


def _swiglu(match: Match) -> tuple[Any, tuple[Any, ...]]:
    # Beam's code alone widens both gate and up, and may match one of them before its cast and the
    # other after it. The op takes two tensors of one dtype.
    gate, up = match["gate"], match["up"]
    if value(gate).dtype != value(up).dtype:
        gate, up = before_widening(gate), before_widening(up)
    require_same_shape(gate, up)
    multiplier = number(match["multiplier"]) if "multiplier" in match.values else 1.0
    return torch.ops.liger.swiglu.default, (gate, up, multiplier)


def _clamped_swiglu(match: Match) -> tuple[Any, tuple[Any, ...]]:
    require_same_shape(match["gate"], match["up"])
    limit = number(match.values.get("limit", math.inf))
    if "lower" in match.values and not same(value(number(match["lower"])), -value(limit)):
        raise Refused("up is clamped to other bounds than -limit and limit")
    alpha, up_offset = (match.values.get(*key) for key in (("alpha", 1.0), ("up_offset", 0.0)))
    args = (match["gate"], match["up"], number(alpha), limit, number(up_offset))
    return torch.ops.liger.clamped_swiglu.default, args


def _geglu(match: Match) -> tuple[Any, tuple[Any, ...]]:
    require_same_shape(match["gate"], match["up"])
    approximate = match.values.get("approximate", "tanh")
    if approximate not in ("tanh", "none"):
        raise Refused(f"approximate is {approximate!r}")
    return torch.ops.liger.geglu.default, (match["gate"], match["up"], approximate)


def _relu_squared(match: Match) -> tuple[Any, tuple[Any, ...]]:
    if not value(match["x"]).is_floating_point():
        raise Refused("x is of integers")
    return torch.ops.liger.relu_squared.default, (match["x"],)


def _halves(code: Callable[..., Tensor], **options: Any) -> Pattern:
    return Pattern(code, gate=(2, 3, 8), up=(2, 3, 8), **options)


def _clamped(code: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def clamped(gate: Tensor, up: Tensor, limit: float, lower: float, **more: float) -> Tensor:
        return code(gate.clamp(min=None, max=limit), up.clamp(min=lower, max=limit), **more)

    return clamped


def new_gelu(gate: Tensor, up: Tensor) -> Tensor:
    inner = math.sqrt(2.0 / math.pi) * (gate + 0.044715 * torch.pow(gate, 3.0))
    return 0.5 * gate * (1.0 + torch.tanh(inner)) * up


SWIGLU = [
    # In this order: Falcon-H1, Beam, Lumina and Llama.
    (_halves(lambda gate, up, multiplier: up * F.silu(gate * multiplier), multiplier=0.5), _swiglu),
    (_halves(lambda gate, up: (F.silu(gate.float()) * up.float()).to(gate.dtype)), _swiglu),
    (_halves(lambda gate, up: F.silu(gate.float()).to(gate.dtype) * up), _swiglu),
    (_halves(lambda gate, up: F.silu(gate) * up), _swiglu),
]
_LIMITS: dict[str, Any] = {"limit": 7.0, "lower": -7.0}
_GPT_OSS = _clamped(
    lambda gate, up, alpha, up_offset: (up + up_offset) * (gate * torch.sigmoid(gate * alpha))
)
_DEEPSEEK_V4 = _clamped(lambda gate, up: F.silu(gate) * up)
CLAMPED_SWIGLU = [
    (_halves(_GPT_OSS, **_LIMITS, alpha=1.702, up_offset=1.0), _clamped_swiglu),
    (_halves(_DEEPSEEK_V4, **_LIMITS), _clamped_swiglu),
]
_QUICK_GELU = _halves(lambda gate, up, alpha: gate * torch.sigmoid(gate * alpha) * up, alpha=1.702)
UNLIMITED = [(_QUICK_GELU, _clamped_swiglu)]
_GEMMA = _halves(
    lambda gate, up, approximate: F.gelu(gate, approximate=approximate) * up, approximate="tanh"
)
GEGLU: list[Any] = [(_GEMMA, _geglu), (_halves(new_gelu), _geglu)]
RELU_SQUARED = [(Pattern(lambda x: torch.square(F.relu(x)), x=(2, 3, 8)), _relu_squared)]
