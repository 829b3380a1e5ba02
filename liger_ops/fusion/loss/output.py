"""Remove deferred logits from the output of a forward, and add values to it."""

from __future__ import annotations

import dataclasses
import sys
import warnings
from typing import Any

import torch
from torch import Tensor

from .deferred import deferral_of

# Cache: class of outputs -> class with the additional fields. It is filled when a model is fused,
# because torch.compile cannot trace the creation of a class.
_EXTENDED: dict[type, type] = {}


# The reason that the logits are computed if no operation needed them.
NO_LOSS = "its forward computed no loss of its head's logits"


# Cache: class of outputs -> class for outputs without logits, which warns if they are read.
_SKIPPING: dict[type, type] = {}

# Packages whose code reads every field of an output, and gets no warning.
_READERS = ("transformers.utils", "dataclasses", "copy", "pprint", "torch", "liger_ops")


def without_deferred(output: Any, skips: bool) -> Any:
    """Return a model's output without deferred logits.

    If `skips`, deferred logits that nothing needed are left out, as transformers leaves out absent
    values; otherwise they are computed.
    """

    def is_kept(value: Any) -> bool:
        deferral = deferral_of(value)
        return not skips or deferral is None or deferral.value is not None

    def real(value: Any) -> Any:
        deferral = deferral_of(value)
        return value if deferral is None else deferral.compute(NO_LOSS)

    if isinstance(output, tuple):
        return tuple(real(value) for value in output if is_kept(value))
    if not isinstance(output, dict):
        return output
    values = {name: real(value) for name, value in output.items() if is_kept(value)}
    result = type(output)(**values)
    output_class = _SKIPPING.get(type(output))
    if output_class and len(values) < len(output) and not torch.compiler.is_compiling():
        result.__class__ = output_class
    return result


def extend(output: Any, values: dict[str, Tensor]) -> Any:
    """Return a model's output with more values: at the end of a tuple, otherwise by name."""
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
    """Create the classes for outputs of `cls` with more values, and for those without logits.

    A dataclass, such as a ModelOutput of transformers, gets a subclass with two more fields; any
    other class takes more values as it is.
    """
    if cls in _EXTENDED:
        return
    if not dataclasses.is_dataclass(cls):
        _EXTENDED[cls] = cls
        return
    if any(field.name == "logits" for field in dataclasses.fields(cls)):
        _SKIPPING[cls] = _class_without_logits(cls)
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
    """Return whether the code of a frame reads every field of an output, and asks for none."""
    # The methods that dataclasses generates have the file name "<string>".
    name = str(frame.f_globals.get("__name__"))
    return name.startswith(_READERS) or frame.f_code.co_filename == "<string>"


def _class_without_logits(cls: type) -> type:
    """Create the class of outputs whose absent logits read as None, with a warning that says why.

    They are not computed when they are read: the weights may have changed since, or may be sharded
    outside of the forward, and dropout would draw another mask.
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
    """Pickle the class that this one extends, which can be imported, and the values."""
    return _rebuild, (type(self).__mro__[1], dict(self))


def _rebuild(cls: type, values: dict[str, Any]) -> Any:
    prepare(cls)
    return _EXTENDED[cls](**values)
