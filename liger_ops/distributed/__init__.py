"""Ops on distributed tensors: the rules by which DTensor shards them.

Importing `torch.distributed.tensor` takes 0.7 s, so that this module does not do so. The rules are
registered when the first DTensor reaches an op, or when `liger_ops` is imported after DTensor.
"""

from __future__ import annotations

import sys

from .. import autograd

_registered = False


def register_for_dtensor() -> bool:
    """Register the sharding rules if DTensor has been imported; return whether they are new."""
    global _registered
    if _registered or not hasattr(sys.modules.get("torch.distributed.tensor"), "DTensor"):
        return False
    _registered = True
    from .sharding import register_rules

    register_rules()
    return True


autograd.before_subclasses = register_for_dtensor
register_for_dtensor()
