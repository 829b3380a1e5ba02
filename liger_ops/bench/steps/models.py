"""Language models and batches whose training steps are timed, in the shapes of real models, and a
UNet like those of diffusion models, with random images.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("vocab_size", "max_position_embeddings", "num_key_value_heads"),
)
WIDE = {"head_dim": 128}
EXPERTS = {"num_local_experts": 16, "num_experts_per_tok": 4}
# The class of the configuration, its SIZES and other options, and the batch's rows and tokens.
TEXT: dict[str, tuple[str, tuple[int, ...], dict[str, Any], tuple[int, int]]] = {
    "llama-3.2-1b": (
        "Llama",
        (2048, 8192, 16, 32, 128256, 8192, 8),
        {"tie_word_embeddings": True},
        (8, 2048),
    ),
    "llama-8b-8-layers": ("Llama", (4096, 14336, 8, 32, 128256, 8192, 8), {}, (1, 8192)),
    "gpt-neox-1b": (
        "GPTNeoX",
        (2048, 8192, 16, 16, 50304, 2048),
        {"hidden_dropout": 0.0, "attention_dropout": 0.0},
        (8, 2048),
    ),
    "qwen3": ("Qwen3", (2048, 6144, 14, 16, 32768, 8192, 8), WIDE, (4, 4096)),
    "mistral": (
        "Mistral",
        (4096, 14336, 4, 32, 32768, 8192, 8),
        {**WIDE, "sliding_window": 4096},
        (2, 8192),
    ),
    "gemma3": (
        "Gemma3Text",
        (1152, 6912, 12, 4, 262144, 8192, 1),
        {"head_dim": 256, "sliding_window": 512},
        (4, 4096),
    ),
    "gemma2": (
        "Gemma2",
        (2304, 9216, 6, 8, 256000, 8192, 4),
        {"head_dim": 256, "sliding_window": 4096},
        (2, 4096),
    ),
    "llama4": (
        "Llama4Text",
        (2048, 2048, 4, 16, 202048, 8192, 8),
        {
            **WIDE,
            "intermediate_size_mlp": 4096,
            "num_local_experts": 4,
            "attention_chunk_size": 2048,
        },
        (2, 8192),
    ),
    "gpt-oss": (
        "GptOss",
        (2880, 2880, 4, 64, 201088, 8192, 8),
        {**EXPERTS, "head_dim": 64, "sliding_window": 128},
        (4, 2048),
    ),
    "qwen3-moe": (
        "Qwen3Moe",
        (2048, 6144, 6, 32, 151936, 8192, 4),
        {**WIDE, "num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
        (4, 2048),
    ),
    "deepseek-v3": (
        "DeepseekV3",
        (2048, 6144, 4, 16, 129280, 8192, 16),
        {"n_routed_experts": 32, "moe_intermediate_size": 1024, "first_k_dense_replace": 1},
        (4, 2048),
    ),
    "tiny": ("Llama", (64, 128, 2, 4, 256, 256, 2), {"tie_word_embeddings": True}, (2, 32)),
}
BATCHES = ("none", "ones", "padded", "packed")
Batch = dict[str, Tensor]
Made = tuple[nn.Module, Callable[[Batch], Tensor], Batch]


def text_model(
    shape: str, kind: str, size: tuple[int, int], device: str, attention: str | None,
    layers: int | None = None, autocast: bool = False,
) -> Made:  # fmt: skip
    """Return a model in bfloat16, or in float32 under autocast, with its loss and a batch."""
    others = {} if layers is None else {"num_hidden_layers": layers}
    config = config_of(shape, use_cache=False, **others)
    torch.set_default_dtype(torch.float32 if autocast else torch.bfloat16)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(
            config, **({} if attention is None else {"attn_implementation": attention})
        ).train()
    torch.set_default_dtype(torch.float32)

    def loss_of(batch: Batch) -> Tensor:
        with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=autocast):
            return model(**batch).loss

    return model, loss_of, text_batch(kind, size, config.vocab_size, device)


def config_of(shape: str, **others: Any) -> Any:
    """Return the transformers configuration of a shape of TEXT, with further options."""
    name, sizes, options, _ = TEXT[shape]
    sized = dict(zip(SIZES, sizes, strict=False))
    return getattr(transformers, f"{name}Config")(**{**sized, **options, **others})


def text_batch(kind: str, size: tuple[int, int], vocabulary: int, device: str) -> Batch:
    """Return random tokens with no mask, a mask of ones, a quarter of padding, or 4 documents a
    row."""
    rows, length = size
    tokens = torch.randint(0, vocabulary, size, device=device)
    if kind == "none":
        return {"input_ids": tokens, "labels": tokens}
    if kind == "packed":
        document = torch.arange(length, device=device) % -(-length // 4)
        positions = document.expand(rows, -1).contiguous()
        return {"input_ids": tokens, "labels": tokens, "position_ids": positions}
    mask = torch.ones_like(tokens)
    if kind == "padded":
        # The padding grows evenly from none in the first row to half of the last: a quarter of all.
        for row in range(rows):
            mask[row, length - length * row // max(2 * (rows - 1), 1) :] = 0
    labels = tokens.masked_fill(mask == 0, -100)
    return {"input_ids": tokens, "labels": labels, "attention_mask": mask}


# Shape -> the channels of each level, and the side of the images in pixels.
UNETS = {"unet": ((320, 640, 1280), 128), "unet-tiny": ((32,), 8)}
CHANNELS_LAST = "-channels-last"


def unet(shape: str, rows: int, device: str) -> Made:
    channels, side = UNETS[shape.removesuffix(CHANNELS_LAST)]
    layout = torch.channels_last if shape.endswith(CHANNELS_LAST) else torch.contiguous_format
    with torch.device(device):
        model: Any = UNet(channels).to(torch.bfloat16)
        images = torch.randn(rows, 4, side, side, dtype=torch.bfloat16)
    model, images = (value.to(memory_format=layout) for value in (model, images))

    def loss_of(batch: Batch) -> Tensor:
        return F.mse_loss(model(batch["images"]).float(), batch["images"].float())

    return model, loss_of, {"images": images}


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(32, inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm2 = nn.GroupNorm(32, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.conv1(F.silu(self.norm1(x)))
        hidden = self.conv2(F.silu(self.norm2(hidden)))
        return self.skip(x) + hidden


class UNet(nn.Module):
    """Two blocks per level going down, and two on each level's concatenated result going up."""

    def __init__(self, channels: tuple[int, ...]) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, channels[0], 3, padding=1)
        self.down: Any = nn.ModuleList()
        self.up: Any = nn.ModuleList()
        width = channels[0]
        for size in channels:
            halve = nn.Conv2d(size, size, 3, stride=2, padding=1)
            self.down.append(nn.ModuleList([Block(width, size), Block(size, size), halve]))
            width = size
        self.middle = nn.Sequential(Block(width, width), Block(width, width))
        for size in reversed(channels):
            double = nn.Conv2d(width, size, 3, padding=1)
            self.up.append(nn.ModuleList([double, Block(2 * size, size), Block(size, size)]))
            width = size
        self.norm = nn.GroupNorm(32, width)
        self.last = nn.Conv2d(width, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        results = []
        for block1, block2, halve in self.down:
            x = block2(block1(x))
            results.append(x)
            x = halve(x)
        x = self.middle(x)
        for (double, block1, block2), result in zip(self.up, reversed(results), strict=True):
            x = double(F.interpolate(x, scale_factor=2.0))
            x = block2(block1(torch.cat([x, result], 1)))
        return self.last(F.silu(self.norm(x)))
