"""The options of the loss that a call of a fused model takes, beyond those of transformers."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch

from ...ops.losses.cross_entropy import OPTIONS

# Options of cross_entropy that a call takes. softcap and logit_scale come from the model's code.
NUMBERS = tuple(name for name in OPTIONS if name not in ("reduction", "softcap", "logit_scale"))
LOSS_OPTIONS = ("reduction", *NUMBERS)
HEAD_OPTIONS = ("accum_dtype", "chunk_bytes")


@dataclass(frozen=True)
class ForwardLossOptions:
    """The options of the loss in one call of a fused forward.

    `asked` holds those that differ from their defaults, by name, and `num_items` is the call's
    num_items_in_batch, by which a model divides the sum of its cross_entropy.

    It is not a NamedTuple, because Dynamo of torch 2.11 makes an empty one after a graph break.
    """

    asked: dict[str, Any] = field(default_factory=dict)
    num_items: Any = None

    @property
    def names(self) -> str:
        return ", ".join(self.asked)

    @property
    def wants_predicted(self) -> bool:
        return "return_token_accuracy" in self.asked or "return_predicted_tokens" in self.asked

    @property
    def has_parts(self) -> bool:
        """True if the call returns more than the loss."""
        return self.wants_predicted or "return_z_loss" in self.asked

    def select(self, names: Collection[str]) -> dict[str, Any]:
        return {name: value for name, value in self.asked.items() if name in names}


# For each option: the valid types, whether a value of them is valid, and a text that says so.
Check = tuple[tuple[type, ...], Callable[[Any], bool], str]


def _number_check(accepted: Any) -> Check:
    return (int, float), accepted.holds, f"a number {accepted.text.removeprefix('a number ')}"


_FLAG: Check = ((bool,), lambda value: True, "True or False")
CHECKS: dict[str, Check] = {
    "reduction": (
        (str,),
        lambda value: value in ("mean", "sum", "none"),
        "'mean', 'sum' or 'none'",
    ),
    **{name: _number_check(OPTIONS[name]) for name in NUMBERS},
    "use_token_scaling": _FLAG,
    "return_token_accuracy": _FLAG,
    "return_predicted_tokens": _FLAG,
    "return_z_loss": _FLAG,
    "accum_dtype": (
        (torch.dtype,),
        lambda value: value.is_floating_point,
        "torch.float32, the dtype of the head's weight, or None",
    ),
    "chunk_bytes": ((int,), lambda value: value > 0, "a number of bytes above 0, or None"),
}


def split_options(
    name: str, kwargs: dict[str, Any], names: tuple[str, ...]
) -> tuple[ForwardLossOptions, dict[str, Any]]:
    """Split the arguments of a call into the options and the other arguments.

    Args:
        name: the name of the model's class, for error messages.
        kwargs: the keyword arguments of a call.
        names: the options to take; other arguments are the model's own.

    Raises:
        TypeError: an option has a wrong type.
        ValueError: an option has a wrong value, or num_items_in_batch comes with another reduction
            than "mean".
    """
    given = {key: kwargs[key] for key in names if kwargs.get(key) is not None}
    rest = {key: value for key, value in kwargs.items() if key not in names}
    for key, value in given.items():
        types, is_value, accepted = CHECKS[key]
        # isinstance(True, int) holds, and True is no number of bytes.
        if not isinstance(value, types) or isinstance(value, bool) and bool not in types:
            raise TypeError(f"{name}: {key} must be {accepted}, got {type(value).__name__}")
        if not is_value(value):
            raise ValueError(f"{name}: {key} must be {accepted}, got {value!r}")
    if given.get("reduction", "mean") != "mean" and rest.get("num_items_in_batch") is not None:
        raise ValueError(
            f"{name}: num_items_in_batch is what the reduction 'mean' divides by, got it with the"
            f" reduction {given['reduction']!r}"
        )
    # Every default is false or "mean".
    asked = {key: value for key, value in given.items() if value and value != "mean"}
    return ForwardLossOptions(asked, rest.get("num_items_in_batch")), rest
