"""Remember which warnings about a module were given."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

_reasons_given: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()


def first_time(module: nn.Module, reason: str) -> bool:
    """Return whether this is the first call for a module and a reason, and remember it."""
    # DataParallel creates replicas in each step, so the key of a replica is its class.
    reasons = _reasons_given.setdefault(
        type(module) if "_is_replica" in vars(module) else module, set()
    )
    is_first = reason not in reasons
    reasons.add(reason)
    return is_first
