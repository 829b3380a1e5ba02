"""Remove deferred logits from the output of a forward, or add values to it."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from .deferred import deferral_of

# Cache: class of outputs -> class with the additional fields. It is filled when a model is fused,
# because torch.compile cannot trace the making of a class.
_EXTENDED: dict[type, type] = {}


# Why the logits are computed, if nothing else needs them.
NO_LOSS = "its forward computed no loss of its head's logits"


def settled(output: Any, skips: bool) -> Any:
    """A model's output with logits in the place of deferred ones, or, if it skips them and nothing
    needed them, without them, in the form that transformers gives absent values."""

    def stays(value: Any) -> bool:
        deferral = deferral_of(value)
        return not skips or deferral is None or deferral.value is not None

    def real(value: Any) -> Any:
        deferral = deferral_of(value)
        return value if deferral is None else deferral.computed(NO_LOSS)

    if isinstance(output, tuple):
        return tuple(real(value) for value in output if stays(value))
    if not isinstance(output, dict):
        return output
    values = {name: value for name, value in output.items() if stays(value)}
    return type(output)(**{name: real(value) for name, value in values.items()})


def extend(output: Any, values: dict[str, Tensor]) -> Any:
    """A model's output with more values: at the end of a tuple, otherwise by name."""
    if not values:
        return output
    if isinstance(output, tuple):
        return (*output, *values.values())
    cls = type(output)
    if cls not in _EXTENDED:
        prepare(cls)
    return _EXTENDED[cls](**output, **values)


def prepare(cls: type) -> None:
    """Make the class of extended outputs of `cls`.

    For a dataclass, such as a ModelOutput of transformers, it is a subclass with two more fields;
    any other class takes the values as it is.
    """
    if cls in _EXTENDED:
        return
    if not dataclasses.is_dataclass(cls):
        _EXTENDED[cls] = cls
        return
    fields = {"token_accuracy": "Tensor | None", "predicted_tokens": "Tensor | None"}
    namespace = {
        "__module__": cls.__module__,
        "__qualname__": f"{cls.__qualname__}WithTokens",
        "__doc__": cls.__doc__,
        "__annotations__": fields,
        **dict.fromkeys(fields),
        "__reduce__": _reduce,
    }
    _EXTENDED[cls] = dataclasses.dataclass(type(f"{cls.__name__}WithTokens", (cls,), namespace))


def _reduce(self: Any) -> Any:
    """Pickle as the class that it extends, which can be imported, and the values."""
    return _rebuilt, (type(self).__mro__[1], dict(self))


def _rebuilt(cls: type, values: dict[str, Any]) -> Any:
    prepare(cls)
    return _EXTENDED[cls](**values)
