"""rope against the models' code that it replaces, forward and gradient."""

from __future__ import annotations

import pytest
import torch
from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb as cohere_rope
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    apply_rotary_pos_emb_interleave as deepseek_rope,
)
from transformers.models.glm4.modeling_glm4 import apply_rotary_pos_emb as glm4_rope
from transformers.models.gpt_oss.modeling_gpt_oss import apply_rotary_pos_emb as gpt_oss_rope
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as llama_rope
from transformers.models.llama4.configuration_llama4 import Llama4VisionConfig
from transformers.models.llama4.modeling_llama4 import (
    Llama4VisionRotaryEmbedding,
    vision_apply_rotary_emb,
)
from transformers.models.llama4.modeling_llama4 import apply_rotary_emb as llama4_rope
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding

import liger_ops
from rotary_inputs import heads, rotary_angles, rotary_tables


def assert_agrees(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """transformers rounds both products and their sum; the op rounds once."""
    unit = torch.finfo(ours.dtype).eps * theirs.abs().max().item()
    assert ours.dtype is theirs.dtype
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2 * unit)


def assert_all_agree(
    inputs: tuple[torch.Tensor, ...],
    outputs: tuple[torch.Tensor, ...],
    expected: tuple[torch.Tensor, ...],
) -> None:
    """Outputs agree, and so do the gradients of the inputs."""
    weights = [torch.randn_like(output) for output in outputs]
    grads = torch.autograd.grad(outputs, inputs, weights)
    expected_grads = torch.autograd.grad(expected, inputs, weights)
    for a, b in zip((*outputs, *grads), (*expected, *expected_grads), strict=True):
        assert_agrees(a, b)


DTYPES = pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))


@DTYPES
def test_agrees_with_transformers(dtype: torch.dtype) -> None:
    """The rotations of Llama, Cohere, GPT-OSS, DeepSeek and (partial) GLM4, and gradients."""
    half, interleaved = rotary_tables(dtype), rotary_tables(dtype, interleaved=True)
    # Views of the tables with one number per pair.
    first_half, every_other = (
        tuple(table[..., index] for table in tables)
        for tables, index in ((half, slice(8)), (interleaved, slice(None, None, 2)))
    )
    for theirs, tables, their_tables, options, D in (
        (llama_rope, half, half, (), 16),
        (llama_rope, first_half, half, (False, True), 16),
        (cohere_rope, interleaved, interleaved, (True,), 16),
        (cohere_rope, every_other, interleaved, (True, True), 16),
        (glm4_rope, interleaved, half, (True,), 24),
        (glm4_rope, first_half, half, (True, True), 24),
        (gpt_oss_rope, first_half, first_half, (False, True), 16),
        (deepseek_rope, half, half, (True, False, None, True), 16),
        (deepseek_rope, first_half, half, (True, True, None, True), 16),
    ):
        q, k = (x.requires_grad_() for x in heads(dtype, D))
        outputs = liger_ops.rope(q, k, *tables, *options)
        assert_all_agree((q, k), outputs, theirs(q, k, *their_tables))


@DTYPES
def test_agrees_with_llama4(dtype: torch.dtype) -> None:
    """Complex frequencies; q and k are (B, S, heads, D), and keep that layout."""
    freqs = torch.polar(torch.ones(()), rotary_angles())
    for freqs_cis in (freqs, freqs[:1], freqs * 0.7):
        q, k = (x.transpose(1, 2).detach().requires_grad_() for x in heads(dtype))
        rotated = liger_ops.rope(q.transpose(1, 2), k.transpose(1, 2), freqs_cis)
        outputs = tuple(y.transpose(1, 2) for y in rotated)
        assert all(y.is_contiguous() for y in outputs)
        assert_all_agree((q, k), outputs, llama4_rope(q, k, freqs_cis))


@DTYPES
def test_agrees_with_the_images_of_llama4(dtype: torch.dtype) -> None:
    """Complex frequencies of the patches and the class token, (S, 1, D/2)."""
    config = Llama4VisionConfig(
        hidden_size=64, num_attention_heads=4, image_size=8, patch_size=4,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    freqs_ci = Llama4VisionRotaryEmbedding(config)(torch.empty(()))
    q, k = (x.transpose(1, 2).detach().requires_grad_() for x in heads(dtype))
    rotated = liger_ops.rope(q.transpose(1, 2), k.transpose(1, 2), freqs_ci.squeeze(1))
    outputs = tuple(y.transpose(1, 2) for y in rotated)
    assert_all_agree((q, k), outputs, vision_apply_rotary_emb(q, k, freqs_ci))


def multiplied(x: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    """Each pair by its matrix, as the code of Flux does; matrices are (B, 1, S, D/2, 2, 2)."""
    pairs = x.float().unflatten(-1, (-1, 1, 2))
    y = matrices[..., 0] * pairs[..., 0] + matrices[..., 1] * pairs[..., 1]
    return y.reshape(x.shape).type_as(x)


@DTYPES
def test_agrees_with_flux(dtype: torch.dtype) -> None:
    """Both of its forms: matrices, and diffusers' tables with each number twice."""
    angles = rotary_angles()
    cos, sin = angles.cos(), angles.sin()
    matrices = torch.stack((cos, -sin, sin, cos), -1).unflatten(-1, (2, 2))
    q, k = (x.requires_grad_() for x in heads(dtype))
    outputs = liger_ops.rope(q, k, matrices)
    expected = tuple(multiplied(x, matrices.unsqueeze(1)) for x in (q, k))
    assert_all_agree((q, k), outputs, expected)
    tables = tuple(table.repeat_interleave(2, -1) for table in (cos, sin))
    for ours, theirs in zip(liger_ops.rope(q, k, *tables, True), expected, strict=True):
        assert_agrees(ours, theirs)


@DTYPES
@pytest.mark.parametrize("sections", ((2, 3, 3), (8, 0, 0), (1, 7, 0)))
def test_agrees_with_qwen2_vl(dtype: torch.dtype, sections: tuple[int, ...]) -> None:
    """The model combines the tables of three positions into one; the op takes all three."""
    config = Qwen2VLTextConfig(
        hidden_size=64,
        num_attention_heads=4,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": list(sections),
        },
    )
    rotary = Qwen2VLRotaryEmbedding(config)
    positions = torch.randint(50, (3, 2, 5), generator=torch.Generator().manual_seed(1))
    q, k = (x.requires_grad_() for x in heads(dtype))
    composed = rotary(q, positions)
    angles = positions[..., None] * rotary.inv_freq
    tables = angles.cos().to(dtype), angles.sin().to(dtype)
    whole = tuple(torch.cat((table, table), -1) for table in tables)
    for three, per_pair in ((tables, True), (whole, False)):
        outputs = liger_ops.rope(q, k, *three, per_pair=per_pair, sections=list(sections))
        assert_all_agree((q, k), outputs, llama_rope(q, k, *composed))
