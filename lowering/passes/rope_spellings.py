"""The ways in which models write rotary position embedding, as patterns of one rotated tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .pattern import Pattern


def turned_halves(x: Tensor) -> Tensor:
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def turned_back_halves(x: Tensor) -> Tensor:
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((x2, -x1), dim=-1)


def turned_neighbours(x: Tensor) -> Tensor:
    x1 = x[..., 0::2]
    x2 = x[..., 1::2]
    return torch.stack((-x2, x1), dim=-1).flatten(-2)


def llama(x: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    cos = cos.unsqueeze(heads)
    sin = sin.unsqueeze(heads)
    return (x * cos) + (turned_halves(x) * sin)


def nanochat(x: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    cos = cos.unsqueeze(heads)
    sin = sin.unsqueeze(heads)
    return (x * cos) + (turned_back_halves(x) * sin)


def phi3(x: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    cos = cos.unsqueeze(heads)
    sin = sin.unsqueeze(heads)
    rotated, passed = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    return torch.cat([(rotated * cos) + (turned_halves(rotated) * sin), passed], dim=-1)


def glm4(x: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    cos = cos.unsqueeze(heads)
    sin = sin.unsqueeze(heads)
    cos = cos[..., : cos.shape[-1] // 2].repeat_interleave(2, dim=-1)
    sin = sin[..., : sin.shape[-1] // 2].repeat_interleave(2, dim=-1)
    rotated, passed = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    rotated = (rotated * cos) + (turned_neighbours(rotated) * sin)
    return torch.cat([rotated, passed], dim=-1)


def glm(x: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    cos = cos.unsqueeze(heads)
    sin = sin.unsqueeze(heads)
    cos = cos[..., : cos.shape[-1] // 2].repeat_interleave(2, dim=-1)
    sin = sin[..., : sin.shape[-1] // 2].repeat_interleave(2, dim=-1)
    return (x * cos) + (turned_neighbours(x) * sin)


def cohere(x: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    cos = cos.unsqueeze(heads)
    sin = sin.unsqueeze(heads)
    return (x * cos) + (turned_neighbours(x) * sin)


def glm4v(x: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    cos = cos.unsqueeze(heads)
    sin = sin.unsqueeze(heads)
    rotated, passed = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    return torch.cat([(rotated * cos) + (turned_neighbours(rotated) * sin), passed], dim=-1)


def gptj(x: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    cos = cos.unsqueeze(heads).repeat_interleave(2, dim=-1)
    sin = sin.unsqueeze(heads).repeat_interleave(2, dim=-1)
    return (x * cos) + (turned_neighbours(x) * sin)


def gptj_partly(x: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    cos = cos.unsqueeze(heads).repeat_interleave(2, dim=-1)
    sin = sin.unsqueeze(heads).repeat_interleave(2, dim=-1)
    rotated, passed = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    return torch.cat([(rotated * cos) + (turned_neighbours(rotated) * sin), passed], dim=-1)


def gpt_oss(x: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    cos = cos.unsqueeze(heads)
    sin = sin.unsqueeze(heads)
    first, second = torch.chunk(x, 2, dim=-1)[0], torch.chunk(x, 2, dim=-1)[1]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def privacy_filter(x: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    cos = cos.unsqueeze(heads)
    sin = sin.unsqueeze(heads)
    first, second = x[..., 0::2], x[..., 1::2]
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.stack(turned, dim=-1).flatten(-2)


def deepseek(x: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    cos = cos.unsqueeze(heads)
    sin = sin.unsqueeze(heads)
    first, second = x[..., 0::2], x[..., 1::2]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def deepseek_by_views(
    x: Tensor, cos: Tensor, sin: Tensor, heads: int, pairs: list[int], whole: list[int]
) -> Tensor:
    cos = cos.unsqueeze(heads)
    sin = sin.unsqueeze(heads)
    x = x.view(pairs).transpose(4, 3).reshape(whole)
    return (x * cos) + (turned_halves(x) * sin)


def deepseek_by_slices(x: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    cos = cos.unsqueeze(heads)
    sin = sin.unsqueeze(heads)
    x = torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1)
    return (x * cos) + (turned_halves(x) * sin)


def diffusers(x: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    cos = cos.unsqueeze(0).unsqueeze(heads)
    sin = sin.unsqueeze(0).unsqueeze(heads)
    return (x * cos) + (turned_neighbours(x) * sin)


def diffusers_of_halves(x: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    cos = cos.unsqueeze(0).unsqueeze(heads)
    sin = sin.unsqueeze(0).unsqueeze(heads)
    return (x * cos) + (turned_halves(x) * sin)


def pe_audio(
    x: Tensor, cos: Tensor, sin: Tensor, heads: int, columns: list[int], matrices: list[int]
) -> Tensor:
    rotations = torch.stack((cos, -sin, sin, cos), dim=-1).view(matrices).unsqueeze(heads)
    return (x.reshape(columns) * rotations).sum(-1).flatten(3)


def llama4(x: Tensor, cos: Tensor, heads: int, pairs: list[int]) -> Tensor:
    numbers = torch.view_as_complex(x.float().reshape(pairs))
    return torch.view_as_real(numbers * cos.unsqueeze(heads)).flatten(3).type_as(x)


def llama4_vision(x: Tensor, cos: Tensor, pairs: list[int]) -> Tensor:
    numbers = torch.view_as_complex(x.float().reshape(pairs))
    return torch.view_as_real(numbers * cos).flatten(3).type_as(x)


def flux(x: Tensor, cos: Tensor, columns: list[int], whole: list[int]) -> Tensor:
    numbers = x.float().reshape(columns)
    products = cos[..., 0] * numbers[..., 0] + cos[..., 1] * numbers[..., 1]
    return products.reshape(whole).type_as(x)


# The shapes that the parameters of these names must have, for x and cos of given shapes. A view by
# another shape would regroup the elements.
VIEWS: dict[str, Callable[[torch.Size, torch.Size], tuple[Any, ...]]] = {
    "pairs": lambda x, cos: (*x[:-1], x[-1] // 2, 2),
    "columns": lambda x, cos: (*x[:-1], x[-1] // 2, 1, 2),
    "whole": lambda x, cos: x,
    "matrices": lambda x, cos: (*cos, 2, 2),
}


@dataclass(frozen=True)
class Form:
    """How a spelling pairs elements, and the layout of its tables."""

    interleaved: bool = False
    per_pair: bool = False
    # Whether the spelling reads only the first half of its tables.
    half_tables: bool = False
    # Whether it rotates in the other direction, by -sin.
    back: bool = False
    # How many dimensions its tables have after the elements of a row when `heads` is added.
    inner: int = 0
    # Whether it writes interleaved pairs in halves.
    deinterleave: bool = False


def _pattern(function: Callable[..., Tensor], elements: int, **sizes: list[int]) -> Pattern:
    tables = {"cos": (1, 3, elements), "sin": (1, 3, elements)}
    return Pattern(function, any_casts=True, x=(2, 5, 3, 8), **tables, heads=1, **sizes)


def _of_positions(function: Callable[..., Tensor]) -> Pattern:
    """A pattern of tables that have no dimension but positions and elements."""
    return Pattern(function, any_casts=True, x=(2, 5, 3, 8), cos=(3, 8), sin=(3, 8), heads=1)


_DEEPSEEK_BY_VIEWS = _pattern(deepseek_by_views, 8, pairs=[2, 5, 3, 4, 2], whole=[2, 5, 3, 8])
_PE_AUDIO = _pattern(pe_audio, 4, columns=[2, 5, 3, 4, 1, 2], matrices=[1, 3, 4, 2, 2])
_LLAMA4 = Pattern(
    llama4,
    any_casts=True,
    x=(2, 3, 5, 8),
    cos=torch.empty(1, 3, 4, dtype=torch.complex64, device="meta"),
    heads=2,
    pairs=[2, 3, 5, 4, 2],
)
# Tables with a dimension of the heads, of size 1.
_LLAMA4_VISION = Pattern(
    llama4_vision,
    any_casts=True,
    x=(2, 3, 5, 8),
    cos=torch.empty(1, 3, 1, 4, dtype=torch.complex64, device="meta"),
    pairs=[2, 3, 5, 4, 2],
)
_FLUX = Pattern(
    flux,
    any_casts=True,
    x=(2, 5, 3, 8),
    cos=(1, 1, 3, 4, 2, 2),
    columns=[2, 5, 3, 4, 1, 2],
    whole=[2, 5, 3, 8],
)
SPELLINGS = [
    # These two end with the third.
    (_DEEPSEEK_BY_VIEWS, Form(interleaved=True, deinterleave=True)),
    (_pattern(deepseek_by_slices, 8), Form(interleaved=True, deinterleave=True)),
    (_pattern(llama, 8), Form()),
    (_pattern(phi3, 4), Form()),
    (_pattern(glm4, 4), Form(interleaved=True, per_pair=True, half_tables=True)),
    (_pattern(glm, 8), Form(interleaved=True, per_pair=True, half_tables=True)),
    (_pattern(glm4v, 4), Form(interleaved=True)),
    (_pattern(gptj_partly, 2), Form(interleaved=True, per_pair=True)),
    (_pattern(gptj, 4), Form(interleaved=True, per_pair=True)),
    (_pattern(nanochat, 8), Form(back=True)),
    (_pattern(cohere, 8), Form(interleaved=True)),
    (_pattern(gpt_oss, 4), Form(per_pair=True)),
    (_pattern(privacy_filter, 4), Form(interleaved=True, per_pair=True)),
    (_pattern(deepseek, 4), Form(interleaved=True, per_pair=True, deinterleave=True)),
    (_of_positions(diffusers), Form(interleaved=True)),
    (_of_positions(diffusers_of_halves), Form()),
    (_PE_AUDIO, Form(interleaved=True, per_pair=True, inner=2)),
    (_LLAMA4, Form()),
    (_LLAMA4_VISION, Form()),
    (_FLUX, Form(inner=2)),
]
