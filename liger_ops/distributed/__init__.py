"""Ops on tensors that are sharded over devices.

Importing `torch.distributed.tensor` takes 0.7 s, so this module does not import it. The losses over
a sharded vocabulary are imported when they are first used. The rules by which DTensor shards the
ops are registered when the first DTensor reaches an op, or when `liger_ops` is imported after
DTensor.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from .. import autograd

if TYPE_CHECKING:
    from .process_group.cross_entropy import cross_entropy, linear_cross_entropy
    from .process_group.divergence import divergence, linear_divergence, linear_top_k_divergence
    from .process_group.log_prob import linear_log_prob, log_prob
    from .process_group.top_k import linear_top_k

__all__ = [
    "cross_entropy", "divergence", "linear_cross_entropy", "linear_divergence", "linear_log_prob",
    "linear_top_k", "linear_top_k_divergence", "log_prob",
]  # fmt: skip

_registered = False


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = f"{__name__}.process_group.{name.removeprefix('linear_').removeprefix('top_k_')}"
    function = getattr(importlib.import_module(module), name)
    globals()[name] = function
    return function


def register_for_dtensor() -> bool:
    """Register the sharding rules if DTensor has been imported; return whether this call did."""
    global _registered
    if _registered or not hasattr(sys.modules.get("torch.distributed.tensor"), "DTensor"):
        return False
    _registered = True
    from .dtensor.calls import register_calls
    from .dtensor.rules import register_rules

    register_rules()
    register_calls()
    return True


autograd.before_subclasses = register_for_dtensor
register_for_dtensor()
