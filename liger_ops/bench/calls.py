"""One provider's call of a workload, cut into what is prepared and what is timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .workloads.entry import Function, as_tuple


@dataclass
class Call:
    """A function, its arguments, and the gradients of what it returns."""

    function: Function
    tensors: Sequence[Tensor]
    dys: Sequence[Tensor]

    def forward(self) -> tuple[Tensor, ...]:
        """A forward in training: autograd records it."""
        return as_tuple(self.function(*self.tensors))

    def backward(self, outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        leaves = [tensor for tensor in self.tensors if tensor.requires_grad]
        return torch.autograd.grad(outputs, leaves, self.dys)

    def full(self) -> tuple[Tensor, ...]:
        return self.backward(self.forward())

    def results(self) -> list[Tensor]:
        """The outputs and the gradients; from here on the gradients given have outputs' dtypes."""
        outputs = self.forward()
        pairs = zip(self.dys, outputs, strict=True)
        self.dys = [dy.to(y.dtype) for dy, y in pairs]
        return [*(y.detach() for y in outputs), *self.backward(outputs)]

    def prepared(self, mode: str) -> Callable[[], Any]:
        """What is to be timed; of a backward, the forward has run, once for every time."""
        if mode == "forward":
            return self.forward
        if mode == "full":
            return self.full
        outputs = self.forward()
        return lambda: self.backward(outputs)


def copied(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The same values, strides and demands of a gradient."""
    return [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]
