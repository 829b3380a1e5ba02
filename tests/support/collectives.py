"""The collectives of a computation on sharded tensors, and how much they move."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode


class Collectives(TorchDispatchMode):
    """Records each functional collective of a device: its name, and the bytes that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # DTensor calls the collectives, and its ops on a device's tensors, itself.
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if func.namespace == "_c10d_functional" and isinstance(args[0], Tensor):
            name = func._schema.name.split("::")[1]
            if name not in ("wait_tensor", "_wrap_tensor_autograd"):
                self.found.append((name, args[0].numel() * args[0].element_size()))
        return func(*args, **(kwargs or {}))


def recorded(function: Any) -> tuple[Any, list[tuple[str, int]]]:
    """What a function returns, and the collectives that it ran."""
    with Collectives() as collectives:
        result = function()
    return result, collectives.found
