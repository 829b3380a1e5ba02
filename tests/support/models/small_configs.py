"""Make any transformers configuration small, by the names of its fields."""

from __future__ import annotations

from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig

VOCABULARY = 96
HIDDEN = 64
HEADS = 4
HEAD_DIM = HIDDEN // HEADS
LAYERS = 2
EXPERTS = 4
INTERMEDIATE = 96
LONGEST = 128
IMAGE = 16
PATCH = 4
# Shorter than a sequence, so that a sliding window mask is not a causal mask.
WINDOW = 8
# Models have special tokens, such as those for images or for their start: each gets an id of its
# own from here on. Text uses smaller ids.
FIRST_SPECIAL_TOKEN = 64

SIZES = [
    (
        VOCABULARY,
        """vocab_size vocab_size_per_layer_input decoder_vocab_size unpadded_vocab_size
        audio_vocab_size pronunciation_vocab_size shape_vocab_size""",
    ),
    (
        HIDDEN,
        """hidden_size d_model n_embd embed_dim dim n_embed emb_dim word_embed_proj_dim
        embedding_size hidden_size_global backbone_hidden_size embedding_dim lru_width
        attention_hidden_size out_hidden_size input_embedding_size output_embedding_size
        text_embed_dim projection_dim projector_hidden_size pronunciation_embed_dim
        shape_embed_dim projection_size encoder_hidden_size image_text_hidden_size hidden_dim
        projector_input_dim projector_output_dim""",
    ),
    (
        INTERMEDIATE,
        """intermediate_size encoder_ffn_dim decoder_ffn_dim ffn_dim d_ff dff dim_ff ffn_hidden_size
        d_inner n_inner intermediate_size_mlp shared_intermediate_size feed_forward_size mlp_dim
        dense_intermediate_size""",
    ),
    (
        LAYERS,
        """num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers
        num_decoder_layers num_encoder_layers depth num_blocks num_layers_per_stack
        conf_num_hidden_layers encoder_num_hidden_layers decoder_num_hidden_layers
        num_query_tokens""",
    ),
    (
        HEADS,
        """num_attention_heads n_head n_heads num_heads encoder_attention_heads attention_heads
        decoder_attention_heads num_decoder_attention_heads num_encoder_attention_heads
        linear_num_value_heads linear_num_heads swa_num_attention_heads conf_num_attention_heads
        num_kv_heads index_n_heads encoder_num_attention_heads decoder_num_attention_heads
        encoder_num_key_value_heads decoder_num_key_value_heads resampler_n_heads""",
    ),
    (
        HEADS // 2,
        """linear_num_key_heads swa_num_key_value_heads n_mamba_heads n_groups mamba_n_groups
        o_groups zero_expert_num""",
    ),
    (
        HEAD_DIM,
        """head_dim d_kv kv_channels dim_head d_head linear_key_head_dim linear_value_head_dim
        linear_head_dim attention_head_dim attention_head_size index_head_dim global_head_dim
        swa_head_dim swa_v_head_dim v_head_dim qk_nope_head_dim kv_lora_rank mamba_d_head
        mamba_head_dim mamba_headdim mamba_d_state state_size ssm_state_size""",
    ),
    (
        32,
        """moe_intermediate_size shared_expert_intermediate_size shared_experts_intermediate_size
        expert_ffn_hidden_size moe_shared_expert_intermediate_size hidden_size_per_layer_input
        router_hidden_size q_lora_rank o_lora_rank adapter_rank time_step_rank mamba_dt_rank""",
    ),
    # Every token goes to every expert: a choice of experts could flip with the last bit of a
    # router's logit, and two runs with different rounding could not be compared.
    (
        EXPERTS,
        """num_experts n_routed_experts num_local_experts moe_num_experts
        num_experts_per_tok num_experts_per_token moe_topk moe_top_k moe_k""",
    ),
    (
        WINDOW,
        """sliding_window sliding_window_size attention_window_size window_size attention_chunk_size
        local_attention chunk_size mamba_chunk_size qk_rope_head_dim rotary_dim laurel_rank""",
    ),
    (
        LONGEST,
        """max_position_embeddings n_positions n_ctx max_seq_len context_length model_max_length
        max_source_positions max_target_positions index_topk""",
    ),
    (HEAD_DIM + WINDOW, "qk_head_dim"),
    # Small images: sixteen patches, or four if four are merged.
    (16, "num_mel_bins num_position_embeddings classifier_proj_size"),
    (4, "mm_tokens_per_image"),
    # Mamba 2 uses twice the hidden size.
    (2 * HEADS, "mamba_n_heads mamba_num_heads"),
    (2 * HIDDEN, "mamba_d_ssm"),
    (1, "n_group topk_group num_expert_group first_k_dense_replace n_shared_experts bos_token_id"),
    (1, "decoder_start_token_id moe_layer_start_index"),
    (2, "eos_token_id"),
    (0, "num_nextn_predict_layers pad_token_id"),
]
BY_NAME = {name: size for size, names in SIZES for name in names.split()}
# Fields that list the kind of each layer.
LAYER_LISTS = ("layer_types", "mlp_layer_types", "layers_block_type", "indexer_types")


