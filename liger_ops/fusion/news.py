"""Whether a warning about a model has been given before."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

_said: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()


def is_news(module: nn.Module, reason: str) -> bool:
    """Whether this is the first time that a reason is given for a module."""
    # DataParallel makes new replicas in each step, so the class is the key.
    reasons = _said.setdefault(type(module) if "_is_replica" in vars(module) else module, set())
    new = reason not in reasons
    reasons.add(reason)
    return new
