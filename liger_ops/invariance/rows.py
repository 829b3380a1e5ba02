"""Compute a function of rows so that a row's bits do not depend on the other rows.

A function of rows takes tensors whose axis 0 counts rows, and returns such tensors; row i of its
results depends on row i of its arguments alone, but which kernel computes it, and with that the
order of its sums, may depend on how many rows there are. There are several ways to call it, in the
order of their cost:

    as it is         every row at once
    more rows        at least ROWS rows, which zeros complete
    blocks           always ROWS rows, one call after another

The first call of a function in a process tries them with random rows, and takes the first way that
gives a row the same bits among any number of rows, in any order and at any place. What "a function"
is, a key says: all that may decide which kernel runs, but for the number of rows.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ..invariant_mode import NotInvariantError, as_they_are

Results = tuple[Tensor, ...]
Function = Callable[..., Results]
ByRows = Callable[..., Results]


class Base(Protocol):
    """PyTorch's own function of an operator.

    Attributes:
        out_dtype: the dtype of the call's `out`, which decides which kernel runs; None without one.
    """

    @property
    def out_dtype(self) -> torch.dtype | None: ...
    def __call__(self, /, *args: Any, **options: Any) -> Any: ...


ROWS = 64
# The rows of a trial on a GPU. Which kernel cuBLAS chooses changes most below 300 rows.
COUNTS = (1, 2, 3, 5, 8, 17, 33, 64, 100, 128, 129, 257, 512, 1000, 2048)
# Enough to see whether a row's place in a block matters, which is all that can matter in blocks. On
# a CPU, where no other way is trusted: its libraries divide a product among threads by its size.
COUNTS_OF_BLOCKS = (1, 5, 33, 64, 100)
# A trial makes this many numbers at most.
MOST_NUMBERS = 2**28


def as_it_is(function: Function, *rows: Tensor) -> Results:
    return function(*rows)


def more_rows(function: Function, *rows: Tensor) -> Results:
    count = rows[0].shape[0]
    if count >= ROWS:
        return function(*rows)
    return tuple(result[:count] for result in function(*(_padded(x, ROWS) for x in rows)))


def blocks(function: Function, *rows: Tensor) -> Results:
    count = rows[0].shape[0]
    parts = [
        more_rows(function, *(x[first : first + ROWS] for x in rows))
        for first in range(0, max(count, 1), ROWS)
    ]
    if len(parts) == 1:
        return parts[0]
    return tuple(torch.cat(results) for results in zip(*parts, strict=True))


def _padded(x: Tensor, count: int) -> Tensor:
    padded = x.new_zeros((count, *x.shape[1:]))
    padded[: x.shape[0]] = x
    return padded


# How to call which of the functions.
Way = tuple[ByRows, int]
_ways: dict[Hashable, Way] = {}
_lock = threading.RLock()
# Functions that are called with the name of each function of rows, and the columns of its rows.
recorders: list[Callable[[str, Hashable], None]] = []


def compute(
    name: str, key: Hashable, functions: Sequence[Function], *rows: Tensor,
    by: Sequence[ByRows] | None = None,
) -> Results:  # fmt: skip
    """Return functions[0](*rows), computed so that a row's bits do not depend on the others.

    Args:
        name: that of the operation, for the error.
        key: all that decides which kernels run, beside the number of rows, and their columns, dtype
            and device, which are added here.
        functions: the function, and others that are equal to it, in the order of their cost.
        rows: contiguous, of at least one row.
        by: the ways to try; by default all on a GPU, and blocks on a CPU, whose libraries divide a
            product among threads by its size.

    Raises:
        NotInvariantError: no way gives a row the same bits in every batch, or none is known yet
            while a CUDA graph is recorded.
    """
    of_rows = tuple((x.shape[1:], x.dtype) for x in rows)
    backends: Any = torch.backends
    precisions = (one.matmul.fp32_precision for one in (backends.cuda, backends.mkldnn))
    of_process = (*precisions, torch.get_num_threads())
    if recorders:
        for record in recorders:
            record(name, of_rows)
    whole_key = (name, key, of_rows, rows[0].device, of_process)
    way = _ways.get(whole_key)
    if way is None:
        with _lock:
            way = _ways.get(whole_key) or _find(name, functions, rows, by)
            _ways[whole_key] = way
    called, which = way
    return called(functions[which], *rows)


def _find(
    name: str, functions: Sequence[Function], rows: tuple[Tensor, ...], by: Sequence[ByRows] | None
) -> Way:
    if rows[0].is_cuda and torch.cuda.is_current_stream_capturing():
        raise NotInvariantError(
            f"liger_ops.invariant: {name} of these sizes is tried for the first time while a CUDA"
            " graph is recorded; run a step before"
        )
    if by is None:
        by = (blocks,) if rows[0].device.type == "cpu" else (as_it_is, more_rows, blocks)
    cheapest_first = sorted(
        ((called, which) for which in range(len(functions)) for called in by),
        key=lambda way: way[0] is blocks,
    )
    with as_they_are:
        for way in cheapest_first:
            if _holds(way, functions, rows):
                return way
    described = ", ".join(f"{tuple(x.shape)} {x.dtype}" for x in rows)
    raise NotInvariantError(
        f"liger_ops.invariant: {name} of {described} on {rows[0].device} gives a row other bits in"
        " another batch, by every way that is known"
    )


def _holds(way: Way, functions: Sequence[Function], like: tuple[Tensor, ...]) -> bool:
    """Return whether random rows have the same bits among any number of rows, and at any place."""
    called, which = way
    function = functions[which]
    generator = torch.Generator(like[0].device).manual_seed(0)
    one = [_random(x, 1, generator) for x in like]
    widest = max(x.numel() for x in (*one, *called(function, *one)))
    tried: tuple[int, ...] = COUNTS_OF_BLOCKS if called is blocks else COUNTS
    counts = [n for n in tried if n * widest <= MOST_NUMBERS] or [1]
    most = counts[-1]
    rows = [_random(x, most, generator) for x in like]
    whole = called(function, *rows)
    order = torch.randperm(most, generator=generator, device=like[0].device)
    parts: list[Any] = [slice(0, n) for n in counts[:-1]]
    return all(
        _are_same(part, result[chosen])
        for chosen in (*parts, slice(most // 3, None), order)
        for part, result in zip(
            called(function, *(aligned(x[chosen]) for x in rows)), whole, strict=True
        )
    )


def _are_same(a: Tensor, b: Tensor) -> bool:
    return bool(((a == b) | ((a != a) & (b != b))).all())


def _random(like: Tensor, count: int, generator: torch.Generator) -> Tensor:
    shape = (count, *like.shape[1:])
    return torch.randn(shape, generator=generator, device=like.device).to(like.dtype)


@functools.cache
def names_of(overload: Any) -> tuple[str, ...]:
    """Return the names of an operator's arguments."""
    return tuple(argument.name for argument in overload._schema.arguments)


def aligned(x: Tensor) -> Tensor:
    """Return x contiguous, at an address of 16 bytes: kernels are chosen by both."""
    x = x.contiguous()
    if x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)
    # The stride of an axis of size 1 may be any.
    return x.view(-1).view(x.shape) if 1 in x.shape else x


def described(value: Any) -> Hashable:
    """Return what of an argument that is no rows decides which kernels run."""
    if isinstance(value, Tensor) and value.dim() == 0:
        return value.dtype
    if isinstance(value, Tensor):
        return (value.shape, value.stride(), value.dtype, value.data_ptr() % 16)
    return tuple(value) if isinstance(value, list | tuple) else value
