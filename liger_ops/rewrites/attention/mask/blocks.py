"""Which blocks of a mask hide everything, something or nothing, from bounds of its conditions.

A block is 128 queries by 128 keys. Each comparison `value >= 0` is bounded over a block: indices by
the block's ends, data by their least and largest in the block, which are read per token. The memory
is that of the tokens and of the blocks, not of the mask. The bounds may be wide: a block is only
called full or empty if it is certainly so, and every other block is decided element by element.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from ...engine.emitter import Emitter
from .algebra import Affine, Condition, Datum, NonNegative, Not, Unknown, axes_of
from .predicate import integer

BLOCK = 128
# Numbers that are summed by one program.
PART = 64
BATCH, HEADS, QUERIES, KEYS = -4, -3, -2, -1


@dataclass(frozen=True)
class Blocks:
    """Nodes of a block mask as flex_attention takes it: counts and ordered indices, int32.

    Each attribute is (partial blocks, full blocks); `rows` lists the blocks of keys for each block
    of queries, `columns` the blocks of queries for each block of keys.
    """

    row_counts: tuple[Any, Any]
    rows: tuple[Any, Any]
    column_counts: tuple[Any, Any]
    columns: tuple[Any, Any]

    def moved(self, move: Callable[[fx.Node], fx.Node]) -> Blocks:
        """The same blocks in another graph."""
        return Blocks(**{name: (move(a), move(b)) for name, (a, b) in vars(self).items()})


def dense_datum(data: Iterable[Datum]) -> Datum | None:
    """A datum that is read at a query and a key at once, as a mask that is an input."""
    for datum in data:
        if {QUERIES, KEYS} <= {axis for place in datum.places for axis in axes_of(place)}:
            return datum
    return None


def ordered(call: Callable[..., Any], blocks: Any, numbers: Any, size: Any) -> tuple[Any, Any]:
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


def _running_sums(call: Callable[..., Any], x: Any, size: Any) -> Any:
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


def _packed(call: Callable[..., Any], x: Any, dims: int) -> Any:
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


class Bounds:
    """Emits the bounds of conditions over the blocks of a mask.

    `sizes` are those of the scores, by axis; `tensors` maps the nodes of the data to nodes of the
    graph that the bounds are computed in.
    """

    def __init__(
        self, emit: Emitter, sizes: Mapping[int, Any],
        tensors: Mapping[fx.Node, fx.Node], device: torch.device,
    ) -> None:  # fmt: skip
        self.emit, self.sizes, self.tensors, self.device = emit, sizes, tensors, device
        self.counts = {axis: self._count(sizes[axis]) for axis in (QUERIES, KEYS)}
        self._ends = {axis: self._block_ends(axis) for axis in (QUERIES, KEYS)}
        self._data: dict[Datum, tuple[Any, Any]] = {}

    def blocks(self, condition: Condition) -> Blocks:
        certain, possible = self.of(condition)
        emit = self.emit
        whole = emit(operator.and_, self._whole(QUERIES), self._whole(KEYS))
        full = emit(operator.and_, certain, whole)
        partial = emit(operator.and_, possible, emit(operator.invert, full))
        shape = [emit.size(possible, axis) for axis in (BATCH, HEADS)]
        shape += [self.counts[QUERIES], self.counts[KEYS]]
        kinds = [emit(torch.Tensor.expand, kind, shape) for kind in (partial, full)]
        turned = [emit(torch.transpose, kind, -2, -1) for kind in kinds]
        rows, columns = (
            [ordered(emit, kind, self._arange(size), size) for kind in side]
            for side, size in ((kinds, self.counts[KEYS]), (turned, self.counts[QUERIES]))
        )
        return Blocks(
            *(tuple(part) for part in zip(*rows, strict=True)),
            *(tuple(part) for part in zip(*columns, strict=True)),
        )

    def of(self, condition: Condition) -> tuple[Any, Any]:
        """Whether the condition holds in all of a block, and whether it may hold in a part."""
        emit = self.emit
        if isinstance(condition, bool):
            fact = emit(torch.full, (1, 1, 1, 1), condition, device=self.device)
            return fact, fact
        if isinstance(condition, NonNegative):
            low, high = self.range(condition.value)
            return emit(operator.ge, low, 0), emit(operator.ge, high, 0)
        if isinstance(condition, Not):
            certain, possible = self.of(condition.of)
            return emit(operator.invert, possible), emit(operator.invert, certain)
        sides = self.of(condition.left), self.of(condition.right)
        certain, possible = (emit(operator.and_, *pair) for pair in zip(*sides, strict=True))
        return certain, possible

    def range(self, number: Affine) -> tuple[Any, Any]:
        """The least and the largest value of a number in each block, or bounds of them."""
        emit = self.emit
        total: tuple[Any, Any] = (self._constant(number), self._constant(number))
        parts = [(self._ends_of(axis), slope) for axis, slope in number.slopes.items()]
        for term, factor in number.terms.items():
            if isinstance(term, Datum):
                ends = self._datum(term)
            else:
                low, high = self.range(term.dividend)
                ends = tuple(emit(operator.floordiv, end, term.divisor) for end in (low, high))
            parts.append((ends, factor))
        for ends, factor in parts:
            ordered = ends if factor > 0 else ends[::-1]
            scaled = [emit(operator.mul, end, factor) for end in ordered]
            total = tuple(emit(operator.add, *pair) for pair in zip(total, scaled, strict=True))
        return total

    def _constant(self, number: Affine) -> Any:
        return self.emit(torch.full, (1, 1, 1, 1), integer(number.constant), device=self.device)

    def _ends_of(self, axis: int) -> tuple[Any, Any]:
        if axis in self._ends:
            return self._ends[axis]
        positions = self._facing(self._arange(self.sizes[axis]), axis)
        return positions, positions

    def _block_ends(self, axis: int) -> tuple[Any, Any]:
        emit = self.emit
        first = emit(operator.mul, self._arange(self.counts[axis]), BLOCK)
        last = emit(torch.clamp, emit(operator.add, first, BLOCK - 1), max=self._last(axis))
        return self._facing(first, axis), self._facing(last, axis)

    def _whole(self, axis: int) -> Any:
        """Whether a block has all its 128 tokens."""
        first, _ = self._ends[axis]
        return self.emit(operator.le, first, self.emit(operator.sub, self.sizes[axis], BLOCK))

    def _datum(self, datum: Datum) -> tuple[Any, Any]:
        """The least and the largest element that is read in each block."""
        if datum not in self._data:
            self._data[datum] = self._read(datum)
        return self._data[datum]

    def _read(self, datum: Datum) -> tuple[Any, Any]:
        emit = self.emit
        axes = {axis for place in datum.places for axis in axes_of(place)}
        token = next((axis for axis in (QUERIES, KEYS) if axis in axes), None)
        values = emit(operator.getitem, self.tensors[datum.node], tuple(self._places(datum, token)))
        values = emit(torch.Tensor.to, values, torch.int64)
        while values.meta["example_value"].dim() < 4:
            values = emit(torch.unsqueeze, values, 0)
        if token is None:
            return values, values
        tiles = emit(torch.unflatten, values, token, (self.counts[token], BLOCK))
        # After unflatten the tokens of a block are the axis after the blocks.
        inner = token if token == KEYS else KEYS - 1
        return emit(torch.amin, tiles, inner), emit(torch.amax, tiles, inner)

    def _places(self, datum: Datum, token: int | None) -> list[Any]:
        """The index tensors of a datum's axes; tokens after the last repeat it."""
        emit, places = self.emit, []
        for place in datum.places:
            index = self._constant(place)
            for axis, slope in place.slopes.items():
                if axis == token:
                    count = emit(operator.mul, self.counts[axis], BLOCK)
                    positions = emit(torch.clamp, self._arange(count), max=self._last(axis))
                else:
                    positions = self._arange(self.sizes[axis])
                scaled = emit(operator.mul, self._facing(positions, axis), slope)
                index = emit(operator.add, index, scaled)
            if place.terms:
                raise Unknown("it reads a tensor at positions that another tensor holds")
            places.append(index)
        return places

    def _facing(self, positions: Any, axis: int) -> Any:
        """A vector as a tensor of 4 dimensions, along `axis`."""
        items = [None] * 4
        items[axis] = slice(None)  # type: ignore[call-overload]
        return self.emit(operator.getitem, positions, tuple(items))

    def _arange(self, count: Any) -> Any:
        return self.emit(torch.arange, count, device=self.device)

    def _count(self, size: Any) -> Any:
        raised = self.emit(operator.add, size, BLOCK - 1)
        return self.emit(operator.floordiv, raised, BLOCK)

    def _last(self, axis: int) -> Any:
        return self.emit(operator.sub, self.sizes[axis], 1)
