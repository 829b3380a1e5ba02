"""Remove deferred logits from the output of a forward, or add values to it."""

from __future__ import annotations

import dataclasses
import sys
import warnings
from typing import Any

import torch
from torch import Tensor

from .deferred import deferral_of

# Cache: class of outputs -> class with the additional fields. It is filled when a model is fused,
# because torch.compile cannot trace the making of a class.
_EXTENDED: dict[type, type] = {}


# Why the logits are computed, if nothing else needs them.
NO_LOSS = "its forward computed no loss of its head's logits"


# Cache: class of outputs -> class of those without logits, which warns where they are read.
_SKIPPING: dict[type, type] = {}

# Packages that read every field of an output.
_READERS = ("transformers.utils", "dataclasses", "copy", "pprint", "torch", "liger_ops")


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
    values = {name: real(value) for name, value in output.items() if stays(value)}
    made = type(output)(**values)
    skipping = _SKIPPING.get(type(output))
    if skipping and len(values) < len(output) and not torch.compiler.is_compiling():
        made.__class__ = skipping
    return made


def extend(output: Any, values: dict[str, Tensor]) -> Any:
    """A model's output with more values: at the end of a tuple, otherwise by name."""
    if not values:
        return output
    if isinstance(output, tuple):
        return (*output, *values.values())
    cls = type(output)
    if _SKIPPING.get(cls.__mro__[1]) is cls:
        cls = cls.__mro__[1]
    if cls not in _EXTENDED:
        prepare(cls)
    return _EXTENDED[cls](**output, **values)


def prepare(cls: type) -> None:
    """Make the classes of extended outputs of `cls`, and of those without logits.

    For a dataclass, such as a ModelOutput of transformers, it is a subclass with two more fields;
    any other class takes the values as it is.
    """
    if cls in _EXTENDED:
        return
    if not dataclasses.is_dataclass(cls):
        _EXTENDED[cls] = cls
        return
    if any(field.name == "logits" for field in dataclasses.fields(cls)):
        _SKIPPING[cls] = _skipping(cls)
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


def _reads_all(frame: Any) -> bool:
    """Whether the code of a frame reads every field, such as the methods that dataclasses makes."""
    name = str(frame.f_globals.get("__name__"))
    return name.startswith(_READERS) or frame.f_code.co_filename == "<string>"


def _skipping(cls: type) -> type:
    """A class of outputs in which reading absent logits gives None, and a warning that says why.

    They are not computed then: the weights may have changed since, or may be sharded outside of the
    forward, and dropout would draw another mask.
    """

    def read(self: Any) -> Any:
        value = vars(self).get("logits")
        if value is None and not _reads_all(sys._getframe(1)):
            warnings.warn(
                f"liger_ops: the logits of this {cls.__name__} are None, because fuse(model) skips"
                " them in training. model(**batch, skip_logits=False) returns them, and"
                " fuse(model, loss=False) leaves the loss as it was",
                stacklevel=2,
            )
        return value

    def write(self: Any, value: Any) -> None:
        vars(self)["logits"] = value

    namespace = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "logits": property(read, write),
        "__reduce__": lambda self: (cls, (), None, None, iter(self.items())),
    }
    return type(cls.__name__, (cls,), namespace)


def _reduce(self: Any) -> Any:
    """Pickle as the class that it extends, which can be imported, and the values."""
    return _rebuilt, (type(self).__mro__[1], dict(self))


def _rebuilt(cls: type, values: dict[str, Any]) -> Any:
    prepare(cls)
    return _EXTENDED[cls](**values)
