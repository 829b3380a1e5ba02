"""Every causal language model and encoder-decoder of transformers, and multimodal models, all
small."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto

import multimodal_models
from small_configs import EXPERTS, FIRST_SPECIAL_TOKEN, HEAD_DIM, HEADS, HIDDEN, small
from training_steps import Model

# Model type -> changes to its configuration beside making it small.
CHANGES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0}
            for kind in ("full_attention", "sliding_attention")
        },
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": EXPERTS},
    "dots1": {"n_routed_experts": EXPERTS, "n_shared_experts": 1, "num_experts_per_tok": EXPERTS},
    "gemma3n_text": {
        "intermediate_size": [96, 96],
        "num_kv_shared_layers": 0,
        "altup_num_inputs": 2,
        "activation_sparsity_pattern": [0.0, 0.0],
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    # Its number of layers counts the cycles through its two stacks.
    "hrm_text": {"num_hidden_layers": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 2 * HEADS},
    "mistral4": {"head_dim": 8},
    "qwen4_exp_text": {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "reformer": {
        "is_decoder": True,
        "attn_layers": ["local", "lsh"],
        "axial_pos_embds": False,
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
        "num_buckets": 2,
        "hash_seed": 0,
    },
    "longt5": {"decoder_start_token_id": 0},
    "switch_transformers": {"decoder_start_token_id": 0},
    "t5": {"decoder_start_token_id": 0},
    "xlstm": {"qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "attention_hidden_size": 2 * HIDDEN,
        "attention_head_dim": 2 * HEAD_DIM,
        "num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
    },
    "zamba2": {
        "n_mamba_heads": 2 * HEADS,
        "attention_hidden_size": 2 * HIDDEN,
        "attention_head_dim": 2 * HEAD_DIM,
        "num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
    },
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip


# Class -> the reason for which it is not trained.
LEFT_OUT = {
    "EncoderDecoderModel": "it is made of two other models",
    "Gemma3nForConditionalGeneration": "it needs timm",
    "Gemma4AssistantForCausalLM": "it drafts for another model, from that one's states",
    "Gemma4UnifiedAssistantForCausalLM": "it drafts for another model, from that one's states",
    "MusicgenForCausalLM": "it is trained on codes of sound",
    "MusicgenMelodyForCausalLM": "it is trained on codes of sound",
    "Nemotron3_5TranscribeForConditionalGeneration": "it cannot be made small by names alone",
    "VibeVoiceAsrForConditionalGeneration": "it cannot be made small by names alone",
    "VoxtralRealtimeForConditionalGeneration": "it takes a sound a token",
}
TOKENS = (2, 16)
# The padding at the end of the second row of a batch.
PADDED = 5


def text_batch() -> dict[str, Tensor]:
    """Draw a batch as a collator makes it: padded on the right, where labels are ignored."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, FIRST_SPECIAL_TOKEN, TOKENS, generator=generator)
    mask = torch.ones_like(tokens)
    mask[1, -PADDED:] = 0
    labels = tokens.masked_fill(mask == 0, -100)
    return {"input_ids": tokens * mask, "labels": labels, "attention_mask": mask}


def build(model_type: str, class_name: str, **changes: Any) -> nn.Module:
    """Build a model with random weights from the configuration of its type, or from the text part
    of that."""
    model_class = getattr(transformers, class_name)
    default = CONFIG_MAPPING[model_type]()
    if not isinstance(default, model_class.config_class):
        default = default.get_text_config(decoder=True)
    return model_class(small(default, **CHANGES.get(default.model_type, {}), **changes))


def models(types: dict[str, str]) -> list[Model]:
    """Return one model per class, with the name of the class."""
    by_class: dict[str, str] = {}
    for model_type, class_name in types.items():
        by_class.setdefault(class_name, model_type)
    return [
        Model(class_name, partial(build, model_type, class_name), text_batch)
        for class_name, model_type in by_class.items()
    ]


def whole_sequences() -> dict[str, Tensor]:
    """Draw a batch without padding and mask."""
    batch = text_batch()
    tokens = torch.where(batch["attention_mask"] == 0, 3, batch["input_ids"])
    return {"input_ids": tokens, "labels": tokens.clone()}


WITHOUT_PADDING = "LlamaForCausalLM, whole sequences"
MODELS: dict[str, Model] = {
    model.name: model
    for model in (
        *models(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
        # transformers lists it among image models, though it takes no images.
        *models({"mistral4": "Mistral4ForCausalLM"}),
        *models(modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES),
        Model(
            WITHOUT_PADDING,
            partial(build, "llama", "LlamaForCausalLM", num_key_value_heads=HEADS // 2),
            whole_sequences,
        ),
        # Last: these replace models above, which would be trained on text alone.
        *multimodal_models.MODELS,
    )
    if model.name not in LEFT_OUT
}
