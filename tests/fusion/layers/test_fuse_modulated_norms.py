"""Modules that modulate their norms, as AdaLN of diffusers, and modules that are nearly that."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni as qwen

import adaptive_norms as adaptive
import gpu_autocast
import modulated_blocks as blocks
from adaptive_norms import MODULES, NEAR_MISSES, C, N, T
from called_ops import called
from liger_ops import fuse, unfuse

OWN = {name: make for name, (make, _) in MODULES.items()}
REAL = {
    "qwen-zero": lambda: qwen.Qwen2_5_OmniAdaLayerNormZero(N),
    "qwen-final": lambda: qwen.Qwen2_5_OmniAdaLayerNormZero_Final(N),
}


def made(make: Any, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, nn.Module, Any]:
    """A module, a fused copy of it, and what `fuse` reports of the modulated norm."""
    torch.manual_seed(0)
    plain = make().to(dtype)
    for parameter in plain.parameters():
        nn.init.normal_(parameter, std=0.5)
    fused = copy.deepcopy(plain)
    report = fuse(fused)
    return plain, fused, [f for f in report.findings if f.kind == "modulated norm"]


def gradients(module: nn.Module, outputs: list[Tensor], inputs: Any) -> list[Tensor]:
    wanted = [
        *(one for one in inputs if getattr(one, "requires_grad", False)),
        *module.parameters(),
    ]
    torch.manual_seed(1)
    loss = sum((one.float() * torch.randn(one.shape)).sum() for one in outputs)
    return list(torch.autograd.grad(loss, wanted))


def arguments(module: Any, dtype: torch.dtype) -> tuple[Any, ...]:
    if hasattr(module, "arguments"):
        given = module.arguments(dtype)
    else:
        given = torch.randn(2, T, N, dtype=dtype), torch.randn(2, N, dtype=dtype)
    is_float = lambda one: isinstance(one, Tensor) and one.is_floating_point()
    return tuple(one.requires_grad_() if is_float(one) else one for one in given)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float32) for name in (*OWN, *REAL)),
        *((name, torch.bfloat16) for name in ("float32", "of-two", "last")),
    ],
    ids=str,
)
def test_computes(name, dtype):
    """Values, gradients, the ops that are called, and what `unfuse` restores."""
    plain, fused, findings = made({**OWN, **REAL}[name], dtype)
    ops = MODULES[name][1] if name in OWN else ["modulated_layer_norm"]
    (found,) = findings
    assert (found.op, found.reason) == (ops[0], None)
    given = arguments(plain, dtype)
    expected = pytree.tree_leaves(plain(*given))
    result, counts = called(fused, *given)
    assert counts == Counter(ops)
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    compared = zip(
        [*expected, *gradients(plain, expected, given)],
        [*result, *gradients(fused, result, given)],
        strict=True,
    )
    for before, after in compared:
        assert after.dtype == before.dtype and after.shape == before.shape
        assert torch.dist(after.float(), before.float()) <= tolerance * before.float().norm()
    assert not fuse(fused).fused
    unfuse(fused)
    assert called(fused, *given)[1] == {} and type(fused) is type(plain)


@pytest.mark.parametrize(("make", "reason"), NEAR_MISSES.values(), ids=NEAR_MISSES)
def test_near_misses(make, reason):
    plain, fused, findings = made(lambda: nn.ModuleDict({"AdaLayerNorm": make()}))
    assert type(fused["AdaLayerNorm"]) is type(plain["AdaLayerNorm"])
    (found,) = findings
    assert reason in (found.reason or ""), found


def of_code(plain: nn.Module, fused: nn.Module, *args: Any, **kwargs: Any) -> None:
    """The call reaches the module's code, with the norms that `fuse` replaces."""
    result, counts = called(fused, *args, **kwargs)
    assert not any(name.startswith("modulated") for name in counts)
    for before, after in zip(pytree.tree_leaves(plain(*args, **kwargs)), result, strict=True):
        assert after.dtype == before.dtype
        torch.testing.assert_close(after, before, rtol=2e-2, atol=2e-2)


