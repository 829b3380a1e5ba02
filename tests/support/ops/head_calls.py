"""Calls of linear_cross_entropy with gradients, and the ops that they dispatch."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import liger_ops
import simulated_npu
from liger_ops import library
from linear_cross_entropy_cases import HeadCase, options_of, tensors_of

EVERY_DTYPE = pytest.mark.parametrize(
    "dtype", (torch.float64, torch.float32, torch.bfloat16, torch.float16)
)
FORWARD = library.OPS["linear_cross_entropy_forward"]
BACKWARD = library.OPS["linear_cross_entropy_backward"]
MASKS = list(itertools.product((False, True), repeat=3))


def leaves(case: HeadCase) -> tuple[list[Any], list[Tensor]]:
    """Return the arguments of the op, and those of x, weight and bias that require gradients."""
    args = [*tensors_of(case), *options_of(case)]
    for i in (0, 1, 3):
        if args[i] is not None:
            args[i] = args[i].detach().clone().requires_grad_()
    return args, [args[i] for i in (0, 1, 3) if args[i] is not None]


def call(args: list[Any]) -> Tensor:
    return liger_ops.linear_cross_entropy(*args)


class Calls(TorchDispatchMode):
    """Records the ops that reach the dispatcher, and the bytes of the largest tensor they make."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, list[Any]]] = []
        self.largest = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.calls.append((func._schema.name, list(args)))
        if func is torch.ops.liger.linear_cross_entropy.default:
            # In inference mode the op has not been decomposed yet.
            with self:
                return func.decompose(*args, **(kwargs or {}))
        outputs = func(*args, **(kwargs or {}))
        for output in outputs if isinstance(outputs, tuple) else (outputs,):
            if isinstance(output, Tensor) and not getattr(func, "is_view", False):
                memory = simulated_npu.to_cpu(output).untyped_storage()
                self.largest = max(self.largest, memory.nbytes())
        return outputs

    def arguments(self, op: str) -> list[list[Any]]:
        return [args for name, args in self.calls if name == f"liger::{op}"]

    def masks(self, op: str) -> list[list[bool]]:
        """Return the gradient masks of an op's calls."""
        arguments = library.OPS[op].arguments
        return [list(arguments(*args).gradient_mask) for args in self.arguments(op)]

    def recomputed(self) -> list[list[bool]]:
        """Return, for each backward that recomputes logits, which gradients it computes."""
        missing = []
        for args in self.arguments("linear_cross_entropy_backward"):
            call = BACKWARD.arguments(*args)
            computed = (call.dx, call.dweight, call.dbias, call.dlora_x, call.dlora_b)
            pairs = zip(call.output_mask, computed, strict=True)
            missing.append([wanted and gradient is None for wanted, gradient in pairs])
        return [mask for mask in missing if any(mask)]
