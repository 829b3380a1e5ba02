"""The description of an op that the tests need, whatever the op computes.

A family of ops, such as `norm_cases.py` or `activation_cases.py`, subclasses Case with its options
and describes each op by an OpUnderTest; `op_table.py` lists them all.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import liger_ops
from liger_ops import library

DEVICE = os.environ.get("LIGER_OPS_TEST_DEVICE", "cpu")
SIMULATED = os.environ.get("LIGER_OPS_SIMULATED_NPU") == "1"
# Folders whose kernels run here: on a CPU both, interpreted; on a device, its own.
FOLDERS = ("cuda", "npu") if DEVICE == "cpu" else (DEVICE,)
if "npu" in FOLDERS:
    import liger_ops.lowering.npu

X_LAYOUTS = ("contiguous", "transposed", "sliced")
DY_LAYOUTS = (*X_LAYOUTS, "expanded")

Tensors = dict[str, Tensor | None]
# Per element, or for a whole tensor.
Magnitude = Tensor | float


@dataclass(frozen=True, kw_only=True)
class Case:
    """A drawn use of an op. Hypothesis draws shapes, strides and dtypes; a seed gives values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: str = "contiguous"
    dy_layout: str = "contiguous"
    output_mask: tuple[bool, ...] = (True, True, True)
    tile: tuple[int, int] | None = None
    scale: float = 1.0
    shift: float = 0.0
    seed: int = 0


class Values:
    """Tensors of normally distributed values, drawn in sequence from one seed."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def draw(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype | None,
        layout: str = "contiguous",
        scale: float = 1.0,
        shift: float = 0.0,
    ) -> Tensor | None:
        """A tensor, or None without a dtype; later tensors are the same in both cases."""
        values = torch.randn(shape, generator=self.generator) * scale + shift * scale
        return None if dtype is None else laid_out(values.to(DEVICE, dtype), layout)


def laid_out(values: Tensor, layout: str) -> Tensor:
    """The same values with other strides."""
    if layout == "contiguous" or values.numel() == 0:
        return values
    if layout == "transposed":
        return values.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "model":
        # The layout of heads from a projection: (B, S, heads, D) viewed as (B, heads, S, D).
        return values.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "strided":
        # A stride of 2 in the last dimension, as the real parts of complex numbers have.
        return values.repeat_interleave(2, -1)[..., ::2]
    if layout == "sliced":
        # Neither the start nor the rows are aligned.
        wide = values.new_full((*values.shape[:-1], values.shape[-1] + 3), float("nan"))
        wide[..., 1:-2] = values
        return wide[..., 1:-2]
    if layout == "expanded":
        return values.flatten()[0].expand(values.shape)
    raise ValueError(f"laid_out: layout must be a known one, got {layout!r}")


def as_they_are(case: Any, tensors: Tensors) -> Tensors:
    return tensors


@dataclass(frozen=True, kw_only=True, repr=False)
class OpUnderTest:
    """An op, or one form of it. Arguments are in the order of the schemas."""

    name: str
    # Distinguishes the forms of an op that has several.
    form: str = ""
    # Makes the tensors of a case, including dy and other gradients that backward takes.
    tensors: Callable[[Any], Tensors]
    forward_args: Callable[[Any, Tensors], tuple[Any, ...]]
    backward_args: Callable[[Any, Tensors], tuple[Any, ...]]
    # The tensors in forward_args whose gradients backward returns, in order.
    gradients_of: tuple[str, ...]
    # Least number of arguments of a call, if more than those without a default.
    needed: int = 0
    # Names of the incoming gradients, in the order of the outputs. Later outputs have none.
    gradients_from: tuple[str, ...] = ("dy",)
    # Tensor arguments that have no gradient.
    no_gradient: tuple[str, ...] = ()
    # Makes the tensors from which backward's arguments follow.
    seen_by_backward: Callable[[Any, Tensors], Tensors] = as_they_are
    # Whether backward takes the rounded output instead of the inputs.
    backward_from_output: bool = False
    # The largest terms that are summed or cancelled in each output, and in each gradient of
    # gradients_of. If they cancel, the result is smaller than their rounding errors.
    output_magnitudes: Callable[[Any, Tensors], list[Magnitude]]
    gradient_magnitudes: Callable[[Any, Tensors], list[Magnitude]]
    # Whether the error bound is per element; otherwise it depends on the row's largest value.
    elementwise: bool = False
    # Makes a small case from (dtype, rows, further fields of the family's Case).
    sample: Callable[..., Any]
    # Tensors whose first dimension consists of independent rows.
    per_row: tuple[str, ...]
    # Arguments that determine the shape of the others.
    leading: tuple[str, ...]
    # Whether it multiplies matrices, whose summation order depends on strides.
    multiplies: bool = False
    # Whether the forward is a function of PyTorch on every device, and launches no kernel of ours.
    is_pytorchs_forward: bool = False
    # The ATen op whose autocast rule, or absence of one, it shares.
    autocast_as: str
    # The arguments whose dtypes that rule does not change.
    autocast_keeps: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return self.id

    @property
    def id(self) -> str:
        return f"{self.name}-{self.form}" if self.form else self.name

    @property
    def backward_name(self) -> str:
        return f"{self.name.removesuffix('_forward')}_backward"

    @property
    def definition(self) -> Callable[..., Any]:
        return library.OPS[self.name].definition

    def overload(self, backward: bool = False) -> Any:
        return library.OPS[self.backward_name if backward else self.name].overload

    def kernel(self, folder: str, backward: bool = False) -> Callable[..., Any]:
        return library.OPS[self.backward_name if backward else self.name].kernels[folder]

    def has_gradient(self, i: int) -> bool:
        """Whether the i-th argument, if it is a tensor, has a gradient."""
        return self.overload()._schema.arguments[i].name not in self.no_gradient

    def results(self, outputs: Any) -> tuple[Tensor, ...]:
        """The differentiable outputs."""
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return outputs[: len(self.gradients_from)]

    def wants(self, case: Case, i: int) -> bool:
        """Whether the case asks backward for the gradient of gradients_of[i]."""
        arguments = self.overload(backward=True)._schema.arguments
        has_mask = any(argument.name == "output_mask" for argument in arguments)
        return case.output_mask[i] if has_mask else True


def public(name: str) -> Callable[..., Any]:
    return getattr(liger_ops, name)


def max_abs(tensor: Tensor | None, default: float = 0.0) -> float:
    return default if tensor is None or tensor.numel() == 0 else float(tensor.double().abs().max())
