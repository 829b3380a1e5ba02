"""The record of an op."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class Op:
    """One op: its schema as PyTorch knows it, and the Python that implements it."""

    name: str
    definition: Callable[..., Any]
    custom_op: torch.library.CustomOpDef
    overload: Any
    # The type of a call's arguments.
    arguments: Callable[..., Any]
    # Raises for arguments that no op takes.
    refuse: Callable[[Sequence[Any], Mapping[str, Any]], None]
    # The argument whose form the result has, where that is all that the fake would say.
    like: str
    fake: Callable[[Any], Any] | None = None
    kernels: dict[str, Callable[..., Any]] = field(default_factory=dict)
    # What runs the kernels, by the bits of the dispatch keys of dense tensors on their device.
    entries: dict[int, Callable[..., Any]] = field(default_factory=dict)
    backward: Callable[..., tuple[Tensor | None, ...]] | None = None
    setup_context: Callable[[Any, tuple[Any, ...], Any], None] | None = None

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
        """The definition, with the same argument checks as the kernels'."""
        self.check_and_allocate(*args, **kwargs)
        return self.definition(*args, **kwargs)
