"""Small transformers models for images or sound, each with a batch of it and text."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from small_configs import FIRST_SPECIAL_TOKEN, HIDDEN, IMAGE, PATCH, small
from training_steps import Model

ROWS = 2
TEXT_TOKENS = 10
PADDED = 3
PATCHES = (IMAGE // PATCH) ** 2
# The number of tokens if four neighbouring patches are merged.
MERGED = PATCHES // 4
FRAMES = 2
BINS = 16
FRAMES_OF_SOUND = 32
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}

Inputs = Callable[[Any], dict[str, Any]]


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


def images(*shape: int) -> Tensor:
    return random(*(shape or (ROWS,)), 3, IMAGE, IMAGE)


def text(special: int | None = None, count: int = 0) -> dict[str, Tensor]:
    """Draw tokens, `count` of them for an image or a sound; the second row is padded."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, FIRST_SPECIAL_TOKEN, (ROWS, TEXT_TOKENS + count), generator=generator)
    mask = torch.ones_like(tokens)
    mask[1, -PADDED:] = 0
    labels = tokens.masked_fill(mask == 0, -100)
    if special is not None:
        tokens[:, 1 : 1 + count] = special
        labels[:, 1 : 1 + count] = -100
    return {"input_ids": tokens * mask, "labels": labels, "attention_mask": mask}


def build(model_type: str, class_name: str, changes: dict[str, Any]) -> nn.Module:
    return getattr(transformers, class_name)(small(model_type, **changes))


def model(class_name: str, model_type: str, inputs: Inputs, **changes: Any) -> Model:
    """Make a model; `inputs` makes a batch for a configuration."""
    return Model(
        class_name,
        partial(build, model_type, class_name, changes),
        lambda: inputs(small(model_type, **changes)),
    )


def special_token(config: Any) -> int | None:
    """Return the token that stands for an image or a sound, None without one."""
    names = ("image_token_id", "image_token_index", "audio_token_id", "audio_token_index")
    return next((getattr(config, name) for name in names if hasattr(config, name)), None)


def seeing(
    class_name: str,
    model_type: str,
    count: int,
    pixels: Callable[[Tensor], dict[str, Tensor]] | None = None,
    **changes: Any,
) -> Model:
    """Make a language model whose text has `count` tokens for an image.

    `pixels` makes the image inputs from the mask of these tokens.
    """

    def inputs(config: Any) -> dict[str, Any]:
        special = special_token(config)
        batch = text(special, count)
        kinds = (batch["input_ids"] == special).long()
        return {**batch, **(pixels(kinds) if pixels else {"pixel_values": images()})}

    return model(class_name, model_type, inputs, **changes)


def hearing(
    class_name: str, model_type: str, count: int, sound: dict[str, Tensor], **changes: Any
) -> Model:
    """Make a language model whose text has `count` tokens for a sound."""
    return model(
        class_name,
        model_type,
        lambda config: {**text(special_token(config), count), **sound},
        **changes,
    )


