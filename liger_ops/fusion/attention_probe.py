"""Whether a model's own attention code is softmax attention with a sink for each head."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor

from .probing import DEVICE, undisturbed

# A size of its own for each axis.
BATCH, HEADS, KEY_HEADS, LENGTH, SIZE = 2, 6, 3, 5, 4

# A finite score in float32 too, for keys that are not visible.
MASKED = -1e9


def adds_sinks(function: Any) -> bool:
    """Run an attention function of a model's file in float64, and compare it with the equation.

    A sink is a score for each query head that adds exp(sink) to the sum of the softmax. The
    function may take the sinks as its argument `s_aux` or from the module, and returns its weights
    too.
    """
    with undisturbed():
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        query = random(BATCH, HEADS, LENGTH, SIZE)
        key, value = random(BATCH, KEY_HEADS, LENGTH, SIZE), random(BATCH, KEY_HEADS, LENGTH, SIZE)
        sinks, scale = random(HEADS), 0.7
        visible = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().expand(BATCH, 1, -1, -1)
        mask = torch.zeros(visible.shape, dtype=torch.float64)
        mask = mask.masked_fill(~visible, MASKED)
        module: Any = types.SimpleNamespace(
            num_key_value_groups=HEADS // KEY_HEADS,
            head_dim=SIZE,
            scaling=scale,
            sinks=sinks,
            training=True,
        )
        arguments = {"scaling": scale, "dropout": 0.0, "s_aux": sinks, "softcap": None}
        try:
            y, *_ = function(module, query, key, value, mask, **arguments)
        except Exception:
            # Code that takes other arguments, or as many heads of keys as of queries.
            return False
        repeats = HEADS // KEY_HEADS
        scores = query @ key.repeat_interleave(repeats, dim=1).mT * scale + mask
        column = sinks.view(1, HEADS, 1, 1).expand(BATCH, HEADS, LENGTH, 1)
        weights = torch.cat((scores, column), dim=-1).softmax(dim=-1)[..., :-1]
        expected = (weights @ value.repeat_interleave(repeats, dim=1)).transpose(1, 2)
        # Some code computes the softmax in float32.
        if y.shape != expected.shape or not torch.allclose(y, expected, rtol=1e-5, atol=1e-5):
            return False
        module.sinks = arguments["s_aux"] = sinks.float()
        tensors = (x.float() for x in (query, key, value, mask))
        with torch.autocast(DEVICE.type, torch.bfloat16):
            _, in_autocast = function(module, *tensors, **arguments)
        # In autocast flex_attention is given bfloat16. Code that has float32 scores there is left.
        # Weights may be given without the sinks.
        exact = (weights, scores.softmax(dim=-1))
        return not any(torch.allclose(in_autocast.double(), one, atol=1e-4) for one in exact)
