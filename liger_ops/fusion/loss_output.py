"""What a forward returns, with less or more in it."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from .loss_written import DeferredLogits

# For each class of outputs, the one with the fields for what can be asked beside the loss. They are
# made when a model is fused: torch.compile traces no making of a class.
_EXTENDED: dict[type, type] = {}


def drop(output: Any, logits: Tensor | None) -> Any:
    """A model's output without its logits, as transformers leaves out what is absent."""

    def stays(value: Any) -> bool:
        return value is not logits and not isinstance(value, DeferredLogits)

    if isinstance(output, tuple):
        return tuple(value for value in output if stays(value))
    return type(output)(**{name: value for name, value in output.items() if stays(value)})


def extend(output: Any, values: dict[str, Tensor]) -> Any:
    """A model's output with more values: at the end of a tuple, and else by name."""
    if not values:
        return output
    if isinstance(output, tuple):
        return (*output, *values.values())
    cls = type(output)
    if cls not in _EXTENDED:
        prepare(cls)
    return _EXTENDED[cls](**output, **values)


def prepare(cls: type) -> None:
    """Make the class of the extended outputs of a class.

    That of a dataclass, such as a ModelOutput of transformers, is a subclass with two more fields;
    any other takes them as they are.
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
    """It is made again of the class it extends, which can be imported, and the values."""
    return _rebuilt, (type(self).__mro__[1], dict(self))


def _rebuilt(cls: type, values: dict[str, Any]) -> Any:
    prepare(cls)
    return _EXTENDED[cls](**values)
