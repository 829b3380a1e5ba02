"""Calls of functions that `fuse` recognises as rope."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    apply_rotary_pos_emb_interleave as deepseek,
)
from transformers.models.glm4.modeling_glm4 import apply_rotary_pos_emb as glm4
from transformers.models.glm4v.modeling_glm4v import apply_rotary_pos_emb as glm4v
from transformers.models.gpt_oss.modeling_gpt_oss import apply_rotary_pos_emb as gpt_oss
from transformers.models.llama.modeling_llama import rotate_half
from transformers.models.llama4.modeling_llama4 import apply_rotary_emb as llama4
from transformers.models.llama4.modeling_llama4 import vision_apply_rotary_emb as llama4_vision
from transformers.models.nanochat.modeling_nanochat import apply_rotary_pos_emb as nanochat
from transformers.models.olmo2.modeling_olmo2 import apply_rotary_pos_emb as olmo2
from transformers.models.openai_privacy_filter.modeling_openai_privacy_filter import (
    apply_rotary_pos_emb as privacy_filter,
)
from transformers.models.pe_audio.modeling_pe_audio import apply_rotary_pos_emb as pe_audio
from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb as phi3
from transformers.models.qwen2_vl.modeling_qwen2_vl import apply_rotary_pos_emb_vision as vision

from liger_ops import fuse
from liger_ops.fusion.layers.rotary import Rotary
from rotating_modules import B, D, H, Rotating, S, interleaved, llama, ops_of, set_rotate, tensors


@pytest.fixture
def calling(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Any]], nn.Module]:
    """Makes a fused module whose forward calls the given function."""

    def fused(function: Callable[..., Any]) -> nn.Module:
        set_rotate(monkeypatch, function)
        module = Rotating()
        fuse(module)
        return module

    return fused


def multimodal(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, mrope_section: list[int], unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """Qwen2-VL's own code, which combines three tables into one."""
    parts = mrope_section * 2
    tables = []
    for table in (cos, sin):
        pieces = [piece[i % 3] for i, piece in enumerate(table.split(parts, -1))]
        tables.append(torch.cat(pieces, -1))
    return llama(q, k, *tables, unsqueeze_dim)


