"""The error for an argument that `fuse` does not have."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from .loss.options import CHECKS as LOSS_ARGUMENTS

P = ParamSpec("P")
R = TypeVar("R")


def explain_unknown_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function to raise, for an unknown keyword, a TypeError that says where it belongs."""
    accepted = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name in accepted:
                continue
            similar = difflib.get_close_matches(name, accepted, 1)
            text = f"fuse: {name} is not an argument; accepted are {', '.join(accepted)}"
            if name in LOSS_ARGUMENTS:
                text += f". The forward of the fused model takes it: model(**batch, {name}=...)"
            elif similar:
                text += f". Did you mean {similar[0]}?"
            raise TypeError(text)
        return function(*args, **kwargs)

    return checked
