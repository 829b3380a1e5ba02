"""What the tests know of each op: how its arguments are made of a drawn case, and its reference."""

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


@dataclass(frozen=True)
class Case:
    """One drawn use of an op. Values come from a seed; Hypothesis draws what can go wrong: form."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    weight_dtype: torch.dtype | None = None
    bias_dtype: torch.dtype | None = None
    residual_dtype: torch.dtype | None = None
    eps: float = 1e-6
    offset: float = 0.0
    casting_mode: str = "llama"
    num_groups: int = 1
    layout: str = "contiguous"
    dy_layout: str = "contiguous"
    has_ds: bool = True
    output_mask: tuple[bool, ...] = (True, True, True)
    tile: tuple[int, int] | None = None
    scale: float = 1.0
    shift: float = 0.0
    seed: int = 0

    def tensors(self, op: OpUnderTest) -> Tensors:
        """x, weight, bias, residual, dy, ds on the device under test, or the op's own."""
        if op.tensors is not None:
            return op.tensors(self)
        generator = torch.Generator().manual_seed(self.seed)
        columns = (self.shape[op.parameter_dim],)

        def draw(
            shape: tuple[int, ...], dtype: torch.dtype | None, layout: str = "contiguous"
        ) -> Tensor | None:
            values = torch.randn(shape, generator=generator)
            if dtype is None:
                return None
            return laid_out(values.to(DEVICE, dtype), layout)

        x = torch.randn(self.shape, generator=generator) * self.scale + self.shift * self.scale
        s_dtype = self.dtype
        if op.name == "fused_add_rms_norm" and self.residual_dtype is not None:
            s_dtype = torch.promote_types(self.dtype, self.residual_dtype)
        return {
            "x": laid_out(x.to(DEVICE, self.dtype), self.layout),
            "weight": draw(columns, self.weight_dtype),
            "bias": draw(columns, self.bias_dtype),
            "residual": draw(self.shape, self.residual_dtype, self.layout),
            "dy": draw(self.shape, s_dtype, self.dy_layout),
            "ds": draw(self.shape, s_dtype if self.has_ds else None, self.layout),
        }


def laid_out(values: Tensor, layout: str) -> Tensor:
    """The same values with other strides."""
    if layout == "contiguous" or values.numel() == 0:
        return values
    if layout == "transposed":
        return values.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "model":
        # The heads of a projection: (B, S, heads, D) seen as (B, heads, S, D).
        return values.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "sliced":
        # Neither the start nor the rows are aligned.
        wide = values.new_full((*values.shape[:-1], values.shape[-1] + 3), float("nan"))
        wide[..., 1:-2] = values
        return wide[..., 1:-2]
    if layout == "expanded":
        return values.flatten()[0].expand(values.shape)
    raise ValueError(f"laid_out: layout must be a known one, got {layout!r}")


@dataclass(frozen=True)
class OpUnderTest:
    """An op: its arguments and its backward op's, in the order of the schema."""

    name: str
    parameter_dim: int
    forward_args: Callable[[Case, Tensors], tuple[Any, ...]]
    backward_args: Callable[[Case, Tensors], tuple[Any, ...]]
    # The tensors of forward_args that backward's outputs are the gradients of, in their order.
    gradients_of: tuple[str, ...]
    # Of an op that is no norm: its tensors; a small case of a number of rows; and the largest terms
    # on the way to each output and to each gradient, which op_checks.magnitudes explains.
    tensors: Callable[[Case], Tensors] | None = None
    sample: Callable[..., Case] | None = None
    bounds: Callable[[Case, Tensors], tuple[list[float], list[float]]] | None = None
    # The tensors whose first dimension is that of the rows.
    per_row: tuple[str, ...] = ("x", "residual", "dy", "ds")
    # Whether the backward op takes the output, as rounded, in place of the inputs.
    backward_from_output: bool = False
    # The op of ATen whose autocast rule it has; None if it has none.
    aten: str | None = None

    @property
    def backward_name(self) -> str:
        return f"{self.name}_backward"

    @property
    def definition(self) -> Callable[..., Any]:
        return library.OPS[self.name].definition

    def overload(self, backward: bool = False) -> Any:
        return library.OPS[self.backward_name if backward else self.name].overload

    def kernel(self, folder: str, backward: bool = False) -> Callable[..., Any]:
        return library.OPS[self.backward_name if backward else self.name].kernels[folder]


def softmax_under_test(name: str) -> OpUnderTest:
    """softmax or log_softmax, whose backward op takes y."""
    definition = library.OPS[name].definition

    def tensors(case: Case) -> Tensors:
        generator = torch.Generator().manual_seed(case.seed)
        x, dy = torch.randn((2, *case.shape), generator=generator)
        x = ((x + case.shift) * case.scale).to(DEVICE, case.dtype)
        return {
            "x": laid_out(x, case.layout),
            "y": laid_out(definition(x), case.layout),
            "dy": laid_out(dy.to(DEVICE, case.dtype), case.dy_layout),
        }

    def bounds(case: Case, tensors: Tensors) -> tuple[list[float], list[float]]:
        x, y, dy = (tensors[key].double() for key in ("x", "y", "dy"))
        if x.numel() == 0:
            return [0.0], [0.0]
        # The rounding of x - max(x) is a relative error of its exponential.
        exponent = 1 + (x - x.amax(-1, keepdim=True)).abs()
        if name == "softmax":
            gradient = y * (dy.abs() + (dy * y).abs().sum(-1, keepdim=True))
            return [float((y * exponent).max())], [float(gradient.max())]
        gradient = dy.abs() + y.exp() * dy.abs().sum(-1, keepdim=True)
        return [float((y.abs() + exponent).max())], [float(gradient.max())]

    return OpUnderTest(
        name,
        -1,
        lambda c, t: (t["x"],),
        lambda c, t: (t["dy"], t["y"]),
        ("x",),
        tensors=tensors,
        bounds=bounds,
        per_row=("x", "y", "dy"),
        backward_from_output=True,
        aten=f"{name}.int",
    )