def other_way(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    return llama(q, k, cos, -sin, unsqueeze_dim)


def neighbours_by_view(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Inkling's code of its vision model, which views pairs as a dimension."""

    def turned(x: Tensor) -> Tensor:
        x1, x2 = x.view(*x.shape[:-1], -1, 2).unbind(dim=-1)
        return torch.stack((-x2, x1), dim=-1).flatten(start_dim=-2)

    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + turned(q) * sin, k * cos + turned(k) * sin


def last_positions(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """As in an assistant model, whose queries may be fewer than its keys."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    count = q.size(-2)
    y = q * cos[..., -count:, :] + rotate_half(q) * sin[..., -count:, :]
    return y, k * cos + rotate_half(k) * sin


def de_interleaved(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """DeepSeek's rotation: pairs are adjacent in the input, and in halves in the output."""
    q, k = (torch.cat((x[..., ::2], x[..., 1::2]), -1) for x in (q, k))
    return llama(q, k, cos, sin)


def queries_alone(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return llama(q, k, cos, sin)[0], k


def exchanged_tables(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return llama(q, k, sin, cos)


def complex_table(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    return q, k, torch.complex(cos[..., : D // 2].float(), sin[..., : D // 2].float())


LLAMA = {"interleaved": False}
PAIRS = {"interleaved": False, "per_pair": True}
DEEPSEEK = {"interleaved": True, "per_pair": True, "deinterleave": True}

# A function, its non-tensor arguments, the arguments of `tensors`, and the op's options.
FORMS = [
    (llama, {}, {}, LLAMA),
    (llama, {"unsqueeze_dim": 2}, {"layout": "bshd"}, LLAMA),
    (olmo2, {}, {}, LLAMA),
    (phi3, {}, {}, LLAMA),
    (phi3, {}, {"width": 8}, LLAMA),
    (phi3, {}, {"width": 6}, LLAMA),
    (interleaved, {}, {}, {"interleaved": True}),
    (gpt_oss, {}, {"width": D // 2}, PAIRS),
    (glm4, {}, {}, {**PAIRS, "interleaved": True}),
    (glm4, {}, {"width": D // 2}, {**PAIRS, "interleaved": True}),
    (vision, {}, {"layout": "shd"}, LLAMA),
    (glm4v, {}, {}, {"interleaved": True}),
    (glm4v, {}, {"width": 6}, {"interleaved": True}),
    (nanochat, {}, {}, LLAMA),
    (other_way, {}, {"layout": "shd"}, LLAMA),
    (neighbours_by_view, {}, {}, {"interleaved": True}),
    (privacy_filter, {}, {"width": D // 2}, {**PAIRS, "interleaved": True}),
    (pe_audio, {}, {}, {**PAIRS, "interleaved": True}),
    (pe_audio, {"unsqueeze_dim": 2}, {"layout": "bshd"}, {**PAIRS, "interleaved": True}),
    (last_positions, {}, {}, LLAMA),
    (deepseek, {}, {}, DEEPSEEK),
    (deepseek, {"unsqueeze_dim": 2}, {"layout": "bshd"}, DEEPSEEK),
    (de_interleaved, {}, {}, {"interleaved": True, "deinterleave": True}),
    (queries_alone, {}, {}, LLAMA),
    (exchanged_tables, {}, {}, LLAMA),
    (multimodal, {"mrope_section": [2, 3, 3]}, {"leading": (3,)}, LLAMA),
]
FORM_IDS = [f"{form[0].__module__.rpartition('.')[2]}-{i}" for i, form in enumerate(FORMS)]


@pytest.mark.parametrize(("function", "kwargs", "given", "options"), FORMS, ids=FORM_IDS)
def test_options_are_found(
    calling: Any,
    function: Callable[..., Any],
    kwargs: dict[str, Any],
    given: dict[str, Any],
    options: dict[str, Any],
) -> None:
    """The op runs with the function's results: in float32, and within rounding in bfloat16."""
    module = calling(function)
    report_of = Rotary.plan(Rotating()).findings
    assert [(entry.op, entry.options, entry.kind) for entry in report_of] == [
        ("rope", options, "rotary embedding")
    ]
    args = [x.requires_grad_() for x in tensors(**given)]
    assert ops_of(module, args, kwargs) == ["rope"]
    y, expected = module(*args, **kwargs), function(*args, **kwargs)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    dy = [torch.randn(part.shape) for part in y]
    torch.testing.assert_close(
        torch.autograd.grad(y, args[:2], dy), torch.autograd.grad(expected, args[:2], dy)
    )
    args = tensors(**given, dtype=torch.bfloat16)
    assert ops_of(module, args, kwargs) == ["rope"]
    # Each product is at most the number, and each of three roundings changes it by up to 2**-9.
    for ours, theirs, x in zip(
        module(*args, **kwargs), function(*args, **kwargs), args, strict=False
    ):
        assert ours.dtype is theirs.dtype is torch.bfloat16
        assert ((ours - theirs).abs() <= 2**-7 * (1 + x.abs().max())).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_complex_frequencies(calling: Any, dtype: torch.dtype) -> None:
    module = calling(llama4)
    args = complex_table(*tensors("bshd", dtype=dtype))
    assert ops_of(module, args) == ["rope"]
    for ours, theirs in zip(module(*args), llama4(*args), strict=True):
        # Both compute in float32 and round once.
        torch.testing.assert_close(ours, theirs, rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_complex_frequencies_of_an_image(calling: Any, dtype: torch.dtype) -> None:
    """Tables (S, 1, D/2), shared by the batch; those of another length are the function's."""
    module = calling(llama4_vision)
    q, k, table = complex_table(*tensors("bshd", dtype=dtype))
    table = table[0].unsqueeze(1)
    assert ops_of(module, (q, k, table)) == ["rope"]
    for ours, theirs in zip(module(q, k, table), llama4_vision(q, k, table), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=torch.finfo(dtype).eps, atol=1e-6)
    with pytest.raises(RuntimeError):
        module(q, k, table[1:])


@pytest.mark.parametrize("function", [llama4, llama4_vision])
def test_frequencies_without_imaginary_parts_reach_the_function(
    calling: Any, function: Callable[..., Any]
) -> None:
    """model.to(torch.bfloat16) drops the imaginary parts of a buffer, as transformers has it."""
    module = calling(function)
    q, k, table = complex_table(*tensors("bshd", dtype=torch.bfloat16))
    if function is llama4_vision:
        table = table[0].unsqueeze(1)
    args = (q, k, table.real.to(torch.bfloat16))
    assert ops_of(module, args) == []
    for ours, theirs in zip(module(*args), function(*args), strict=True):
        assert torch.equal(ours, theirs)


# Calls that the op does not handle, of functions that are rope in other calls.
FALLBACKS = [
    (llama, {"unsqueeze_dim": 0}, {"layout": "shd"}),
    (llama, {"unsqueeze_dim": -3}, {}),
    (llama, {}, {"dtype": torch.float64, "table_dtype": torch.float32}),
    (llama, {}, {"table_dtype": torch.bfloat16}),
    (vision, {}, {"layout": "shd", "table_dtype": torch.float64}),
]


@pytest.mark.parametrize(("function", "kwargs", "given"), FALLBACKS)
def test_other_calls_reach_the_function(
    calling: Any, function: Callable[..., Any], kwargs: dict[str, Any], given: dict[str, Any]
) -> None:
    module = calling(function)
    args = tensors(**given)
    if kwargs.get("unsqueeze_dim") == 0:
        args = (args[0].transpose(0, 1), args[1].transpose(0, 1), *args[2:])
    assert ops_of(module, args, kwargs) == []
    for ours, theirs in zip(module(*args, **kwargs), function(*args, **kwargs), strict=True):
        assert ours.dtype is theirs.dtype
        assert torch.equal(ours, theirs)


def test_broadcast_positions_and_wrong_arguments_reach_the_function(calling: Any) -> None:
    module = calling(llama)
    q, k, cos, sin = tensors()
    for one in ((cos[:, :1], sin[:, :1]), (cos, sin[:1]), (cos, sin[:, :1])):
        assert ops_of(module, (q, k, *one)) == []
        assert torch.equal(module(q, k, *one)[0], llama(q, k, *one)[0])
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'sin'"):
        module(q, k, cos)
    with pytest.raises(RuntimeError):
        module(q, k, cos[..., :6], sin[..., :6])
    assert ops_of(module, (q, k.double(), cos, sin)) == []
    assert torch.equal(module(q, k.double(), cos, sin)[1], llama(q, k.double(), cos, sin)[1])
    assert ops_of(module, (), {"q": q, "k": k, "sin": sin, "cos": cos}) == ["rope"]
    assert ops_of(module, (q, k, cos[:1], sin[:1])) == ["rope"]


def test_wide_tables(calling: Any) -> None:
    """Code that computes in float32 and returns the queries' dtype is rope for float32 tables."""
    module = calling(vision)
    args = tensors("shd", dtype=torch.bfloat16, table_dtype=torch.float32)
    assert ops_of(module, args) == ["rope"]
    torch.testing.assert_close(module(*args), vision(*args), rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("function", "given"), [(llama, {}), (phi3, {"width": 8})])
def test_wide_tables_of_code_that_promotes(
    calling: Any,
    function: Callable[..., Any],
    given: dict[str, Any],
    dtype: torch.dtype,
    autocast: bool,
) -> None:
    """With queries from a linear layer in autocast and float32 tables, the results are float32."""
    module = calling(function)
    args = tensors(**given, dtype=dtype, table_dtype=torch.float32)
    with torch.autocast("cpu", dtype=dtype, enabled=autocast):
        assert ops_of(module, args) == ["rope"]
        y, expected = module(*args), function(*args)
        assert [part.dtype for part in y] == [part.dtype for part in expected]
    torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-6)


def test_results_keep_the_layout(calling: Any) -> None:
    module = calling(llama)
    q, k, cos, sin = tensors()
    q = torch.randn(B, S, H, D).transpose(1, 2)
    assert module(q, k, cos, sin)[0].stride() == q.stride()
