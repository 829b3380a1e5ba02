"""A cast to a narrow dtype and back, at any edge of any code that a rewrite knows: the rewritten
graph rounds as the code does, or is the code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.func import functional_call

import hyper_connections as hyper
import loss_spellings as losses
import rotations
import token_spellings as tokens
from casting import Function, Rewritten, cast_at, distance, edges, results
from liger_ops.rewrites import REWRITES
from liger_ops.rewrites.engine.pattern import Pattern
from liger_ops.rewrites.layers import (
    activations,
    dense_experts,
    gated_rms_norm,
    layer_norm,
    modulated_norm,
    rms_norm,
)
from norm_spellings import llama
from rewriting import values

NAMES = [name for name in REWRITES if "attention" not in name]
F32, BF16 = torch.float32, torch.bfloat16
# Far above the roundings of float32, and below what a narrower dtype rounds of a result.
ROUNDING = 1e-3

Code = tuple[Function, Callable[[torch.dtype], Sequence[Any]]]


def of_patterns(spellings: Sequence[tuple[Pattern, Any]]) -> list[Code]:
    return [of_pattern(pattern) for pattern, _ in spellings]


def of_pattern(pattern: Pattern) -> Code:
    module = fx.GraphModule(nn.Module(), pattern._graph)

    def inputs(dtype: torch.dtype) -> list[Any]:
        given = enumerate(pattern._examples.values())
        return [values(*x.shape, dtype=dtype, seed=i) if isinstance(x, Tensor) else x
                for i, x in given]  # fmt: skip

    return lambda *args: fx.Interpreter(module).run(*args), inputs


def of_module(module: nn.Module, x: Callable[[torch.dtype], Tensor]) -> Code:
    names = [name for name, _ in module.named_parameters()]

    def run(x: Tensor, *parameters: Tensor) -> Any:
        return functional_call(module, dict(zip(names, parameters, strict=True)), (x,))

    return run, lambda dtype: [x(dtype), *module.parameters()]


def heads(dtype: torch.dtype) -> list[Tensor]:
    return [*rotations.heads(dtype), *rotations.tables(rotations.D, dtype)]


def of_complex(q: Tensor, k: Tensor, freqs: Tensor) -> Any:
    def rotated(x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * freqs[None, :, None]).flatten(3).type_as(x)

    return rotated(q), rotated(k)


def normed(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, weight: Tensor) -> Any:
    return rotations.applied(rotations.llama)(llama(q, weight), llama(k, weight), cos, sin)


def added(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
    return llama(x + residual, weight), x + residual


def of_experts(x: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    chosen, index = torch.topk(logits, 2, 1)
    scores = dense_experts.sigmoids(logits, index, chosen)
    rows = x.repeat(4, 1) * scores.transpose(0, 1).reshape(-1, 1)
    gate, up = torch.bmm(rows.view(4, -1, 3), gate_up).chunk(2, -1)
    y = torch.bmm(up * F.silu(gate), down).view(-1, 3)
    return y.reshape(4, -1, 3).sum(0)


def labels() -> Tensor:
    return (torch.arange(losses.B * losses.S) % losses.V).view(losses.B, losses.S)


FAMILIES: dict[str, list[Code]] = {
    "rms_norm": of_patterns(rms_norm.SPELLINGS),
    "layer_norm": of_patterns([*layer_norm.SPELLINGS, *layer_norm.GROUP_NORM]),
    "gated_rms_norm": of_patterns(gated_rms_norm.SPELLINGS),
    "activations": of_patterns(
        [*activations.SWIGLU, *activations.CLAMPED_SWIGLU, *activations.GEGLU,
         *activations.RELU_SQUARED]
    ),
    "modulated_norm": [one for of in modulated_norm.SPELLINGS.values() for one in of_patterns(of)],
    "fused_add": [
        (added, lambda dtype: [values(2, 3, 8, dtype=dtype, seed=i) for i in range(2)]
         + [values(8, dtype=dtype)]),
    ],
    "rope": [
        *((rotations.applied(one), heads) for one in (rotations.llama, rotations.cohere)),
        (of_complex, lambda dtype: [
            *rotations.heads(dtype), torch.polar(*torch.rand(2, rotations.S, rotations.D // 2))
        ]),
        (normed, lambda dtype: [*heads(dtype), values(rotations.D, dtype=dtype)]),
    ],
    "hyper_connections": [
        of_module(hyper.layer(make()), lambda dtype: values(2, 3, hyper.HC, hyper.HIDDEN))
        for make in hyper.MODULES.values()
    ],
    "experts": [
        (of_experts, lambda dtype: [
            values(*shape, dtype=dtype) for shape in ((5, 3), (5, 4), (4, 3, 14), (4, 7, 3))
        ]),
    ],
    "losses": [
        *((one, losses.inputs) for one in (losses.plain, losses.transformers)),
        (losses.with_head(losses.sliced), losses.head_inputs),
    ],
    "tokens": [
        *((one, lambda dtype: [losses.inputs(dtype)[0], labels()])
          for one in (*tokens.LOG_PROBS.values(), *tokens.BOTH.values())),
        *((one, lambda dtype: losses.inputs(dtype)[:1]) for one in tokens.ENTROPIES.values()),
    ],
}  # fmt: skip
NARROW = {
    F32: (torch.float8_e4m3fn, torch.float8_e5m2, BF16, torch.float16, torch.int8, torch.bool),
    BF16: (torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.int8, torch.bool),
}


@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data())
def test_a_cast_stays_or_the_code_does(family: str, data: st.DataObject) -> None:
    function, inputs = data.draw(st.sampled_from(FAMILIES[family]))
    dtype = data.draw(st.sampled_from((F32, F32, BF16)))
    given = inputs(dtype)
    at = data.draw(st.integers(-1, edges(function, given) - 1))
    narrow = data.draw(st.sampled_from(NARROW[dtype]))
    cast = cast_at(function, at, narrow)
    try:
        expected = results(cast, given)
    except (RuntimeError, NotImplementedError):
        # A gradient cannot have such a dtype.
        return
    found = Rewritten(cast, given, NAMES)
    assert found.used or at >= 0
    assert not found.used or narrow not in found.lost
    if dtype is F32:
        assert distance(expected, results(found, given)) < ROUNDING
