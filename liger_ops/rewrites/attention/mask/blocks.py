"""Block masks of flex_attention, without a dense mask in memory, and queries that see no key.

A block is 128 queries by 128 keys. Blocks without a visible key are skipped, those with only
visible keys need no mask, and in the others the mask decides for each element. The visible keys of
each block are counted: compiled, the mask is evaluated inside the reduction over a block. These
functions take `call`, which calls a function or inserts its call into a graph; sizes and indices
are then numbers and tensors, or nodes.

Attention gives a query that sees no key the mean of all values, as the model's code does. Code that
adds a finite number c to hidden scores gives such a query the same weight for every key: c is so
low that every score + c rounds to c. The gradient of a sum does not see the rounding, so the scores
still have a gradient. flex_attention computes the same if the query sees all keys, and if its
scores are rounded in the same way, to 0 instead of c: the logarithm of a sum of exponentials of c
would lose the number of keys.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from ....ops.attention.documents import Call
from ...engine.maps.algebra import Condition, Datum, affine, always_true, at_least, axes_of, index

# From indices of batch, head, query and key, which broadcast, to a boolean.
Visible = Callable[[Any, Any, Any, Any], Any]

BLOCK = 128
# The numbers that one program sums in a long cumulative sum: `_running_sums`.
SUM_LENGTH = 64
AXES = BATCH, HEADS, QUERIES, KEYS = -4, -3, -2, -1


def dense_datum(data: Iterable[Datum]) -> Datum | None:
    """Return a datum that is read at a query and a key at once, as a mask that is an input.

    Its tensor is a dense mask: what block masks are to avoid.
    """
    for datum in data:
        if {QUERIES, KEYS} <= {axis for index in datum.indices for axis in axes_of(index)}:
            return datum
    return None


def block_lists(
    call: Call, visible: Visible, sizes: Mapping[int, Any], device: torch.device,
    rows: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Return the counts and ordered indices of blocks, int32, by their names in `BlockMask`.

    Args:
        call: calls a function, or inserts its call into a graph.
        visible: the mask. It reads no index beyond `sizes`.
        sizes: the sizes of the scores, by axis; 1 for a batch or heads that share a mask.
        device: the device of the mask.
        rows: the number of rows of blocks that are evaluated at a time; None for all.
    """
    blocks = {
        axis: call(operator.floordiv, call(operator.add, sizes[axis], BLOCK - 1), BLOCK)
        for axis in (QUERIES, KEYS)
    }
    count = _counts(call, visible, sizes, blocks, device, rows)
    full = call(operator.eq, count, BLOCK * BLOCK)
    partial = call(operator.and_, call(operator.gt, count, 0), call(operator.invert, full))
    lists: dict[str, Any] = {}
    for prefix, is_listed in (("", partial), ("full_", full)):
        for side, axis in (("kv", KEYS), ("q", QUERIES)):
            oriented = is_listed if axis == KEYS else call(torch.transpose, is_listed, -2, -1)
            numbers = call(torch.arange, blocks[axis], device=device)
            number, indices = _ordered(call, oriented, numbers, blocks[axis])
            lists |= {f"{prefix}{side}_num_blocks": number, f"{prefix}{side}_indices": indices}
    return lists


def _counts(
    call: Call, visible: Visible, sizes: Mapping[int, Any], blocks: Mapping[int, Any],
    device: torch.device, rows: int | None,
) -> Any:  # fmt: skip
    """Count each block's visible pairs of query and key: (B, H, blocks of queries, of keys)."""
    last = {axis: call(operator.sub, sizes[axis], 1) for axis in blocks}
    b, h = (_arange_along(call, axis, sizes[axis], device, dims=6) for axis in (BATCH, HEADS))
    queries, k = (
        call(torch.Tensor.view, call(torch.arange, tokens, device=device), shape)
        for axis, shape in ((QUERIES, (1, 1, -1, 1, BLOCK, 1)), (KEYS, (1, 1, 1, -1, 1, BLOCK)))
        for tokens in [call(operator.mul, blocks[axis], BLOCK)]
    )
    pieces = []
    for q in [queries] if rows is None else queries.split(rows, dim=2):
        # The last block may pass the end of the data that the mask reads. Indices there are clamped
        # for the read, and their pairs are not counted: the block is never a full one.
        ends = call(operator.le, q, last[QUERIES]), call(operator.le, k, last[KEYS])
        clamped = call(torch.clamp, q, max=last[QUERIES]), call(torch.clamp, k, max=last[KEYS])
        shown = call(operator.and_, visible(b, h, *clamped), call(operator.and_, *ends))
        pieces.append(call(torch.sum, shown, dim=(-2, -1), dtype=torch.int32))
    return pieces[0] if rows is None else call(torch.cat, pieces, 2)


