"""The record of an op, the check for arguments that no op accepts: None for a required tensor, and
tensors that are not dense; and the error of an index that is out of range."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from .accepted import Options
from .torch_private import NestedTensor

Function = TypeVar("Function", bound=Callable[..., Any])

# The keys of nested tensors, which no op takes. PyTorch's own error is long and names no op.
NESTED_KEYS = ("NestedTensorCPU", "NestedTensorCUDA", "NestedTensorPrivateUse1")


class OutOfRangeError(IndexError):
    """Raised by a definition whose argument has an index that is out of range.

    Definitions call those of other ops: the message names the op of the outermost one, which the
    user called.
    """

    def __init__(self, argument: str, accepted: str, found: object) -> None:
        super().__init__(argument, accepted, found)
        self.op = ""

    def __str__(self) -> str:
        argument, accepted, found = self.args
        op = f"{self.op}: " if self.op else ""
        return f"{op}{argument} must be {accepted}, got one that is not: {found}"


@contextmanager
def looked_up(argument: str, accepted: str) -> Iterator[None]:
    """Raise OutOfRangeError where PyTorch refuses an index that comes from this argument."""
    try:
        yield
    except (IndexError, RuntimeError) as error:
        # Under vmap, and of no rows, PyTorch refuses one by RuntimeError.
        texts = ("out of bounds", "indexing axis dim should be positive")
        if not isinstance(error, IndexError) and not any(text in str(error) for text in texts):
            raise
        raise OutOfRangeError(argument, accepted, error) from None


def named_in_errors(name: str, definition: Function) -> Function:
    """Wrap the definition of op `name` to name the op in an `OutOfRangeError`."""
    # Users call the op without `_forward` in its name.
    name = name.removesuffix("_forward")

    @functools.wraps(definition)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return definition(*args, **kwargs)
        except OutOfRangeError as error:
            error.op = name
            raise

    return run  # type: ignore[return-value]


@dataclass
class Op:
    """An op: its PyTorch overload, which has the schema, and the functions that implement it."""

    name: str
    definition: Callable[..., Any]
    custom_op: torch.library.CustomOpDef
    overload: Any
    # The type of `call`: the named tuple of the arguments.
    arguments: type[Any]
    # Raises TypeError for arguments that no op accepts.
    refuse: Callable[[Sequence[Any], Mapping[str, Any]], None]
    # Arguments of `library.define`, which describes them.
    tags: torch.Tag | tuple[torch.Tag, ...]
    axes: str
    dtype: str
    options: Options
    axes_of_call: Callable[[Any, str], str] | None
    # Checks a call and allocates its outputs.
    fake: Callable[[Any], Any] | None = None
    # Device -> the function that runs the op there, and the function that sets its kernel.
    kernels: dict[str, Callable[..., Any]] = field(default_factory=dict)
    install: dict[str, Callable[..., None]] = field(default_factory=dict)
    # Cache: bits of a call's dispatch keys -> the device's kernel, for calls that nothing but
    # Autograd intercepts. It starts with the device's own key, and `autograd.register` adds keys.
    # The dispatcher would take 3 us to find the kernel.
    entries: dict[int, Callable[..., Any]] = field(default_factory=dict)
    # The `autograd.Formula` of which the next two are methods; None if they were written by hand.
    formula: Any = None
    backward: Callable[..., tuple[Tensor | None, ...]] | None = None
    setup_context: Callable[[Any, Any, Any], None] | None = None
    # Counts the FLOPs of a call, for a definition that computes its products as sums.
    flops: Callable[[Any], int] | None = None

    @property
    def schema(self) -> Any:
        return self.overload._schema

    @property
    def differentiable(self) -> bool:
        return self.backward is not None

    def check_and_allocate(self, *args: Any, **kwargs: Any) -> Any:
        self.refuse(args, kwargs)
        return None if self.fake is None else self.fake(self.arguments(*args, **kwargs))

    def check_and_define(self, *args: Any, **kwargs: Any) -> Any:
        """Run the definition after the argument checks that also precede a kernel."""
        self.check_and_allocate(*args, **kwargs)
        return self.definition(*args, **kwargs)

    def fill_without_rows(
        self, call: Any, required: Sequence[Tensor], outputs: Sequence[Tensor | None]
    ) -> None:
        """Fill the outputs of a call of which a required tensor is empty, as the definition does.
        `required` are the call's required tensors."""
        if self.name.endswith("_backward") and not any(tensor.numel() for tensor in required):
            # A gradient is then a sum of no terms. The definition would compute it in float32,
            # which takes twice the memory of an embedding's weight.
            for output in outputs:
                if output is not None:
                    output.zero_()
        elif any(output is not None and output.numel() for output in outputs):
            results = self.definition(*call)
            listed = results if isinstance(results, tuple) else (results,)
            for output, result in zip(outputs, listed, strict=True):
                if output is not None:
                    output.copy_(result)


def refusal(name: str, schema: Any) -> Callable[[Sequence[Any], Mapping[str, Any]], None]:
    """Return a function that takes the positional and keyword arguments of op `name`, and raises
    TypeError for the first tensor argument that no op accepts."""
    # Users call the op without `_forward` in its name.
    name = name.removesuffix("_forward")
    tensors = [
        (i, argument.name, str(argument.type) == "Tensor")
        for i, argument in enumerate(schema.arguments)
        if str(argument.type) in ("Tensor", "Optional[Tensor]")
    ]

    def refuse(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        for i, argument, is_required in tensors:
            value = args[i] if i < len(args) else kwargs.get(argument)
            if value is None:
                if is_required:
                    raise TypeError(f"{name}: {argument} must be a tensor, got None")
            elif isinstance(value, Tensor):
                kind = "a nested tensor" if value.is_nested else "a tensor"
                if value.is_nested or value.layout is not torch.strided:
                    raise TypeError(
                        f"{name}: {argument} must be a dense tensor, of layout torch.strided,"
                        f" got {kind} of layout {value.layout}"
                    )

    return refuse


def refuse_nested(op: Op) -> None:
    """Register the op to raise for nested tensors, which would not reach its checks."""

    def refuse(cls: Any, function: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        op.refuse(args, kwargs or {})
        # Not reached unless the nested tensor is in a list, which `refuse` does not look into.
        return NotImplemented

    op.custom_op.register_torch_dispatch(NestedTensor, refuse)
    for key in NESTED_KEYS:
        op.custom_op._lib.impl(op.name, op.check_and_define, key)
