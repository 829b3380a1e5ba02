"""The record of an op."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .accepted import Options


@dataclass
class Op:
    """One op: its PyTorch overload with the schema, and the functions that implement it."""

    name: str
    definition: Callable[..., Any]
    custom_op: torch.library.CustomOpDef
    overload: Any
    # The named tuple type of a call's arguments.
    arguments: type[Any]
    # Raises TypeError for arguments that no op takes.
    refuse: Callable[[Sequence[Any], Mapping[str, Any]], None]
    # Which strides Inductor gives to the inputs.
    strides: torch.Tag
    # What `library.define` was given.
    axes: str | Callable[[Any], str]
    dtype: str
    options: Options
    fake: Callable[[Any], Any] | None = None
    # Device -> the function that runs the op there, and the one that gives it its kernel.
    kernels: dict[str, Callable[..., Any]] = field(default_factory=dict)
    install: dict[str, Callable[..., None]] = field(default_factory=dict)
    # Bits of the dispatch key of a device's dense tensors -> the device's kernel.
    entries: dict[int, Callable[..., Any]] = field(default_factory=dict)
    backward: Callable[..., tuple[Tensor | None, ...]] | None = None
    setup_context: Callable[[Any, Any, Any], None] | None = None
    # The FLOPs of a call, if the definition writes its products as sums.
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
        """Run the definition after the same argument checks as a kernel's."""
        self.check_and_allocate(*args, **kwargs)
        return self.definition(*args, **kwargs)
