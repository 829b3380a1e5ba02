"""The state of `liger_ops.invariant`, which ops and kernels ask for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

# The contexts that are open, in all threads.
_open = 0


# Opens a context. `liger_ops.invariance` sets it, which stands above all who ask for the mode.
context: Callable[[], AbstractContextManager[None]]


class NotInvariantError(RuntimeError):
    """No way of computing an operation gives a row the same bits in every batch."""


def is_invariant() -> bool:
    """Return whether a context of `liger_ops.invariant` is open in this process."""
    return _open > 0


def count(change: int) -> int:
    """Add `change` to the number of open contexts, and return it."""
    global _open
    _open += change
    return _open


class AsTheyAre(threading.local):
    """A context in which PyTorch's operators are as they are, in this thread: within an operator's
    own function, which was tried as a whole, and within a trial."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *error: object) -> None:
        self.depth -= 1


as_they_are = AsTheyAre()
