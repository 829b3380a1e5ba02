"""The functions of indices, with every rule known."""

from __future__ import annotations

from . import index_rules
from .index_function import IndexFunctions, operation

__all__ = ["IndexFunctions", "index_rules", "operation"]
