"""The chunks of tokens, or of words, in which a loss over a vocabulary computes its logits."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch

ENVIRONMENT = "LIGER_OPS_LOGITS_BYTES"
# 8192 x 2048 x 128256 in bfloat16 on an H200, forward and backward: 24.7 ms in chunks of 256 MiB,
# 22.5 ms of 512 MiB, 21.4 ms of 1024 MiB. The first two have the same peak memory.
DEFAULT_BYTES = 512 * 2**20
# The default in a backward, where the gradients are in memory beside the chunk.
BACKWARD_BYTES = 384 * 2**20

# Matrix products are fastest if their sizes are multiples of the kernels' tiles.
TILE = 128


def chunks(
    M: int, row_bytes: int, chunk_bytes: int | None,
    later_bytes: int = 0, saved_bytes: int = 0, default: int = DEFAULT_BYTES,
) -> Iterator[slice]:  # fmt: skip
    """Split M rows into slices of similar size, each at most `chunk_bytes` but at least one row.

    If neither the caller nor the environment sets a size, it is the larger of `default` and
    `later_bytes`, the memory that is needed after the last chunk in any case. A single slice of all
    rows may then take `saved_bytes` more, the memory that only several slices need. If M is 0,
    there is one empty slice.

    A graph that is traced with a symbolic M gets the number of slices for the M at hand, which
    `torch.compile` guards. It gets one slice if M is data-dependent, and if the graph is for a
    package of AOTInductor, which guards nothing.
    """
    configured = set_bytes(chunk_bytes)
    most = configured or max(default, later_bytes)
    if _holds(M * row_bytes <= (configured or most + saved_bytes)):
        yield slice(0, M)
        return
    fitting = max(1, most // row_bytes)
    unit = TILE if fitting >= TILE else 1
    # As few slices as possible, then the same number of rows in each, rounded up to whole tiles.
    count = int(-(-M // (fitting // unit * unit)))
    rows = -(-M // (count * unit)) * unit
    for i in range(count):
        yield slice(i * rows, M if i == count - 1 else (i + 1) * rows)


def _holds(fits: bool | torch.SymBool) -> bool:
    """Return whether all rows fit in one slice; True where no guard can decide it."""
    if isinstance(fits, bool):
        return fits
    from torch.fx.experimental.symbolic_shapes import guard_or_true

    from ...torch_private import inductor_state

    return inductor_state.aot_compilation or guard_or_true(fits)


def set_bytes(chunk_bytes: int | None) -> int | None:
    """Return the chunk size in bytes that the caller or else the environment sets, or None."""
    value = os.environ.get(ENVIRONMENT)
    if chunk_bytes or value is None:
        return chunk_bytes or None
    if not value.isdecimal() or int(value) < 1:
        raise ValueError(f"{ENVIRONMENT} must be a number of bytes above 0, got {value!r}")
    return int(value)