def small(config: str | PretrainedConfig, **changes: Any) -> PretrainedConfig:
    """Make the default configuration of a model type, or the given one, small.

    `changes` are applied last; for a sub-configuration, the value is a dictionary.
    """
    default = CONFIG_MAPPING[config]() if isinstance(config, str) else config
    return type(default)(**_arguments(default, changes))


def _arguments(config: PretrainedConfig, changes: dict[str, Any]) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    special = FIRST_SPECIAL_TOKEN
    for name, default in vars(config).items():
        if isinstance(default, PretrainedConfig):
            arguments[name] = {
                "model_type": default.model_type,
                **_arguments(default, changes.get(name, {})),
            }
        elif name.startswith("_") or isinstance(default, (str, bool)):
            continue
        elif default is None:
            if name in ("head_dim", "num_key_value_heads"):
                arguments[name] = HEAD_DIM if name == "head_dim" else HEADS // 2
        elif name == "head_dim" and default == getattr(config, "qk_rope_head_dim", None):
            arguments[name] = BY_NAME["qk_rope_head_dim"]
        elif name in BY_NAME:
            arguments[name] = BY_NAME[name]
        elif name in ("num_key_value_heads", "num_key_value_heads_per_layer"):
            grouped = default < vars(config).get("num_attention_heads", default)
            arguments[name] = HEADS // 2 if grouped else HEADS
        elif name in ("image_size", "patch_size"):
            size = IMAGE if name == "image_size" else PATCH
            arguments[name] = [size] * len(default) if isinstance(default, (list, tuple)) else size
        elif ("drop" in name or "jitter" in name) and isinstance(default, float):
            arguments[name] = 0.0
        elif name.endswith(("_token_id", "_token_index")) and isinstance(default, int):
            arguments[name], special = special, special + 1
        elif name == "rope_parameters":
            arguments[name] = _rope(default)
    arguments |= _layers(config)
    return arguments | {
        name: change
        for name, change in changes.items()
        if not isinstance(getattr(config, name, None), PretrainedConfig)
    }


def _layers(config: PretrainedConfig) -> dict[str, Any]:
    """Return fields for one layer of each kind, and at least two layers in all."""
    lists = {name: vars(config).get(name) for name in LAYER_LISTS}
    lists = {name: kinds for name, kinds in lists.items() if kinds}
    if not lists:
        return {}
    layers = list(zip(*lists.values(), strict=False))
    kinds = list(dict.fromkeys(layers))
    kinds = kinds if len(kinds) >= LAYERS else layers[:LAYERS]
    short = {name: [kind[i] for kind in kinds] for i, name in enumerate(lists)}
    return {"num_hidden_layers": len(kinds), **short}


def _rope(parameters: dict[str, Any]) -> dict[str, Any]:
    """Remove the scaling for longer sequences than in training, whose factors are per dimension."""
    if any(isinstance(part, dict) for part in parameters.values()):
        return {name: _rope(part) if part else part for name, part in parameters.items()}
    kept = {
        name: parameters[name]
        for name in (
            *("rope_theta", "partial_rotary_factor", "mrope_interleaved"),
            *("llama_4_scaling_beta", "original_max_position_embeddings"),
        )
        if name in parameters
    }
    sections = {"mrope_section": [2, 3, 3]} if "mrope_section" in parameters else {}
    kind = "axial" if parameters.get("rope_type") == "axial" else "default"
    return {"rope_type": kind, **kept, **sections}
