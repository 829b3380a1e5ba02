"""Norms and modulated norms under an autocast that computes norms in float32, as on GPUs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager

import gpu_autocast
import modulated_blocks as blocks
from liger_ops import backend
from norm_spellings import EPS, inverse_rms, llama
from rewriting import Rewriter, values

WIDE, NARROW = torch.float32, torch.bfloat16


@pytest.fixture
def norms_in_float32() -> Iterator[None]:
    with gpu_autocast.on_cpu():
        yield


def cast_back(norm: nn.LayerNorm, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return blocks.zero(norm, x, scale, shift).to(x.dtype)


@pytest.mark.parametrize(
    ("block", "dtype", "scale_dtype", "rows"),
    (
        (blocks.zero, NARROW, NARROW, (2, 64)),
        (blocks.zero, WIDE, NARROW, (2, 64)),
        (blocks.wan, NARROW, WIDE, (2, 1, 64)),
        (cast_back, NARROW, NARROW, (2, 64)),
    ),
    ids=("narrow-x", "wide-x", "wan", "cast-back"),
)
@pytest.mark.usefixtures("norms_in_float32")
def test_rounds_where_the_code_rounds(block, dtype, scale_dtype, rows):
    """1 + scale rounds to bfloat16 where scale is bfloat16, beside a norm in float32."""
    norm = nn.LayerNorm(64, 1e-6, elementwise_affine=False)

    def function(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        with torch.autocast("cpu", NARROW):
            return block(norm, x, scale, shift)

    x = values(2, 5, 64, dtype=dtype).detach()
    scale, shift = (values(*rows, dtype=scale_dtype, seed=i).detach() for i in (0, 1))
    torch._dynamo.reset()
    rewriter = Rewriter()
    result = torch.compile(function, backend=rewriter, fullgraph=True)(x, scale, shift)
    expected = function(x, scale, shift)
    assert rewriter.counts() == {"modulated_layer_norm": 1}
    # The norms differ by float32's rounding. If 1 + scale did not round, the error would be 1e-3.
    torch.testing.assert_close(result, expected, rtol=1e-6, atol=1e-6)


def of_torch(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (64,), weight, EPS)


def diffusers(x: Tensor, weight: Tensor) -> Tensor:
    """`RMSNorm` of diffusers with a float32 weight: x's rows times a float32 factor."""
    return x * inverse_rms(x.float()) * weight


def mochi(x: Tensor, weight: Tensor) -> Tensor:
    return diffusers(x, weight).to(x.dtype)


def centred(x: Tensor, weight: Tensor) -> Tensor:
    """Cohere's layer norm."""
    x_wide = x.float() - x.float().mean(-1, keepdim=True)
    return (weight.float() * (x_wide * inverse_rms(x_wide))).to(x.dtype)


def modulated(norm, x: Tensor, weight: Tensor) -> Tensor:
    rows = x.detach()[:, 0]
    return blocks.dit(lambda one: norm(one, weight), x, rows, rows.cos())


def added(norm, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + x.detach().cos()
    return norm(total, weight), total


def alone(norm, x: Tensor, weight: Tensor) -> Tensor:
    return norm(x, weight)


@pytest.mark.parametrize(
    ("use", "norm", "weight_dtype", "op"),
    (
        (alone, llama, NARROW, "rms_norm"),
        (alone, mochi, WIDE, "rms_norm"),
        (alone, of_torch, WIDE, "rms_norm"),
        (alone, centred, NARROW, "layer_norm"),
        (added, llama, NARROW, "fused_add_rms_norm"),
        (modulated, llama, NARROW, "modulated_rms_norm"),
        (modulated, mochi, WIDE, "modulated_rms_norm"),
        (modulated, diffusers, WIDE, "modulated_rms_norm"),
        (modulated, of_torch, WIDE, "modulated_rms_norm"),
    ),
    ids=lambda one: getattr(one, "__name__", str(one)),
)
@pytest.mark.usefixtures("norms_in_float32")
def test_norms_of_narrow_rows(use, norm, weight_dtype, op):
    """A norm that is written out rounds as without autocast, and F.rms_norm is in float32."""

    def function(x: Tensor, weight: Tensor) -> Tensor | tuple[Tensor, ...]:
        with torch.autocast("cpu", NARROW):
            return use(norm, x, weight)

    found: list[str] = []

    def inner(module, inputs):
        found.extend(str(node.target) for node in module.graph.nodes)
        return aot_eager(module, inputs)

    torch._dynamo.reset()
    options = {"inner_backend": inner, "strict": True}
    compiled = torch.compile(function, backend=backend, options=options, fullgraph=True)
    expected, result = (
        _with_gradients(run, values(3, 5, 64, dtype=NARROW), values(64, dtype=weight_dtype))
        for run in (function, compiled)
    )
    assert [name for name in found if name.startswith("liger")] == [f"liger.{op}.default"]
    for before, after in zip(expected[:-2], result[:-2], strict=True):
        # Sums in another order change a rounding now and then; a rounding less changes many.
        assert torch.isclose(after, before, rtol=1e-5, atol=1e-6).float().mean() > 0.98
    # The gradients of the ops round once.
    for before, after in zip(expected, result, strict=True):
        assert after.dtype == before.dtype
        assert torch.dist(after.float(), before.float()) < 0.01 * before.float().norm()


def _with_gradients(run, x: Tensor, weight: Tensor) -> list[Tensor]:
    result = run(x, weight)
    outputs = list(result) if isinstance(result, tuple) else [result]
    loss = sum(
        (one.float() * torch.arange(one.numel()).view_as(one).cos()).sum() for one in outputs
    )
    return [*(one.detach() for one in outputs), *torch.autograd.grad(loss, (x, weight))]
