"""What the tests have to know of an op, whatever it computes.

A family of ops, such as `norms.py` or `activations.py`, subclasses Case with its options and makes
an OpUnderTest an op; `op_table.py` lists them all.
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
# The folders whose kernels run here: both interpreted on a CPU, a device's own on the device.
FOLDERS = ("cuda", "npu") if DEVICE == "cpu" else (DEVICE,)
if "npu" in FOLDERS:
    import liger_ops.lowering.npu

X_LAYOUTS = ("contiguous", "transposed", "sliced")
DY_LAYOUTS = (*X_LAYOUTS, "expanded")

Tensors = dict[str, Tensor | None]
# Of every element, or of all of a tensor.
Magnitude = Tensor | float


@dataclass(frozen=True, kw_only=True)
class Case:
    """One drawn use of an op. Values come from a seed; Hypothesis draws what can go wrong: form."""

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
    """Tensors of normally distributed values, in turn from one seed."""

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
        """None without a dtype; the values of the tensors after it are the same."""
        values = torch.randn(shape, generator=self.generator) * scale + shift * scale
        return None if dtype is None else laid_out(values.to(DEVICE, dtype), layout)


def laid_out(values: Tensor, layout: str) -> Tensor:
    """The same values with other strides."""
    if layout == "contiguous" or values.numel() == 0:
        return values
    if layout == "transposed":
        return values.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "model":
        # The heads of a projection: (B, S, heads, D) seen as (B, heads, S, D).
        return values.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "strided":
        # A stride of 2 in the last dimension, as that of the real parts of complex numbers.
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
    """An op, or one form of it: its arguments and its backward op's, in the order of the schema."""

    name: str
    # Beside the name, where an op has several forms.
    form: str = ""
    # The tensors of a case, dy and any other gradient that backward takes among them.
    tensors: Callable[[Any], Tensors]
    forward_args: Callable[[Any, Tensors], tuple[Any, ...]]
    backward_args: Callable[[Any, Tensors], tuple[Any, ...]]
    # The tensors of forward_args that backward's outputs are the gradients of, in their order.
    gradients_of: tuple[str, ...]
    # How many arguments a call has at the least, where more than those without a default.
    needed: int = 0
    # The names of the incoming gradients, in the order of the outputs. Outputs after those have
    # none.
    gradients_from: tuple[str, ...] = ("dy",)
    # The arguments, tensors, that have no gradient.
    no_gradient: tuple[str, ...] = ()
    # What the inputs of the forward are, of which backward's arguments were made.
    seen_by_backward: Callable[[Any, Tensors], Tensors] = as_they_are
    # Whether backward takes the output, as rounded, in place of the inputs.
    backward_from_output: bool = False
    # The largest terms that are summed or cancelled on the way to each output, and to each gradient
    # of gradients_of. Where they cancel, the result is smaller than the rounding errors of what it
    # was made of.
    output_magnitudes: Callable[[Any, Tensors], list[Magnitude]]
    gradient_magnitudes: Callable[[Any, Tensors], list[Magnitude]]
    # Whether each element is for itself, and held to its own error, or to its row's largest.
    elementwise: bool = False
    # A small case: (dtype, rows, further fields of the family's Case).
    sample: Callable[..., Any]
    # The tensors whose first dimension is one of independent rows.
    per_row: tuple[str, ...]
    # The arguments that give the others' shape.
    leading: tuple[str, ...]
    # Whether it multiplies matrices, whose sums are in another order for other strides.
    multiplies: bool = False
    # The ATen op whose autocast rule it has, or, like it, has not.
    autocast_as: str

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
        """Whether the i-th argument has a gradient, if it is a tensor."""
        return self.overload()._schema.arguments[i].name not in self.no_gradient

    def results(self, outputs: Any) -> tuple[Tensor, ...]:
        """The outputs that are differentiable."""
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
