"""Logits that are not computed unless something needs them, and their removal from a forward's
output.

The head of a model returns `DeferredLogits` for hidden states, and the model's own code works with
them as with any tensor: they are a tensor without memory, and PyTorch passes every function that is
called on them to `__torch_function__`. The operations that `linear_cross_entropy` computes too are
recorded: a positive factor, tanh, a cast to float32, a bias per class, and the selection and shape
of rows. `cross_entropy` of the result calls the op. Any other function computes the logits: the
head is called, PyTorch's own functions apply the recorded operations to its output, and the
function is called with the result.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import sys
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from ...torch_private import make_wrapper_subclass
from .deferral import NOT_RECORDED, Deferral
from .head_call import TAKEN


class DeferredLogits(Tensor):
    """The logits of a `Deferral`: a tensor of their shape, dtype and device, without data."""

    __slots__ = ("_liger_ops_deferral",)

    _liger_ops_deferral: Deferral

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is F.cross_entropy:
            return cross_entropy(*args, **kwargs)
        name = ANSWERED.get(function)
        if name is not None and (not kwargs or name in WITH_OPTIONS):
            logits, others = args[0], args[1:]
            if name == "add" and len(args) == 2 and not isinstance(logits, DeferredLogits):
                others, logits = args[:1], args[1]
            if isinstance(logits, DeferredLogits):
                deferral = logits._liger_ops_deferral
                result = getattr(deferral, name)(*others, **kwargs)
                if result is deferral:
                    return logits
                if isinstance(result, Deferral):
                    return tensor_of(result)
                if result is not NOT_RECORDED:
                    return result
        if len(args) == 2 and args[1] is None and function_name(function) in ("eq", "ne"):
            return function_name(function) == "ne"
        return call_computed(function, args, kwargs)


class _Wrapper(DeferredLogits):
    """Deferred logits that raise in code below `__torch_function__`, such as a C++ extension.

    Eager code alone uses this class: Dynamo traces no class with a `__torch_dispatch__`, and its
    graphs contain no such code.
    """

    __slots__ = ()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        raise RuntimeError(TAKEN.format("code beneath PyTorch's functions"))

    # isinstance(logits, DeferredLogits) still holds, because isinstance looks at type() first.
    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return Tensor


for _class in (DeferredLogits, _Wrapper):
    # Code that prints or compares the name of a tensor's class sees torch.Tensor.
    _class.__name__, _class.__qualname__, _class.__module__ = "Tensor", "Tensor", "torch"


def tensor_of(deferral: Deferral) -> DeferredLogits:
    """Return the tensor without data that stands for the logits of a deferral."""
    # Where the shape or dtype is not known yet, that of the hidden states fills in: code that
    # reads it is answered by `__torch_function__`, which computes the logits.
    shape, dtype, hidden = deferral.shape(), deferral.dtype(), deferral.hidden
    shape = hidden.shape if shape is NOT_RECORDED else shape
    dtype = hidden.dtype if dtype is NOT_RECORDED else dtype
    if torch.compiler.is_dynamo_compiling():
        # Dynamo cannot make a wrapper subclass. Nothing reads these elements, so that the compiled
        # graph drops them.
        logits = hidden.new_full(shape, math.nan, dtype=dtype).as_subclass(DeferredLogits)
    else:
        logits = make_wrapper_subclass(_Wrapper, shape, dtype=dtype, device=hidden.device)
    logits._liger_ops_deferral = deferral
    return logits


def deferral_of(value: Any) -> Deferral | None:
    """Return the deferral of deferred logits, or None for any other value."""
    return value._liger_ops_deferral if isinstance(value, DeferredLogits) else None


# PyTorch function -> the method of Deferral that answers it.
ANSWERED: dict[Any, str] = {
    **{getattr(Tensor, name).__get__: name for name in ("shape", "dtype", "device", "ndim")},
    **{
        getattr(Tensor, name): name
        for name in (
            "dim", "size", "__len__", "tanh", "contiguous", "to", "float", "reshape", "view",
            "flatten", "__getitem__",
        )
    },
    **dict.fromkeys(
        (torch.mul, torch.multiply, operator.mul, Tensor.mul, Tensor.multiply, Tensor.__mul__,
         Tensor.__rmul__), "mul",
    ),
    **dict.fromkeys(
        (torch.div, torch.divide, torch.true_divide, operator.truediv, Tensor.div, Tensor.divide,
         Tensor.true_divide, Tensor.__truediv__), "div",
    ),
    **dict.fromkeys(
        (torch.add, operator.add, Tensor.add, Tensor.__add__, Tensor.__radd__), "add"
    ),
    torch.tanh: "tanh", torch.reshape: "reshape", torch.flatten: "flatten",
    operator.getitem: "__getitem__", Tensor.ndimension: "dim",
}  # fmt: skip


# The methods of Deferral that take keyword arguments.
WITH_OPTIONS = ("to", "size", "flatten")


def function_name(function: Any) -> str:
    """Return the name of a function, a method or an attribute of tensors."""
    name = getattr(function, "__name__", "a function")
    if name in ("__get__", "__set__"):
        name = function.__self__.__name__
    return name.strip("_") if name.startswith("__") else name


def call_computed(function: Any, args: Any, kwargs: Any) -> Any:
    """Compute the deferred logits among the arguments, and call the function with them."""
    operands = tuple(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
    for argument in pytree.tree_leaves((args, kwargs)):
        if isinstance(argument, DeferredLogits):
            reason = f"its forward applies {function_name(function)} to its logits"
            argument._liger_ops_deferral.compute(reason, operands)
    args, kwargs = pytree.tree_map_only(
        DeferredLogits, lambda argument: argument._liger_ops_deferral.value, (args, kwargs)
    )
    return function(*args, **kwargs)


def cross_entropy(
    input: Any, target: Any, weight: Any = None, size_average: Any = None,
    ignore_index: int = -100, reduce: Any = None,
    reduction: str = "mean", label_smoothing: float = 0.0,
) -> Tensor:  # fmt: skip
    """Compute torch.nn.functional.cross_entropy of deferred logits, by the op where it can."""
    options = {
        "ignore_index": ignore_index,
        "reduction": reduction,
        "label_smoothing": label_smoothing,
    }
    logits = deferral_of(input)
    plain = weight is None and size_average is None and reduce is None
    labels = isinstance(target, Tensor) and target.dim() == 1 and target.dtype is torch.int64
    if plain and labels and logits is not None and logits.dim() == 2:
        logits.call.check_gradient()
        logits.call.check_class(lambda value: isinstance(value, DeferredLogits))
        loss: Tensor = logits.call.head.loss(logits, target, options)
        return loss
    others = {"weight": weight, "size_average": size_average, "reduce": reduce}
    loss = call_computed(F.cross_entropy, (input, target), {**others, **options})
    return loss


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

    A dataclass, such as a ModelOutput of transformers, gets a subclass with three more fields; any
    other class takes more values as it is.
    """
    if cls in _EXTENDED:
        return
    if not dataclasses.is_dataclass(cls):
        _EXTENDED[cls] = cls
        return
    if any(field.name == "logits" for field in dataclasses.fields(cls)):
        _SKIPPING[cls] = _class_without_logits(cls)
    fields = dict.fromkeys(("token_accuracy", "predicted_tokens", "z_loss"), "Tensor | None")
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
