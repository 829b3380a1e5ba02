"""Restore a fused model, for good or for a while, and compare the two."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from ..rewrites.differences import Verification
from ..rewrites.verify import UNCHANGED, CannotVerify, verify_changes
from . import classes
from .attention import attention
from .planning import wholly_or_not_at_all


def unfuse(model: nn.Module) -> int:
    """Undo `fuse`, and keep the current parameters and training mode.

    Modules get their classes back, and configurations the names of attention implementations.

    Args:
        model: a module that was given to `fuse`, or a copy of one. It is changed in place.

    Returns:
        The number of modules restored, where a module counts once per kind of part fused in it.

    Raises:
        TypeError: model is not a torch.nn.Module.
        RuntimeError: the class of a fused module was changed since, as parametrizations do; nothing
            is changed.
    """
    check_module("unfuse", model)
    with attention.names_kept_on_error(model):
        attention.restore(model)
        return classes.restore(model)


def check_module(function: str, model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{function}: model must be a torch.nn.Module, got {type(model).__name__}")


@contextlib.contextmanager
def unfused(model: nn.Module) -> Iterator[int]:
    """Run the body with the model unfused, and fuse it again. Yield the number of fused modules."""

    class Restore(Exception):
        """Raised to have `wholly_or_not_at_all` restore the fused classes."""

    with (
        contextlib.suppress(Restore),
        wholly_or_not_at_all(model),
        attention.names_kept_on_error(model),
    ):
        yield unfuse(model)
        raise Restore


UNCHANGED.append(unfused)


def verified(model: nn.Module, batch: Any) -> Verification:
    """Compare a fused model with the unfused one on a batch.

    Raises:
        ValueError: the two differ, or cannot be compared.
    """
    args: Any = () if isinstance(batch, Mapping) else batch
    args = args if isinstance(args, (tuple, list)) else (args,)
    kwargs = dict(batch) if isinstance(batch, Mapping) else {}
    try:
        verification = verify_changes(model, args, kwargs)
    except CannotVerify as reason:
        raise ValueError(f"fuse: the model is left as it was, unverified: {reason}") from reason
    if not verification.agrees:
        raise ValueError(f"fuse: the model is left as it was, for it would change: {verification}")
    return verification