@dataclass(frozen=True)
class RopeCase(Case):
    """A drawn use of rope. shape is q's, dy and ds the gradients of the two results."""

    k_heads: int = 1
    # The shape of cos and sin before (S, R): none, one, or a table for each of the batch.
    tables: str = "none"
    rotary: int = 2
    table_dtype: torch.dtype = torch.float32
    k_layout: str = "contiguous"
    table_layout: str = "contiguous"
    interleaved: bool = False

    def rope_tensors(self) -> Tensors:
        generator = torch.Generator().manual_seed(self.seed)
        B, _, S, D = self.shape
        k_shape = (B, self.k_heads, S, D)
        table_shape = {"none": (), "one": (1,), "batch": (B,)}[self.tables] + (S, self.rotary)

        def draw(shape: tuple[int, ...], dtype: torch.dtype, layout: str) -> Tensor:
            values = torch.randn(shape, generator=generator) * self.scale
            return laid_out(values.to(DEVICE, dtype), layout)

        return {
            "q": draw(self.shape, self.dtype, self.layout),
            "k": draw(k_shape, self.dtype, self.k_layout),
            "cos": draw(table_shape, self.table_dtype, self.table_layout),
            "sin": draw(table_shape, self.table_dtype, "contiguous"),
            "dy": draw(self.shape, self.dtype, self.dy_layout),
            "ds": draw(k_shape, self.dtype, self.k_layout),
        }


def rope_sample(dtype: torch.dtype, rows: int, **form: Any) -> RopeCase:
    """`rows` batches of a partial rotation, with tables for each; k laid out as in a model."""
    options = {"k_heads": 1, "tables": "batch", "rotary": 4, "k_layout": "model"}
    return RopeCase((rows, 2, 4, 6), dtype, table_dtype=dtype, **options, **form)


def rope_bounds(case: Case, tensors: Tensors) -> tuple[list[float], list[float]]:
    def largest(name: str) -> float:
        values = tensors[name].double()
        return float(values.abs().max()) if values.numel() else 0.0

    turn = largest("cos") + largest("sin")
    forward, backward = (
        [largest(name) * turn for name in names] for names in (("q", "k"), ("dy", "ds"))
    )
    return forward, backward


OPS = {
    op.name: op
    for op in (
        OpUnderTest(
            "rms_norm",
            -1,
            lambda c, t: (t["x"], t["weight"], c.eps, c.offset, c.casting_mode),
            lambda c, t: (t["dy"], t["x"], t["weight"], c.eps, c.offset, list(c.output_mask[:2])),
            ("x", "weight"),
            aten="rms_norm",
        ),
        OpUnderTest(
            "fused_add_rms_norm",
            -1,
            lambda c, t: (t["x"], t["residual"], t["weight"], c.eps, c.offset, c.casting_mode),
            lambda c, t: (
                t["dy"],
                t["ds"],
                (t["x"] + t["residual"]),
                t["weight"],
                c.eps,
                c.offset,
                list(c.output_mask[:2]),
            ),
            ("x", "weight"),
            aten="rms_norm",
        ),
        OpUnderTest(
            "layer_norm",
            -1,
            lambda c, t: (t["x"], t["weight"], t["bias"], c.eps),
            lambda c, t: (t["dy"], t["x"], t["weight"], t["bias"], c.eps, list(c.output_mask)),
            ("x", "weight", "bias"),
            aten="layer_norm",
        ),
        OpUnderTest(
            "group_norm",
            1,
            lambda c, t: (t["x"], c.num_groups, t["weight"], t["bias"], c.eps),
            lambda c, t: (
                t["dy"],
                t["x"],
                c.num_groups,
                t["weight"],
                t["bias"],
                c.eps,
                list(c.output_mask),
            ),
            ("x", "weight", "bias"),
            aten="group_norm",
        ),
        softmax_under_test("softmax"),
        softmax_under_test("log_softmax"),
        OpUnderTest(
            "rope",
            -1,
            lambda c, t: (t["q"], t["k"], t["cos"], t["sin"], c.interleaved),
            lambda c, t: (
                t["dy"],
                t["ds"],
                t["cos"],
                t["sin"],
                c.interleaved,
                list(c.output_mask[:2]),
            ),
            ("q", "k"),
            tensors=RopeCase.rope_tensors,
            sample=rope_sample,
            bounds=rope_bounds,
            per_row=("q", "k", "dy", "ds"),
        ),
    )
}


def public(name: str) -> Callable[..., Any]:
    return getattr(liger_ops, name)