def unseen_queries(
    call: Call, visible: Visible, sizes: Mapping[int, Any], device: torch.device,
    rows: int | None = None,
) -> Any:  # fmt: skip
    """Compute whether each query sees no key, (B, H, S); `rows` queries are evaluated at a time.

    An axis that `visible` does not depend on may have size 1.
    """
    b, h, q, k = (_arange_along(call, axis, sizes[axis], device, dims=4) for axis in AXES)
    pieces = [q] if rows is None else q.split(rows, dim=2)
    shown = [call(torch.any, visible(b, h, piece, k), -1) for piece in pieces]
    return call(torch.logical_not, shown[0] if rows is None else call(torch.cat, shown, -1))


def _arange_along(call: Call, axis: int, size: Any, device: torch.device, dims: int) -> Any:
    """Return the indices of an axis of the scores, as a tensor of `dims` dimensions."""
    items: list[Any] = [None] * dims
    items[axis + 4] = slice(None)
    return call(operator.getitem, call(torch.arange, size, device=device), tuple(items))


def _ordered(call: Call, blocks: Any, numbers: Any, size: Any) -> tuple[Any, Any]:
    """Return the number of listed blocks in each row, and all indices, the listed first; int32.

    The indices are scattered to their ranks, not sorted: Triton compiles a sort for seconds.

    Args:
        call: calls a function, or inserts its call into a graph.
        blocks: whether each block is listed, with 4 dimensions.
        numbers: the indices 0, 1, ... of the blocks of a row.
        size: the number of blocks of a row.
    """
    ranks = _running_sums(call, call(torch.Tensor.to, blocks, torch.int64), size)
    count = call(torch.narrow, ranks, -1, -1, 1)
    indices = call(torch.Tensor.expand_as, numbers, ranks)
    others = call(operator.add, count, call(operator.sub, indices, ranks))
    positions = call(torch.where, blocks, call(operator.sub, ranks, 1), others)
    order = call(torch.scatter, call(torch.zeros_like, positions), -1, positions, indices)
    count, order = (call(torch.Tensor.to, result, torch.int32) for result in (count, order))
    return _packed(call, call(torch.squeeze, count, -1), 3), _packed(call, order, 4)


def _running_sums(call: Call, x: Any, size: Any) -> Any:
    """Return the cumulative sums of x's last dimension.

    Inductor splits a sum of 1024 numbers over programs, and cannot compile that together with the
    code of the mask: "list indices must be integers or slices, not NoneType" (torch 2.11, 131072
    tokens). So a long sum of a fixed size is computed as sums of SUM_LENGTH numbers.
    """
    if not isinstance(size, int) or size <= 4 * SUM_LENGTH:
        return call(torch.cumsum, x, -1)
    pieces = call(torch.unflatten, call(F.pad, x, (0, -size % SUM_LENGTH)), -1, (-1, SUM_LENGTH))
    within = call(torch.cumsum, pieces, -1)
    totals = call(torch.narrow, within, -1, SUM_LENGTH - 1, 1)
    before = call(operator.sub, call(torch.cumsum, totals, -2), totals)
    sums = call(torch.flatten, call(operator.add, within, before), -2)
    return call(torch.narrow, sums, -1, 0, size)


def _packed(call: Call, x: Any, dims: int) -> Any:
    """Return `x` with the strides of a contiguous tensor, those of dimensions of size 1 included.

    flex_attention's kernels compute a batch's offset from the stride of the heads, also where all
    heads share a mask. Inductor may give a dimension of size 1 any stride: without this the rows
    after the first read other blocks, and wrong ones (measured on an H100, torch 2.11).
    """
    sizes = [call(torch.Tensor.size, x, dim) for dim in range(dims)]
    strides = [1]
    for size in sizes[:0:-1]:
        strides.insert(0, call(operator.mul, size, strides[0]))
    return call(torch.as_strided, call(torch.Tensor.contiguous, x), sizes, strides)


# Scores are far below its rounding error, in float64 too: score + LARGE is LARGE.
LARGE = 1e30


def is_unseen(unseen: fx.Node) -> Condition:
    """Return the condition that a query sees no key, read from the boolean tensor `unseen`."""
    shape = unseen.meta["example_value"].shape
    indices = tuple(
        affine(0) if always_true(size == 1) else index(axis)
        for axis, size in zip(AXES[:-1], shape, strict=True)
    )
    return at_least(affine(0, {}, {Datum(unseen, indices): 1}), affine(1))


def rounded_to_zero(score: Any, unseen: Any) -> Any:
    """Return the score, or 0 with the score's gradient where `unseen` is true.

    Arithmetic, and not torch.where, which would give the score no gradient.
    """
    large = unseen * LARGE
    return (score + large) - large


def read_at(unseen: Any, indices: tuple[Any, ...], like: torch.Tensor) -> Any:
    """Return the element of `unseen`, which has the shape of `like`, at the indices b, h and i."""
    pairs = zip(indices, like.shape, strict=True)
    return unseen[tuple(index * 0 if always_true(size == 1) else index for index, size in pairs)]