def test_calls_that_reach_the_code():
    plain, fused, _ = made(adaptive.Zero)
    x, _, _, emb = plain.arguments(torch.float32)
    assert called(fused, x, emb=emb)[1] == called(fused, x, emb=emb[:1])[1] != {}
    of_code(plain, fused, x, torch.tensor([3]), emb=emb)
    of_code(plain, fused, x[:1], emb=emb)
    # A scale with T samples beside one of T tokens.
    of_code(plain, fused, x[0], emb=torch.randn(1, C))
    of_code(plain, fused, torch.randn(2, 2, 3, N), emb=emb)
    of_code(plain.double(), fused.double(), x.double(), emb=emb.double())
    with pytest.raises(TypeError):
        fused(x)
    plain, fused, _ = made(adaptive.Zero, torch.float32)
    of_code(plain, fused, x.bfloat16(), emb=emb)


def test_rows_of_a_scale_of_tokens():
    plain, fused, _ = made(adaptive.OfTokens)
    x, emb = plain.arguments(torch.float32)
    for rows in (emb[:, :1], emb[:1, :1], emb):
        (result,), counts = called(fused, x, rows)
        assert counts == {"modulated_layer_norm": 1}
        torch.testing.assert_close(result, plain(x, rows))
    # Of positions, of another number of tokens, and of two dimensions.
    of_code(plain, fused, x, emb[:1])
    of_code(plain, fused, x[:, :1], emb)
    of_code(plain, fused, x[0], emb[0])


def test_an_embedding_that_is_cast_to_the_dtype_of_x():
    plain, fused, _ = made(adaptive.Continuous, torch.bfloat16)
    x, emb = torch.randn(2, T, N, dtype=torch.bfloat16), torch.randn(2, C)
    (result,), counts = called(fused, x, emb)
    assert counts == {"modulated_layer_norm": 1}
    torch.testing.assert_close(result, plain(x, emb))


@pytest.mark.parametrize(
    ("make", "is_wide"),
    (
        (adaptive.Zero, True),
        (lambda: adaptive.Zero(nn.LayerNorm(N)), True),
        (lambda: adaptive.Zero(blocks.FP32LayerNorm(N, elementwise_affine=False)), False),
        (lambda: adaptive.Zero(blocks.RMSNorm(N, 1e-5, elementwise_affine=False)), False),
    ),
    ids=("torch", "weighted", "float32", "rms"),
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_under_the_autocast_of_a_gpu(make, is_wide, dtype):
    """It casts the inputs of PyTorch's norms, and not those of code that is written out."""
    plain, fused, _ = made(make)
    x, _, _, emb = plain.arguments(torch.float32)
    x = x.to(dtype)
    with gpu_autocast.on_cpu(), torch.autocast("cpu", torch.bfloat16):
        expected = plain(x, emb=emb)
        result, counts = called(fused, x, emb=emb)
    assert sum(counts.values()) == 1 and next(iter(counts)).startswith("modulated")
    assert expected[0].dtype == (torch.float32 if is_wide else dtype)
    for before, after in zip(expected, result, strict=True):
        assert after.dtype == before.dtype
        # 1 + scale rounds to bfloat16 as in the code; the norms may differ by float32's rounding.
        assert torch.isclose(after, before, rtol=1e-5, atol=1e-6).float().mean() > 0.98


def test_a_wide_weight_under_the_autocast_of_a_gpu():
    """The code then returns float32 for a narrow x."""
    plain, fused, _ = made(lambda: adaptive.Zero(blocks.RMSNorm(N, 1e-5)))
    x, _, _, emb = plain.arguments(torch.float32)
    with gpu_autocast.on_cpu(), torch.autocast("cpu", torch.bfloat16):
        _, counts = called(fused, x.bfloat16(), emb=emb)
    assert not any(name.startswith("modulated") for name in counts)


def test_children_that_are_replaced_or_have_hooks_later_are_called():
    _, fused, _ = made(adaptive.Last)
    given = arguments(fused, torch.float32)
    seen = []
    fused.silu.register_forward_hook(lambda *_: seen.append("silu"))
    fused.linear_2 = nn.Linear(N, 7)
    assert fused(*given).shape[-1] == 7 and seen == ["silu"]
