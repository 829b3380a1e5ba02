"""Whether `liger_ops.invariant` is in force."""

from __future__ import annotations

# The contexts that are open, in all threads.
_open = 0


def is_invariant() -> bool:
    """Return whether a context of `liger_ops.invariant` is open in this process."""
    return _open > 0


def count(change: int) -> int:
    """Add `change` to the number of open contexts, and return it."""
    global _open
    _open += change
    return _open
