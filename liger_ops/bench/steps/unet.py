"""A UNet like those of diffusion models, with random images."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .models import Batch, Made

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
