"""Find out whether a model's own attention code has sinks or a soft cap."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor

from ..probing import DEVICE, undisturbed

# Different sizes, so that no two axes can be confused.
BATCH, HEADS, KEY_HEADS, LENGTH, SIZE = 2, 6, 3, 5, 4

# A finite score in float32 too, for keys that are not visible.
MASKED = -1e9


CAP = 0.8


def addition(function: Any) -> str | None:
    """Return "sinks" or "softcap" if an attention function of a model's file adds that to softmax
    attention, else None.

    The function runs in float64, and is compared with the equation. A sink is a score for each
    query head that adds exp(sink) to the sum of the softmax; the function may take the sinks as its
    argument `s_aux` or from the module. A soft cap replaces scores by cap * tanh(scores / cap); the
    function takes it as its argument `softcap`, which may be None. It returns its weights too.
    """
    with undisturbed():
        if _computes(function, has_sinks=True, cap=None):
            return "sinks"
        both = (_computes(function, has_sinks=False, cap=cap) for cap in (None, CAP))
        return "softcap" if all(both) else None


def _computes(function: Any, has_sinks: bool, cap: float | None) -> bool:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    query = random(BATCH, HEADS, LENGTH, SIZE)
    key, value = random(BATCH, KEY_HEADS, LENGTH, SIZE), random(BATCH, KEY_HEADS, LENGTH, SIZE)
    sinks, scale = random(HEADS) if has_sinks else None, 0.7
    visible = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().expand(BATCH, 1, -1, -1)
    mask = torch.zeros(visible.shape, dtype=torch.float64)
    mask = mask.masked_fill(~visible, MASKED)
    module: Any = types.SimpleNamespace(
        num_key_value_groups=HEADS // KEY_HEADS, head_dim=SIZE, scaling=scale, training=True
    )
    arguments: dict[str, Any] = {"scaling": scale, "dropout": 0.0, "softcap": cap}
    if sinks is not None:
        module.sinks = arguments["s_aux"] = sinks
    try:
        y, *_ = function(module, query, key, value, mask, **arguments)
    except Exception:
        # The code takes other arguments, or needs as many heads of keys as of queries.
        return False
    repeats = HEADS // KEY_HEADS
    scores = query @ key.repeat_interleave(repeats, dim=1).mT * scale
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    scores = scores + mask
    weights = exact = scores.softmax(dim=-1)
    if sinks is not None:
        column = sinks.view(1, HEADS, 1, 1).expand(BATCH, HEADS, LENGTH, 1)
        weights = torch.cat((scores, column), dim=-1).softmax(dim=-1)[..., :-1]
    expected = (weights @ value.repeat_interleave(repeats, dim=1)).transpose(1, 2)
    # Some code computes the softmax in float32.
    if y.shape != expected.shape or not torch.allclose(y, expected, rtol=1e-5, atol=1e-5):
        return False
    if sinks is not None:
        module.sinks = arguments["s_aux"] = sinks.float()
    tensors = (x.float() for x in (query, key, value, mask))
    with torch.autocast(DEVICE.type, torch.bfloat16):
        _, in_autocast = function(module, *tensors, **arguments)
    # Under autocast flex_attention is given bfloat16. Code whose scores are float32 there, so that
    # its weights are exact, is left. It may return weights with or without the sinks.
    return not any(torch.allclose(in_autocast.double(), one, atol=1e-4) for one in (weights, exact))
