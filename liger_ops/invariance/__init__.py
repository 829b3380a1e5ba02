"""The same bits for a row in every batch: `liger_ops.invariant`."""

from ..invariant_mode import NotInvariantError
from .context import invariant

__all__ = ["NotInvariantError", "invariant"]
