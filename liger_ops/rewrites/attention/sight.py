"""Which masks show a query the tokens of its document, within a causal window.

The engines of `liger_ops.varlen_attention` are faster than flex_attention, and are given documents
in place of a block mask. Forward and backward on an H200, TFLOP/s by flex_attention and by the op's
own kernels: 4 x 4096 tokens, 32 heads of 128 and 8 of keys, 324 and 313; 2 x 8192 with a window of
4096 254 and 337, of 1024 157 and 228; 8 x 2048 with a window of 128 and sinks, 64 heads of 64, 32
and 63. By cuDNN, where it is installed, the first three are 418, 445 and 305.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..engine.maps.algebra import Condition, Size, axes_of, conjunction, data_of
from .mask.blocks import BATCH, KEYS
from .mask.evaluate import Scope
from .mask.packing import conjuncts, packing
from .mask.proof import departure, window


class Sight(NamedTuple):
    """Keys that a query sees: those of its document, no later than it and within the window.

    Attributes:
        window_left: that of `varlen_attention`.
        of_tokens: the condition that token j of row b begins a document or, if rows are documents,
            that it is a key, True for all.
        is_packed: whether rows are divided into documents.
    """

    window_left: int
    of_tokens: Condition
    is_packed: bool


def sight(condition: Condition, shape: Sequence[Size], scope: Scope) -> Sight | None:
    """Return the condition that a query sees a key as documents and a causal window, or None."""
    packed = packing(condition, scope)
    of_tokens, within = packed or (True, condition)
    by_index: Condition = True
    for part in conjuncts(within):
        if not data_of(part):
            by_index = conjunction(by_index, part)
        elif axes_of(part) <= {BATCH, KEYS} and packed is None:
            of_tokens = conjunction(of_tokens, part)
        else:
            return None
    size = 0 if departure(by_index, shape) is None else window(by_index, shape)
    return None if size is None else Sight(size - 1, of_tokens, packed is not None)
