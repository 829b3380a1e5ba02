"""Block masks of flex_attention, without a dense mask in memory.

A block is 128 queries by 128 keys. Blocks without a visible key are skipped, those with only
visible keys need no mask, and in the others the mask decides for each element. The visible keys of
each block are counted: compiled, the mask is evaluated inside the reduction over a block. These
functions take `call`, which calls a function or inserts its call into a graph; sizes and indices
are then numbers and tensors, or nodes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from .algebra import Datum, axes_of

Call = Callable[..., Any]
# From indices of batch, head, query and key, which broadcast, to a boolean.
Visible = Callable[[Any, Any, Any, Any], Any]

BLOCK = 128
# Numbers that are summed by one program.
PART = 64
AXES = BATCH, HEADS, QUERIES, KEYS = -4, -3, -2, -1


def called(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The `call` that computes."""
    return function(*args, **kwargs)


def dense_datum(data: Iterable[Datum]) -> Datum | None:
    """A datum that is read at a query and a key at once, as a mask that is an input."""
    for datum in data:
        if {QUERIES, KEYS} <= {axis for place in datum.places for axis in axes_of(place)}:
            return datum
    return None


def block_lists(
    call: Call, visible: Visible, sizes: Mapping[int, Any], device: torch.device,
    rows: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The counts and ordered indices of blocks, int32, by the names that `BlockMask` gives them.

    Args:
        call: calls a function, or inserts its call into a graph.
        visible: the mask. It reads no index beyond `sizes`.
        sizes: those of the scores, by axis; 1 for a batch or heads that share a mask.
        device: where the mask is.
        rows: how many rows of blocks are evaluated at a time; None for all.
    """
    blocks = {
        axis: call(operator.floordiv, call(operator.add, sizes[axis], BLOCK - 1), BLOCK)
        for axis in (QUERIES, KEYS)
    }
    count = _counts(call, visible, sizes, blocks, device, rows)
    full = call(operator.eq, count, BLOCK * BLOCK)
    partial = call(operator.and_, call(operator.gt, count, 0), call(operator.invert, full))
    found: dict[str, Any] = {}
    for kind, chosen in (("", partial), ("full_", full)):
        for side, axis in (("kv", KEYS), ("q", QUERIES)):
            turned = chosen if axis == KEYS else call(torch.transpose, chosen, -2, -1)
            numbers = call(torch.arange, blocks[axis], device=device)
            number, indices = _ordered(call, turned, numbers, blocks[axis])
            found |= {f"{kind}{side}_num_blocks": number, f"{kind}{side}_indices": indices}
    return found


def _counts(
    call: Call, visible: Visible, sizes: Mapping[int, Any], blocks: Mapping[int, Any],
    device: torch.device, rows: int | None,
) -> Any:  # fmt: skip
    """How many pairs of query and key are visible: (B, H, blocks of queries, blocks of keys)."""
    last = {axis: call(operator.sub, sizes[axis], 1) for axis in blocks}
    b, h = (_along(call, axis, sizes[axis], device, dims=6) for axis in (BATCH, HEADS))
    queries, k = (
        call(torch.Tensor.view, call(torch.arange, tokens, device=device), shape)
        for axis, shape in ((QUERIES, (1, 1, -1, 1, BLOCK, 1)), (KEYS, (1, 1, 1, -1, 1, BLOCK)))
        for tokens in [call(operator.mul, blocks[axis], BLOCK)]
    )
    parts = []
    for q in [queries] if rows is None else queries.split(rows, dim=2):
        # The last block may pass the end of the data that the mask reads.
        ends = call(operator.le, q, last[QUERIES]), call(operator.le, k, last[KEYS])
        places = call(torch.clamp, q, max=last[QUERIES]), call(torch.clamp, k, max=last[KEYS])
        seen = call(operator.and_, visible(b, h, *places), call(operator.and_, *ends))
        parts.append(call(torch.sum, seen, dim=(-2, -1), dtype=torch.int32))
    return parts[0] if rows is None else call(torch.cat, parts, 2)


def unseen_queries(
    call: Call, visible: Visible, sizes: Mapping[int, Any], device: torch.device,
    rows: int | None = None,
) -> Any:  # fmt: skip
    """A boolean (B, H, S): whether a query sees no key; `rows` queries are evaluated at a time.

    An axis that `visible` does not depend on may have size 1.
    """
    b, h, q, k = (_along(call, axis, sizes[axis], device, dims=4) for axis in AXES)
    parts = [q] if rows is None else q.split(rows, dim=2)
    seen = [call(torch.any, visible(b, h, part, k), -1) for part in parts]
    return call(torch.logical_not, seen[0] if rows is None else call(torch.cat, seen, -1))


def _along(call: Call, axis: int, size: Any, device: torch.device, dims: int) -> Any:
    """The indices of an axis of the scores, as a tensor of so many dimensions."""
    items: list[Any] = [None] * dims
    items[axis + 4] = slice(None)
    return call(operator.getitem, call(torch.arange, size, device=device), tuple(items))


def _ordered(call: Call, blocks: Any, numbers: Any, size: Any) -> tuple[Any, Any]:
    """The number of blocks in each row, and their indices before those of the others, int32.

    The indices are scattered to their ranks, not sorted: Triton compiles a sort for seconds.
    `blocks` has 4 dimensions; `call` calls or records a function; `numbers` counts the blocks of
    a row, and `size` is how many they are.
    """
    ranks = _running_sums(call, call(torch.Tensor.to, blocks, torch.int64), size)
    count = call(torch.narrow, ranks, -1, -1, 1)
    indices = call(torch.Tensor.expand_as, numbers, ranks)
    others = call(operator.add, count, call(operator.sub, indices, ranks))
    places = call(torch.where, blocks, call(operator.sub, ranks, 1), others)
    order = call(torch.scatter, call(torch.zeros_like, places), -1, places, indices)
    count, order = (call(torch.Tensor.to, one, torch.int32) for one in (count, order))
    return _packed(call, call(torch.squeeze, count, -1), 3), _packed(call, order, 4)


def _running_sums(call: Call, x: Any, size: Any) -> Any:
    """The cumulative sums of x's last dimension.

    Inductor splits a sum of 1024 numbers over programs, and cannot compile that together with the
    code of the mask: "list indices must be integers or slices, not NoneType" (torch 2.11, 131072
    tokens). So a long sum is one of sums of PART numbers, where the size is a number.
    """
    if not isinstance(size, int) or size <= 4 * PART:
        return call(torch.cumsum, x, -1)
    parts = call(torch.unflatten, call(F.pad, x, (0, -size % PART)), -1, (-1, PART))
    within = call(torch.cumsum, parts, -1)
    totals = call(torch.narrow, within, -1, PART - 1, 1)
    before = call(operator.sub, call(torch.cumsum, totals, -2), totals)
    sums = call(torch.flatten, call(operator.add, within, before), -2)
    return call(torch.narrow, sums, -1, 0, size)


def _packed(call: Call, x: Any, dims: int) -> Any:
    """`x` with the strides of a contiguous tensor, those of dimensions of size 1 included.

    flex_attention's kernels compute a batch's offset from the stride of the heads, also where all
    heads share a mask. Inductor may give a dimension of size 1 any stride: without this the rows
    after the first read other blocks, and wrong ones (measured on an H100, torch 2.11).
    """
    sizes = [call(torch.Tensor.size, x, dim) for dim in range(dims)]
    strides = [1]
    for size in sizes[:0:-1]:
        strides.insert(0, call(operator.mul, size, strides[0]))
    return call(torch.as_strided, call(torch.Tensor.contiguous, x), sizes, strides)
