"""The one form of an operation, with every spelling known."""

from __future__ import annotations

from . import spellings
from .spelling import COMMUTATIVE, IDENTITY, Call, canonical, dimension, is_tensor, same, value

__all__ = [
    "COMMUTATIVE",
    "IDENTITY",
    "Call",
    "canonical",
    "dimension",
    "is_tensor",
    "same",
    "spellings",
    "value",
]
