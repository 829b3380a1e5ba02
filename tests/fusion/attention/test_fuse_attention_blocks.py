"""Block masks against dense masks, and the memory that it takes to make them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from backends import without_caches
from liger_ops.fusion.attention import block_masks
from liger_ops.fusion.attention.block_masks import block_mask, dense

CPU = torch.device("cpu")
BATCH = 2

Mask = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def padding(length: int) -> Tensor:
    kept = torch.ones(BATCH, length, dtype=torch.bool)
    kept[1, : length // 2] = False
    return kept


def documents(length: int) -> Tensor:
    return torch.stack((torch.arange(length) // 37, torch.arange(length) // 150))


def masks(length: int) -> dict[str, Mask]:
    kept, ids = padding(length), documents(length)
    return {
        "causal": lambda b, h, q, k: k <= q,
        "window": lambda b, h, q, k: (k <= q) & (k > q - 140),
        "padded": lambda b, h, q, k: (k <= q) & kept[b, k],
        "packed": lambda b, h, q, k: (k <= q) & (ids[b, q] == ids[b, k]),
        "everything": lambda b, h, q, k: q >= 0,
        "nothing": lambda b, h, q, k: q < 0,
    }


@pytest.mark.parametrize("length", [1, 127, 128, 300])
@pytest.mark.parametrize("name", masks(1))
def test_blocks(name: str, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same blocks as PyTorch's, which evaluates a dense mask, also in several parts."""
    visible = masks(length)[name]
    expected = create_block_mask(visible, BATCH, None, length, length, device="cpu")
    whole = block_mask(visible, BATCH, length, length, CPU)
    monkeypatch.setattr(block_masks, "ELEMENTS", 1)
    for found in (whole, block_mask(visible, BATCH, length, length, CPU)):
        # Masks that are the same for each row of the batch are made once.
        rows = BATCH if name in ("padded", "packed") else 1
        assert found.shape == (rows, 1, length, length)
        for part in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
            counts = getattr(expected, part)
            assert torch.equal(getattr(found, part).expand_as(counts), counts)
        assert torch.equal(found.to_dense().expand(BATCH, 1, -1, -1), expected.to_dense())
        b, q, k = (torch.arange(n) for n in (BATCH, length, length))
        mask = visible(b[:, None, None, None], b[:1], q[:, None], k)
        assert torch.equal(dense(found, rows, length), mask.expand(rows, 1, length, length))


def test_no_dense_mask_is_stored_when_compiled() -> None:
    """Inductor evaluates the mask inside the sums over blocks."""

    def blocks(kept: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (k <= q) & (k > q - 400) & (ids[b, q] == ids[b, k]) & kept[b, k]

        made = block_mask(visible, *kept.shape, kept.shape[1], kept.device)
        return parts(made)

    length = 1201
    inputs = padding(length), documents(length)
    found, code = run_and_get_code(torch.compile(blocks, fullgraph=True, dynamic=False), *inputs)
    for one, expected in zip(found, blocks(*inputs), strict=True):
        assert torch.equal(one, expected)
    shapes = re.findall(r"empty_strided_cpu\(\(([\d, ]*)\)", "".join(code))
    sizes = [torch.Size(map(int, shape.strip(", ").split(", "))).numel() for shape in shapes]
    assert sizes and max(sizes) <= BATCH * length


def parts(made: BlockMask) -> tuple[Tensor, ...]:
    found = (made.kv_num_blocks, made.kv_indices, made.full_kv_num_blocks, made.full_kv_indices)
    return tuple(part for part in found if part is not None)


def test_strides_that_the_kernels_of_flex_attention_assume(monkeypatch: pytest.MonkeyPatch) -> None:
    """They find a batch's blocks by the stride of the heads, also of one head for all.

    flex_attention's CPU kernel reads any strides, but Inductor chooses them alike.
    """
    from torch._inductor.kernel.flex import flex_cpu

    read: list[Any] = []
    realize = flex_cpu.maybe_realize
    monkeypatch.setattr(
        flex_cpu, "maybe_realize", lambda nodes: read.extend(made := realize(nodes)) or made
    )
    length = 300
    mask = masks(length)["padded"]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(q, k, v, block_mask=block_mask(mask, BATCH, length, length, CPU))

    torch._dynamo.reset()
    with torch.no_grad(), without_caches():
        torch.compile(attend, fullgraph=True)(*torch.randn(3, BATCH, 2, length, 16).unbind())
    lists = [one for one in read if one.get_dtype() == torch.int32]
    assert len(lists) == 8
    for one in lists:
        packed = torch.empty(one.get_size(), device="meta")
        assert tuple(one.get_layout().stride) == packed.stride()