def patches(kinds: Tensor) -> dict[str, Tensor]:
    """Make image inputs as Qwen-VL takes them: one row per patch, with two frames."""
    return {
        "pixel_values": random(ROWS * PATCHES, FRAMES * 3 * PATCH**2),
        "image_grid_thw": torch.tensor([[1, IMAGE // PATCH, IMAGE // PATCH]] * ROWS),
        "mm_token_type_ids": kinds,
    }


def several(kinds: Tensor) -> dict[str, Tensor]:
    """Make one image per row, in a dimension of its own."""
    return {"pixel_values": images(ROWS, 1)}


def typed(kinds: Tensor) -> dict[str, Tensor]:
    return {"pixel_values": images(), "token_type_ids": kinds}


def sized(kinds: Tensor) -> dict[str, Tensor]:
    return {"pixel_values": images(), "image_sizes": torch.tensor([[IMAGE, IMAGE]] * ROWS)}


def tiled(config: Any) -> dict[str, Any]:
    batch = text()
    return {
        **batch,
        "pixel_values": images(ROWS, 1, 1),
        "aspect_ratio_ids": torch.ones(ROWS, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.ones(ROWS, 1, 1, dtype=torch.long),
        "cross_attention_mask": torch.ones(*batch["input_ids"].shape, 1, 1, dtype=torch.long),
    }


def captioned(config: Any) -> dict[str, Any]:
    return {**text(), "pixel_values": images()}


def contrasted(config: Any) -> dict[str, Any]:
    return {**captioned(config), "return_loss": True}


def waves(config: Any) -> dict[str, Tensor]:
    return {"input_values": random(ROWS, 400), "labels": torch.tensor([[3, 4, 5], [6, 7, -100]])}


WAVES = {
    "conv_dim": [32, 32],
    "conv_stride": [5, 2],
    "conv_kernel": [10, 3],
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "apply_spec_augment": False,
}

MODELS = [
    seeing("LlavaForConditionalGeneration", "llava", PATCHES),
    seeing(
        "Qwen2VLForConditionalGeneration", "qwen2_vl", MERGED, patches,
        text_config={"rope_parameters": MROPE},
    ),
    seeing(
        "Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl", MERGED, patches,
        text_config={"rope_parameters": MROPE}, vision_config={"fullatt_block_indexes": [1]},
    ),
    seeing(
        "Qwen3VLForConditionalGeneration", "qwen3_vl", MERGED, patches,
        text_config={"rope_parameters": MROPE}, vision_config={"deepstack_visual_indexes": [0]},
    ),
    seeing("Gemma3ForConditionalGeneration", "gemma3", MERGED, typed),
    seeing(
        "Idefics2ForConditionalGeneration",
        "idefics2",
        4,
        several,
        perceiver_config={
            "resampler_depth": 1, "resampler_n_latents": 4, "resampler_head_dim": 16,
            "num_key_value_heads": 2,
        },
    ),
    seeing("Idefics3ForConditionalGeneration", "idefics3", MERGED, several),
    seeing("SmolVLMForConditionalGeneration", "smolvlm", MERGED, several),
    seeing("PaliGemmaForConditionalGeneration", "paligemma", PATCHES, typed),
    seeing("InternVLForConditionalGeneration", "internvl", MERGED),
    model(
        "MllamaForConditionalGeneration",
        "mllama",
        tiled,
        text_config={"cross_attention_layers": [1]},
        vision_config={
            "num_global_layers": 1,
            "max_num_tiles": 1,
            "supported_aspect_ratios": [[1, 1]],
            "intermediate_layers_indices": [0, 1],
            "vision_output_dim": 3 * HIDDEN,
        },
    ),
    seeing(
        "Llama4ForConditionalGeneration", "llama4", MERGED,
        vision_config={"vision_output_dim": HIDDEN, "intermediate_size": 4 * HIDDEN},
        text_config={"moe_layers": [1], "no_rope_layers": [1, 0]},
    ),
    seeing("AyaVisionForConditionalGeneration", "aya_vision", MERGED),
    seeing("Mistral3ForConditionalGeneration", "mistral3", MERGED, sized),
    seeing("Blip2ForConditionalGeneration", "blip-2", 2, image_token_index=90),
    seeing("VipLlavaForConditionalGeneration", "vipllava", PATCHES, vision_feature_layers=[-1, -2]),
    model("GitForCausalLM", "git", captioned),
    model("CLIPModel", "clip", contrasted),
    model("SiglipModel", "siglip", contrasted),
    hearing(
        "Qwen2AudioForConditionalGeneration",
        "qwen2_audio",
        FRAMES_OF_SOUND // 4,
        {
            "input_features": random(ROWS, BINS, FRAMES_OF_SOUND),
            "feature_attention_mask": torch.ones(ROWS, FRAMES_OF_SOUND, dtype=torch.long),
        },
        audio_config={"max_source_positions": FRAMES_OF_SOUND // 2},
    ),
    hearing(
        "VoxtralForConditionalGeneration",
        "voxtral",
        FRAMES_OF_SOUND // 8,
        {"input_features": random(ROWS, BINS, FRAMES_OF_SOUND)},
        audio_config={
            "max_source_positions": FRAMES_OF_SOUND // 2,
            "intermediate_size": 4 * HIDDEN,
        },
        audio_token_id=90,
    ),
    hearing(
        "GraniteSpeechForConditionalGeneration",
        "granite_speech",
        FRAMES_OF_SOUND // 4,
        {
            "input_features": random(ROWS, FRAMES_OF_SOUND, BINS),
            "input_features_mask": torch.ones(ROWS, FRAMES_OF_SOUND // 4, dtype=torch.bool),
        },
        encoder_config={
            "input_dim": BINS, "context_size": 8, "output_dim": 8, "conv_kernel_size": 3,
            "max_pos_emb": 32, "feedforward_mult": 2,
        },
        # Two queries per window of eight frames.
        window_size=8,
        downsample_rate=4,
        has_lora_adapter=False,
    ),
    model(
        "WhisperForConditionalGeneration",
        "whisper",
        lambda config: {
            "input_features": random(ROWS, BINS, FRAMES_OF_SOUND),
            "labels": text()["labels"],
        },
        max_source_positions=FRAMES_OF_SOUND // 2,
    ),
    model(
        "MoonshineForConditionalGeneration",
        "moonshine",
        lambda config: {"input_values": random(ROWS, 3000), "labels": text()["labels"]},
        pad_token_id=0,
    ),
    model("Wav2Vec2ForCTC", "wav2vec2", waves, **WAVES),
    model("HubertForCTC", "hubert", waves, **WAVES),
    model("WavLMForCTC", "wavlm", waves, **WAVES),
]  # fmt: skip
