"""Count the ops that a call runs, and the bytes that it saves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class Calls(TorchDispatchMode):
    """Counts the ops that run within it, without those of a backward."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "liger" and not func._opname.endswith("backward"):
            self.counts[func._opname] += 1
        return func(*args, **(kwargs or {}))


def called(
    function: Callable[..., Any], *args: Any, **kwargs: Any
) -> tuple[list[Tensor], Counter[str]]:
    """Call a function; return its results, and how often it runs each op."""
    with Calls() as calls:
        result = function(*args, **kwargs)
    return pytree.tree_leaves(result), calls.counts


def saved_bytes(call: Callable[[], Tensor], beside: Iterable[Any]) -> int:
    """Return the bytes that a call saves for its backward, beside these tensors."""
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = call()
    assert y.requires_grad
    own = {one.data_ptr() for one in beside if isinstance(one, Tensor)}
    return sum(size for place, size in saved.items() if place not in own)
