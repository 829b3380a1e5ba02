"""The head of a model, whose calls are those of another head while the model is called.

The model's own forward runs, with the model itself for `self` and its own head, whose class has a
`__call__` that looks for the head in a list of this thread. Nothing is written to the model, so
that calls in other threads, and calls that raise, do not interfere. torch.compile traces it.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import nn

from .. import classes

HEAD = "head of a loss"


class _Calls(threading.local):
    """The heads that are called in this thread, and what is called in the place of each."""

    active: tuple[tuple[Any, Any], ...] = ()


CALLS = _Calls()


def is_active(head: Any) -> bool:
    """Whether something else is called in the place of a head."""
    return any(one is head for one, _ in CALLS.active)


@classes.kind(HEAD, counts=False)
def methods(base: Any, facts: None) -> dict[str, Any]:
    original = base.__call__

    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        for head, other in CALLS.active:
            if head is self:
                return other(*args, **kwargs)
        return original(self, *args, **kwargs)

    return {"__call__": called, "_liger_ops_call": original}


def call(head: Any, *args: Any, **kwargs: Any) -> Any:
    """What a head itself returns."""
    if hasattr(type(head), "_liger_ops_call"):
        return head._liger_ops_call(*args, **kwargs)
    return head(*args, **kwargs)


def prepare(head: Any) -> str | None:
    """Give a head's class its `__call__`, if it has none; the reason, if it cannot get one."""
    if not isinstance(head, nn.Module):
        return "its head is not a module"
    if HEAD in classes.overrides(head):
        return None
    if torch.compiler.is_compiling():
        return "its head was replaced after fuse, and has not been called before torch.compile"
    classes.override(head, HEAD, None)
    return None
