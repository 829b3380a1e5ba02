"""The models that measure_step.py times: untouched, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

LLAMA = {"use_cache": False, "tie_word_embeddings": True}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama-3.2-1b": lambda: transformers.LlamaConfig(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=8192,
        **LLAMA,
    ),
    "gpt-neox-1b": lambda: transformers.GPTNeoXConfig(
        vocab_size=50304,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=16,
        max_position_embeddings=2048,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cache=False,
    ),
    "tiny": lambda: transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        **LLAMA,
    ),
}
# Channels and pixels of a side.
UNETS = {"unet": ((320, 640, 1280), 128), "unet-tiny": ((32, 64), 16)}
CHANNELS_LAST = "-channels-last"
SHAPES = [*CONFIGS, *UNETS, *(name + CHANNELS_LAST for name in UNETS)]


@dataclass
class Step:
    """A model and its loss for a batch that does not change."""

    model: nn.Module
    loss: Callable[[Tensor], Tensor]
    batch: Tensor


def make(shape: str, device: str, batch_size: int, length: int, attention: str | None) -> Step:
    """A model in bfloat16, and a batch of `batch_size` texts of `length` tokens, or images."""
    torch.manual_seed(0)
    if shape not in CONFIGS:
        return _unet(shape, device, batch_size)
    config = CONFIGS[shape]()
    if attention is not None:
        config._attn_implementation = attention
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config).train()
    torch.set_default_dtype(torch.float32)
    tokens = torch.randint(0, config.vocab_size, (batch_size, length), device=device)
    return Step(model, lambda tokens: model(input_ids=tokens, labels=tokens).loss, tokens)


def _unet(shape: str, device: str, batch_size: int) -> Step:
    channels, side = UNETS[shape.removesuffix(CHANNELS_LAST)]
    with torch.device(device):
        model = UNet(channels).to(torch.bfloat16)
        images = torch.randn(batch_size, 4, side, side, dtype=torch.bfloat16)
    if shape.endswith(CHANNELS_LAST):
        model = model.to(memory_format=torch.channels_last)
        images = images.to(memory_format=torch.channels_last)
    return Step(model, lambda images: F.mse_loss(model(images).float(), images.float()), images)


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
    """Two blocks a level on the way down, and two with the level's own result on the way up."""

    def __init__(self, channels: tuple[int, ...]) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, channels[0], 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
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
        for one, two, halve in self.down:
            x = two(one(x))
            results.append(x)
            x = halve(x)
        x = self.middle(x)
        for (double, one, two), result in zip(self.up, reversed(results), strict=True):
            x = double(F.interpolate(x, scale_factor=2.0))
            x = two(one(torch.cat([x, result], 1)))
        return self.last(F.silu(self.norm(x)))
