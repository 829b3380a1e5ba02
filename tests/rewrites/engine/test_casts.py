"""The effect of casts on values is computed: `represents`, and the reading of chains of casts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx

from liger_ops.rewrites.engine.casts import represents, rounding, through_casts
from liger_ops.rewrites.engine.insertion import replay

f8, i8 = torch.float8_e4m3fn, torch.int8
f16, bf16, f32, f64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
REAL = [
    *(f16, bf16, f32, f64, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu),
    *(torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.bool, torch.uint8, torch.uint16),
    *(torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32, torch.int64),
]


def critical(dtype: torch.dtype) -> Tensor:
    """All values of a dtype of at most 16 bits, and of others those that another may lack."""
    if dtype is torch.bool:
        return torch.tensor([False, True])
    if dtype.itemsize <= 2:
        bits = torch.arange(256**dtype.itemsize)
        return bits.to({1: torch.uint8, 2: torch.uint16}[dtype.itemsize]).view(dtype)
    if not dtype.is_floating_point:
        most, least = torch.iinfo(dtype).max, torch.iinfo(dtype).min
        return torch.tensor([least, least + 1, 0, 1, most - 1, most], dtype=dtype)
    known = torch.finfo(dtype)
    smallest = known.smallest_normal * known.eps
    numbers = [0, 1 + known.eps, known.max, known.min, smallest, 1 / 3, torch.inf, torch.nan]
    return torch.tensor(numbers, dtype=f64).to(dtype)


def numbers(x: Tensor) -> list[float]:
    x = x if x.dtype.itemsize == 8 and not x.is_floating_point() else x.to(f64)
    return ["nan" if one != one else one for one in x.tolist()]


@pytest.mark.parametrize("source", REAL, ids=str)
def test_a_dtype_represents_another_if_its_values_do_not_change(source):
    x = critical(source)
    found = {dtype for dtype in REAL if numbers(x.to(dtype)) == numbers(x)}
    assert {dtype for dtype in REAL if represents(dtype, source)} == found


def test_complex_numbers_and_packed_ones():
    assert represents(torch.complex64, f32) and represents(torch.complex64, bf16)
    assert represents(torch.complex128, torch.complex64)
    assert not represents(f64, torch.complex32) and not represents(torch.complex64, f64)
    assert not represents(torch.complex32, bf16) and not represents(torch.complex64, torch.int64)
    assert not represents(f64, torch.float4_e2m1fn_x2) and not represents(f64, torch.bits8)


@pytest.mark.parametrize(
    ("chain", "source", "rounds"),
    [
        ((f32, f64, f32), 0, None), ((bf16, f32, bf16), 0, None), ((f32, f32, f32), 0, None),
        ((bf16, f32, f64), 0, None), ((f32, bf16, f32), 1, bf16), ((f32, f8, f32), 1, f8),
        ((bf16, f16, bf16), 2, bf16), ((f32, i8, f64, f32), 1, i8), ((i8, f32, f64), 0, None),
        ((torch.int64, f32, f64), 1, f32), ((f32, torch.complex64), 0, None),
        ((torch.bool, i8, f32), 0, None), ((f32, torch.bool, f32), 1, torch.bool),
        ((f32, bf16, f32, bf16), 1, bf16),
    ],
)  # fmt: skip
def test_a_chain_of_casts_is_the_identity_on_its_source(chain, source, rounds):
    graph = fx.Graph()
    nodes = [graph.placeholder("x")]
    nodes[0].meta["example_value"] = torch.ones(2, dtype=chain[0])
    for dtype in chain[1:]:
        nodes.append(graph.call_method("to", (nodes[-1], dtype)))
        before = nodes[-2].meta["example_value"]
        nodes[-1].meta["example_value"] = replay(nodes[-1], (before, dtype), {})
    found, passed = through_casts(nodes[-1])
    assert found is nodes[source]
    assert passed == tuple(nodes[:source:-1])
    assert rounding(nodes[-1]) == rounds
