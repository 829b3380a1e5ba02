"""Functions that are nearly rope: `fuse` leaves them, and says why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import rotate_half

from liger_ops import fuse
from liger_ops.fusion import FuseReport
from rotating_modules import Rotating, interleaved, llama, set_rotate


def other_pairs(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Pairs each element with the one at the opposite end."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + q.flip(-1) * sin, k * cos + k.flip(-1) * sin


def scaled(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return llama(q, k, 1.01 * cos, sin)


def interleaved_first(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of DeepSeek's: halves become neighbours, which are rotated as halves are."""
    q, k = (torch.stack(x.chunk(2, -1), -1).flatten(-2) for x in (q, k))
    return llama(q, k, cos, sin)


def detached(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    y, z = llama(q, k, cos, sin)
    return y, z + k.detach() - k


def rounded(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    if q.dtype is torch.float32:
        return llama(q, k, cos, sin)
    q, k = (x.to(torch.float8_e4m3fn).to(x.dtype) for x in (q, k))
    return llama(q, k, cos, sin)


def rounded_within(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    q, k = (x * cos + rotate_half(x).to(torch.float8_e4m3fn).to(x.dtype) * sin for x in (q, k))
    return q, k


def rounded_last(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    y, z = llama(q, k, cos, sin)
    return y.to(torch.int32).to(y.dtype), z


def rounded_in_float32(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    y, z = llama(q, k, cos, sin)
    return y.to(torch.bfloat16).to(y.dtype), z.to(torch.bfloat16).to(z.dtype)


def of_detached(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return llama(q.detach(), k, cos, sin)


def written_in_place(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    y, z = llama(q, k, cos, sin)
    cos.mul_(2)
    return y, z


def of_three(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, None]:
    return (*llama(q, k, cos, sin), None)


def exchanged(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """The dimensions of its results are the queries' in another order, seen as the old order."""
    y, z = llama(q, k, cos, sin)
    return y.transpose(1, 2).reshape(q.shape), z


def half_of_cosines(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Its cosines are the first half of its table, and its sines the second half."""
    R = cos.shape[-1]
    cos, sin = (table.unsqueeze(1) for table in (cos[..., : R // 2], sin[..., R // 2 :]))

    def rotated(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    return rotated(q), rotated(k)


def without_gradient(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        q, k = llama(q, k, cos, sin)
    return q, k


def other_dtype(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    y, z = llama(q, k, cos, sin)
    return y.float(), z.float()


def other_in_float16(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return (interleaved if q.dtype is torch.float16 else llama)(q, k, cos, sin)


def reading_values(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return llama(q, k, cos, sin) if bool((cos <= 1).all()) else (q, k)


NEAR_MISSES = [
    (other_pairs, "rotate computes no rope"),
    (scaled, "rotate computes mul beside rope"),
    (half_of_cosines, "rotate takes the item (Ellipsis, slice(6, None, None))"),
    (interleaved_first, "rotate computes stack beside rope"),
    (detached, "rotate computes detach beside rope"),
    (exchanged, "rotate computes reshape beside rope"),
    (without_gradient, "rotate computes no rope"),
    (rounded, "rotate casts to torch.float8_e4m3fn beside rope"),
    (rounded_within, "rotate computes no rope: a value on the way is rounded to a narrower dtype"),
    (rounded_last, "rotate casts to torch.int32 beside rope"),
    (rounded_in_float32, "rotate casts to torch.bfloat16 beside rope"),
    (of_detached, "rotate computes detach beside rope"),
    (written_in_place, "rotate does more than compute its result: mul_"),
    (of_three, "rotate returns tuple, not a tuple of tensors"),
    (other_dtype, "rotate returns another dtype than bfloat16"),
    (other_in_float16, "rotate is rope(interleaved=False"),
    (reading_values, "rotate fails on fake tensors"),
]


@pytest.mark.parametrize(("function", "reason"), NEAR_MISSES, ids=lambda value: str(value)[:20])
def test_near_miss_is_left_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any], reason: str
) -> None:
    set_rotate(monkeypatch, function)
    module = nn.Sequential(Rotating())
    report = fuse(module)
    assert not report
    assert type(module[0]) is Rotating
    assert [(entry.where, entry.class_name) for entry in report.left] == [("0", "Rotating")]
    assert reason in report.left[0].reason


def test_functions_of_other_parameters_are_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    def dangerous(a: Any, b: Any, c: Any, d: Any) -> None:
        raise AssertionError("called")

    set_rotate(monkeypatch, dangerous)
    assert fuse(Rotating()) == FuseReport()
