"""Checks of the losses' arguments.

Messages with sizes are built in two steps, the words first. torch 2.11's Dynamo reports a string
with a size piece by piece, and all the words are then in the first piece.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def holds(fact: bool) -> bool:
    """Return whether a comparison of sizes holds; False if a trace cannot tell (unbacked sizes)."""
    if not torch.compiler.is_compiling():
        return fact
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(fact)


def check_tensor(function: str, name: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{function}: {name} must be a tensor, got {type(value).__name__}")


def check_values(
    function: str, name: str, value: Any, *, like: Tensor | None = None, of_any_shape: bool = False
) -> None:
    """Raise unless value is a floating-point tensor of shape (B, T), and of `like`'s shape."""
    check_tensor(function, name, value)
    if not value.dtype.is_floating_point:
        raise TypeError(f"{function}: {name} must be of a floating-point dtype, got {value.dtype}")
    if value.dim() != 2 and not of_any_shape:
        raise ValueError(
            f"{function}: {name} must be of shape (B, T), got {value.dim()} dimensions"
        )
    if like is not None:
        check_shape(function, name, value, like)


def check_mask(
    function: str, name: str, mask: Any, like: Tensor, *, name_of_like: str = "log_prob"
) -> None:
    check_tensor(function, name, mask)
    check_shape(function, name, mask, like, name_of_like)


def check_shape(
    function: str, name: str, value: Tensor, like: Tensor, name_of_like: str = "log_prob"
) -> None:
    if value.shape != like.shape:
        text = f"{function}: {name} must be of {name_of_like}'s shape, got "
        raise ValueError(f"{text}{tuple(value.shape)} for {tuple(like.shape)}")


def check_per_sequence(
    function: str, name: str, value: Any, log_prob: Tensor, name_of_tokens: str = "log_prob", *,
    of_tokens: bool = True,
) -> None:  # fmt: skip
    """Raise unless value is a tensor of shape (B,), or if `of_tokens` also (B, 1) or (B, T)."""
    check_tensor(function, name, value)
    rows, tokens = log_prob.shape
    accepted = "(B,), (B, 1) or (B, T)" if of_tokens else "(B,)"
    fits = value.dim() >= 1 and value.shape[0] == rows
    if value.dim() == 2:
        is_row = holds(value.shape[1] == 1) or holds(value.shape[1] == tokens)
        fits = fits and of_tokens and is_row
    if value.dim() > 2 or not fits:
        text = f"{function}: {name} must be of shape {accepted} for {name_of_tokens}'s (B, T), got "
        raise ValueError(f"{text}{tuple(value.shape)} for {tuple(log_prob.shape)}")


def check_number(
    function: str, name: str, value: Any, *,
    above: float | None = None, at_least: float | None = None,
    below: float | None = None, at_most: float | None = None,
) -> None:  # fmt: skip
    """Raise unless value is a number within the bounds; NaN is within no bounds."""
    if not isinstance(value, (int, float)):
        raise TypeError(f"{function}: {name} must be a number, got {type(value).__name__}")
    fits = (
        (above is None or value > above)
        and (at_least is None or value >= at_least)
        and (below is None or value < below)
        and (at_most is None or value <= at_most)
    )
    if not fits:
        bounds = {"above": above, "at least": at_least, "below": below, "at most": at_most}
        accepted = " and ".join(f"{k} {v}" for k, v in bounds.items() if v is not None)
        raise ValueError(f"{function}: {name} must be {accepted}, got {value}")


def check_items(function: str, value: Any) -> None:
    """Raise unless num_items_in_batch is None, a number or a tensor of one."""
    if value is None:
        return
    if not isinstance(value, Tensor):
        check_number(function, "num_items_in_batch", value)
    elif value.numel() != 1:
        raise ValueError(
            f"{function}: num_items_in_batch must be a number or a tensor of one, got a tensor of"
            f" shape {tuple(value.shape)}"
        )


def check_choice(function: str, name: str, value: Any, choices: Iterable[str]) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{function}: {name} must be a str, got {type(value).__name__}")
    if value not in choices:
        raise ValueError(f"{function}: {name} must be one of {', '.join(choices)}, got {value!r}")
