"""Replace the calls of a model's head during one call of the model.

The model's own forward runs, on the model itself with its own head. The class of the head gets a
`__call__` that looks for a replacement in a list of the current thread. Nothing is written to the
model, so that calls in other threads, and calls that raise, do not interfere. torch.compile traces
the look-up.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import nn

from .. import classes

HEAD = "head of a loss"


class _ReplacedHeads(threading.local):
    """Pairs of a head and its replacement in the current thread, the outermost model's first."""

    active: tuple[tuple[Any, Any], ...] = ()


REPLACED = _ReplacedHeads()


def is_replaced(head: Any) -> bool:
    """Return whether the calls of a head are replaced."""
    return any(replaced is head for replaced, _ in REPLACED.active)


@classes.kind(HEAD, counts=False)
def methods(base: Any, facts: None) -> dict[str, Any]:
    original = base.__call__

    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        for head, replacement in REPLACED.active:
            if head is self:
                return replacement(*args, **kwargs)
        return original(self, *args, **kwargs)

    return {"__call__": called, "_liger_ops_call": original}


def call_itself(head: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a head itself, also while its calls are replaced."""
    if hasattr(type(head), "_liger_ops_call"):
        return head._liger_ops_call(*args, **kwargs)
    return head(*args, **kwargs)


def prepare(head: Any) -> str | None:
    """Give the head a class whose `__call__` can be replaced, or return why it cannot get one."""
    if not isinstance(head, nn.Module):
        return "its head is not a module"
    if HEAD in classes.overrides(head):
        return None
    if torch.compiler.is_compiling():
        return "its head was replaced after fuse, and has not been called before torch.compile"
    classes.override(head, HEAD, None)
    return None
