"""The same bits for a row in every batch: `liger_ops.invariant`."""

from .context import invariant
from .rows import NotInvariantError

__all__ = ["NotInvariantError", "invariant"]
