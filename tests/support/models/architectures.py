"""Small models with random weights, one for each transformers architecture that the `liger` backend
is tested on, and the number of places in them for each op.

The places were counted by reading the model's code, for one training step with labels and without
padding. docs/reports/architectures.md is written from this table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn

from training_steps import randomized

VOCABULARY = 96
TOKENS = (2, 16)
# Shorter than a sequence, so that a sliding window mask is not a causal mask.
WINDOW = 8

TEXT = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False,
}  # fmt: skip
HEAD = {"head_dim": 16}
ALTERNATING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
# From 5.23 on, some models attend in another way, and experts compile with fullgraph on a CPU.
NEW = Version(transformers.__version__) >= Version("5.23")
# Every token goes to every expert: a choice of experts could flip with the last bit of a router's
# logit, and two runs with different rounding could not be compared.
EXPERTS = {"num_experts_per_tok": 4, **({} if NEW else {"experts_implementation": "batched_mm"})}


@dataclass(frozen=True)
class Missed:
    """The number of an op's places that are found, if not all, and the reason."""

    found: int
    reason: str


@dataclass(frozen=True)
class Architecture:
    """A model, and the number of places for each op of the `liger` backend."""

    name: str
    build: Callable[[], nn.Module]
    to_find: dict[str, int]
    missed: dict[str, Missed] = field(default_factory=dict)
    batch: Callable[[torch.dtype], dict[str, Tensor]] = field(default=lambda dtype: text_batch())

    @property
    def found(self) -> dict[str, int]:
        """The places that the backend finds, by op, without zeros."""
        counts = {
            op: self.missed[op].found if op in self.missed else count
            for op, count in self.to_find.items()
        }
        return {op: count for op, count in counts.items() if count}

    def make(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        """Build the model for training, with weights so large that every part of it matters. All
        dtypes start from the same numbers, which bfloat16 represents exactly."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = self.build()
        return randomized(model.float()).bfloat16().to(dtype)


def text_batch(shape: tuple[int, int] = TOKENS) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, VOCABULARY, shape, generator=generator)
    return {"input_ids": tokens, "labels": tokens.clone()}


def image_batch(dtype: torch.dtype) -> dict[str, Tensor]:
    """Draw random pixels that every dtype represents exactly, and labels."""
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randn(2, 3, 16, 16, generator=generator).bfloat16().to(dtype)
    return {"pixel_values": pixels, "labels": torch.randint(0, 5, (2,), generator=generator)}


def text(
    name: str,
    to_find: dict[str, int],
    *,
    missed: dict[str, Missed] | None = None,
    config: str | None = None,
    model: str | None = None,
    without: tuple[str, ...] = (),
    **options: Any,
) -> Architecture:
    """Return a language model, `<name>ForCausalLM`, with `<name>Config(**TEXT, **options)`."""

    def build() -> nn.Module:
        arguments = {key: value for key, value in TEXT.items() if key not in without}
        configuration = getattr(transformers, config or f"{name}Config")(**arguments, **options)
        return getattr(transformers, model or f"{name}ForCausalLM")(configuration)

    return Architecture(name, build, to_find, missed or {})


def qwen2_vl() -> nn.Module:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    config = transformers.Qwen2VLConfig(
        text_config={**TEXT, "rope_parameters": rope},
        vision_config={
            "depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2,
            "patch_size": 4,
        },
        image_token_id=90,
        video_token_id=91,
        vision_start_token_id=92,
        vision_end_token_id=93,
    )  # fmt: skip
    return transformers.Qwen2VLForConditionalGeneration(config)


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4,
        dropout_rate=0.0, feed_forward_proj="gated-gelu", decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def vit() -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        image_size=16, patch_size=4, num_labels=5,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


def places(**counts: int) -> dict[str, int]:
    """Return the places of most two-layer decoders, changed by `counts`."""
    usual = {
        "rms_norm": 1, "fused_add_rms_norm": 4, "swiglu": 2, "rope": 2, "linear_cross_entropy": 1,
        "causal_attention": 2, "grouped_attention": 2,
    }  # fmt: skip
    return {op: count for op, count in {**usual, **counts}.items() if count}


LAYER_NORMS = {"rms_norm": 0, "fused_add_rms_norm": 0}
# Queries and keys are normalised by head, and then rotated.
HEAD_NORMS = {"rope": 0, "rms_norm_rope": 2}
# The model computes attention itself, with an option that scaled_dot_product_attention lacks.
OWN_ATTENTION = {"causal_attention": 0, "grouped_attention": 0}

# In other layers of such models the mask is causal, and repeated heads are found.
MASKED = "with a mask, scaled_dot_product_attention has no fast kernel that takes grouped heads"

ARCHITECTURES = [
    text("Llama", places(), **HEAD),
    text(
        "Mistral", places(causal_attention=0), missed={"grouped_attention": Missed(0, MASKED)},
        **HEAD, sliding_window=WINDOW,
    ),
    text("Qwen2", places()),
    text("Qwen3", places(**HEAD_NORMS), **HEAD),
    text(
        "Qwen3Moe", places(swiglu=0, moe_experts=2, **HEAD_NORMS), **HEAD, **EXPERTS, num_experts=4,
        moe_intermediate_size=32,
    ),
    text("Gemma", places(swiglu=0, geglu=2), **HEAD),
    text(
        "Gemma2", places(rms_norm=5, swiglu=0, geglu=2, **OWN_ATTENTION, attention=2),
        missed={"attention": Missed(0, "scaled_dot_product_attention takes no soft cap")}, **HEAD,
        **ALTERNATING, attn_implementation="eager", query_pre_attn_scalar=16,
    ),
    text(
        "Gemma3", places(**HEAD_NORMS, rms_norm=5, swiglu=0, geglu=2, causal_attention=1),
        missed={"grouped_attention": Missed(1, MASKED)}, config="Gemma3TextConfig", **HEAD,
        **ALTERNATING, query_pre_attn_scalar=16,
    ),
    text(
        "Phi3",
        places(),
        rope_parameters={
            "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
        },
    ),
    text(
        "Granite", places(), embedding_multiplier=2.0, logits_scaling=4.0, residual_multiplier=0.5,
        attention_multiplier=0.2,
    ),
    text("Olmo2", places(rms_norm=8, fused_add_rms_norm=1)),
    text("SmolLM3", places(rope=1), **HEAD, no_rope_layers=[1, 0]),
    text("Glm4", places(rms_norm=5), **HEAD),
    text(
        "GPTNeoX",
        places(**LAYER_NORMS, layer_norm=5, swiglu=0, grouped_attention=0),
        without=("num_key_value_heads",),
    ),
    text(
        "GptOss", places(swiglu=0, moe_experts=2, **OWN_ATTENTION, attention=2),
        missed={"attention": Missed(0, "scaled_dot_product_attention takes no sinks")}, **HEAD,
        **ALTERNATING, **EXPERTS, num_local_experts=4,
    ),
    text("Mixtral", places(swiglu=0, moe_experts=2), **HEAD, **EXPERTS, num_local_experts=4),
    text("Cohere", places(**LAYER_NORMS, layer_norm=3)),
    text("Starcoder2", places(**LAYER_NORMS, layer_norm=5, swiglu=0)),
    text(
        "FalconH1", places(gated_rms_norm=2), **HEAD, mamba_d_ssm=64, mamba_n_heads=4,
        mamba_d_head=16, mamba_n_groups=1, mamba_d_state=16, mamba_chunk_size=8,
        mamba_rms_norm=True,
    ),
    text(
        "Llama4", places(rms_norm=3, moe_experts=1, swiglu=2, rope=1, causal_attention=1),
        missed={"grouped_attention": Missed(1, MASKED)}, config="Llama4TextConfig", **HEAD,
        **EXPERTS, intermediate_size_mlp=96, num_local_experts=4, interleave_moe_layer_step=2,
        no_rope_layers=[1, 0], attention_chunk_size=WINDOW,
    ),
    text(
        "Bert", {"layer_norm": 6, "linear_cross_entropy": 1}, model="BertForMaskedLM",
        without=("num_key_value_heads",), hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    ),
    Architecture("ViT", vit, {"layer_norm": 5, "linear_cross_entropy": 1}, batch=image_batch),
    text("Phi", places(**LAYER_NORMS, layer_norm=3, swiglu=0)),
    text("Helium", places(), **HEAD),
    text("Nemotron", places(**LAYER_NORMS, layer_norm=5, swiglu=0, relu_squared=2), **HEAD),
    text(
        "DeepseekV3", places(rms_norm=5, swiglu=2, moe_experts=1, grouped_attention=0), **EXPERTS,
        without=("num_key_value_heads",), num_key_value_heads=4, kv_lora_rank=16, q_lora_rank=32,
        qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16, n_routed_experts=4,
        n_shared_experts=1, moe_intermediate_size=32, n_group=1, topk_group=1,
        first_k_dense_replace=1,
    ),
    text(
        "Cohere2", places(**LAYER_NORMS, layer_norm=3, rope=1, causal_attention=1),
        missed={"grouped_attention": Missed(1, MASKED)}, **HEAD, **ALTERNATING,
    ),
    text("Olmo", places(**LAYER_NORMS, layer_norm=5)),
    text(
        "Gemma3n",
        # Queries and keys are rotated separately.
        places(
            rms_norm=18, fused_add_rms_norm=2, swiglu=0, geglu=4, rope=0, rms_norm_rope=4,
            causal_attention=1,
        ),
        missed={"grouped_attention": Missed(1, MASKED)},
        config="Gemma3nTextConfig",
        **HEAD,
        **ALTERNATING,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=16,
        num_kv_shared_layers=0,
        laurel_rank=8,
        altup_num_inputs=2,
        altup_active_idx=0,
        activation_sparsity_pattern=[0.0, 0.0],
    ),
    # A newer version sets is_causal and enable_gqa itself.
    Architecture("Qwen2VL", qwen2_vl, places(**(OWN_ATTENTION if NEW else {}))),
    text("Ernie4_5", places(), **HEAD),
    text("NanoChat", places(rms_norm=6, swiglu=0, relu_squared=2)),
    text(
        "GPTJ",
        # Before transformers 5.24 its attention is written out.
        places(
            **LAYER_NORMS, layer_norm=3, swiglu=0, grouped_attention=0,
            attention=0 if transformers.GPTJPreTrainedModel._supports_sdpa else 2,
        ),  # fmt: skip
        without=tuple(TEXT.keys() - {"vocab_size", "use_cache"}),
        n_embd=64,
        n_layer=2,
        n_head=4,
        n_positions=128,
        rotary_dim=8,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    ),
    text(
        "ModernBert", {"layer_norm": 6, "geglu": 2, "rope": 2, "linear_cross_entropy": 1},
        model="ModernBertForMaskedLM", without=("num_key_value_heads",),
        global_attn_every_n_layers=2, local_attention=WINDOW,
    ),
    Architecture(
        "T5", t5, {"rms_norm": 2, "fused_add_rms_norm": 10, "geglu": 4, "linear_cross_entropy": 1},
    ),
]  # fmt: skip
BY_NAME = {architecture.name: architecture for architecture in ARCHITECTURES}
