"""Heads, angles and tables of a small model, for rope."""

from __future__ import annotations

import torch

from op_under_test import laid_out


def rotary_angles() -> torch.Tensor:
    """Return the angles of 2 sequences of 5 positions, for 8 pairs."""
    positions = torch.arange(5.0) + torch.tensor([[0.0], [7.0]])
    return positions[..., None] / 10000 ** (torch.arange(8) / 8)


def rotary_tables(dtype: torch.dtype, interleaved: bool = False) -> tuple[torch.Tensor, ...]:
    angles = rotary_angles()
    angles = angles.repeat_interleave(2, -1) if interleaved else torch.cat((angles, angles), -1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def heads(dtype: torch.dtype, D: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(
        laid_out(torch.randn(2, n, 5, D, generator=generator).to(dtype), "model") for n in (4, 2)
    )
