"""The entry of an op in the tests: its cases, their tensors and error bounds, and its launch forms.

The file of a family of ops, such as `norm_cases.py` or `activation_cases.py`, has an OpUnderTest
for each form of an op; `op_table.py` lists them all. The cases of Hypothesis, the arguments of the
forward and the backward op, the launches that are compiled, and the npu forms follow from the entry
and from the schemas.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, make_dataclass
from functools import cached_property
from itertools import takewhile
from typing import Any

import pytest
import torch
from torch import Tensor

import liger_ops
from launch_forms import BF16, FP16, FP32, Fields, Forms
from liger_ops import library

DEVICE = os.environ.get("LIGER_OPS_TEST_DEVICE", "cpu")
SIMULATED = os.environ.get("LIGER_OPS_SIMULATED_NPU") == "1"
# The folders of lowering/ whose kernels run here: both on a CPU, interpreted; else the device's.
FOLDERS = ("cuda", "npu") if DEVICE == "cpu" else (DEVICE,)
EVERY_FOLDER = pytest.mark.parametrize("folder", FOLDERS)
EVERY_IMPLEMENTATION = pytest.mark.parametrize("implementation", ("definition", *FOLDERS))
NAN, INF = float("nan"), float("inf")
if "npu" in FOLDERS:
    import liger_ops.lowering.npu
    import torch_npu_stand_in  # noqa: F401

X_LAYOUTS = ("contiguous", "transposed", "sliced")
DY_LAYOUTS = (*X_LAYOUTS, "expanded")
# Stands for the dtype of the case.
SAME = "same"
MISSING = object()
# Sizes of a row: one, odd, prime, around a power of two, and round as in models.
SIZES = (1, 2, 3, 7, 13, 16, 31, 64, 127, 128, 129, 257, 300, 768, 1021)
ROWS = (0, 1, 2, 3, 5, 9)
# Small tiles, so that a program loops over several and a row needs several.
TILES = (None, (1, 16), (2, 16), (4, 64), (1, 64), (2, 1024))

Tensors = dict[str, Tensor | None]
# The size of the largest terms in a result, per element or for a whole tensor.
Magnitude = Tensor | float
# A function that draws one of some values.
Pick = Callable[[Sequence[Any]], Any]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A drawn call of an op, whose options are fields of a subclass. A seed gives the values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: str = "contiguous"
    dy_layout: str = "contiguous"
    output_mask: tuple[bool, ...] = (True, True, True)
    tile: tuple[int, int] | None = None
    scale: float = 1.0
    shift: float = 0.0
    seed: int = 0


# Field of a case -> the values that are drawn, unless the op's entry has its own.
CHOICES: dict[str, Sequence[Any]] = {
    "dtype": (FP32, FP16, BF16),
    "tile": TILES,
    "layout": X_LAYOUTS,
    "dy_layout": DY_LAYOUTS,
    "scale": (1.0, 0.05, 10.0),
}


class Values:
    """Tensors of normally distributed values, drawn in sequence from one seed."""

    def __init__(self, seed: int, dtype: torch.dtype | None = None) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = dtype

    def draw(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype | str | None = SAME,
        layout: str = "contiguous",
        scale: float = 1.0,
        shift: float = 0.0,
    ) -> Tensor | None:
        """Draw a tensor, or return None without a dtype: later tensors are the same either way."""
        values = torch.randn(shape, generator=self.generator) * scale + shift * scale
        dtype = self.dtype if dtype == SAME else dtype
        return None if dtype is None else laid_out(values.to(DEVICE, dtype), layout)


def drawn_for(case: Case, more: int = 0) -> Values:
    """Return the source of a case's values; `more` selects another source."""
    return Values(case.seed + more, case.dtype)


def laid_out(values: Tensor, layout: str) -> Tensor:
    """Return the same values with the strides of a layout."""
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


def leading_shape(pick: Pick) -> tuple[int, ...]:
    """Draw the dimensions before a row: none, one or two with few rows or none, or three."""
    few = (1, 2)
    sizes = pick(((), (ROWS,), (few, ROWS), (few, few, few)))
    return tuple(pick(values) for values in sizes)


def drawn_rows(pick: Pick, fields: Fields) -> Fields:
    """Draw the shape of rows of any size, with any dimensions before them."""
    return {"shape": (*leading_shape(pick), pick(sizes(fields["tile"])))}


def sizes(tile: tuple[int, int] | None) -> list[int]:
    # The interpreter's time grows with the number of tiles, by a few milliseconds each.
    return [n for n in SIZES if tile is None or n <= 5 * tile[1]]


def nothing(case: Any, tensors: Tensors) -> list[Magnitude]:
    return []


@dataclass(frozen=True, kw_only=True, repr=False)
class OpUnderTest:
    """An op, or one form of it.

    The arguments of the op and its backward follow from their schemas: each is found by its name in
    `computed`, in `tensors` or among the fields of the case.
    """

    name: str
    # Distinguishes the forms of an op that has several.
    form: str = ""
    # Field of a case -> the values that Hypothesis draws. The first is the default.
    choices: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    # The type of the cases, if it is not made from the choices.
    case_type: Any = None
    # Draws the fields that depend on others.
    coupled: Callable[[Pick, Fields], Fields] = drawn_rows
    # Makes the tensors of a case, including dy and other gradients that backward takes.
    tensors: Callable[[Any], Tensors]
    # Argument -> its value, if that is neither one of `tensors` nor a field of a case.
    computed: Mapping[str, Callable[[Any, Tensors], Any]] = field(default_factory=dict)
    # A small case with every option in use: its shape for a number of rows, and its fields, or
    # functions of its dtype.
    sample_shape: Callable[[int], tuple[int, ...]] = lambda rows: (rows, 2, 7)
    sampled: Fields = field(default_factory=dict)
    # Further cases in which both kernels are compared with float64, by their ids.
    cases: Mapping[str, Fields] = field(default_factory=dict)
    # The cases to lower, plan and run npu kernels with, and those to compile cuda kernels with, in
    # float32 and bfloat16.
    forms: Forms
    compiled: Sequence[Fields] = ()

    # The least number of arguments of a call, if more than those without a default.
    needed: int = 0
    # The tensors whose gradients backward returns, in order, if its results do not name them and
    # they are not the op's first.
    gradients: tuple[str, ...] = ()
    # Tensor arguments that have no gradient.
    no_gradient: tuple[str, ...] = ()
    # Returns the tensors that backward sees, if they differ from the forward's, such as a sum that
    # the forward has rounded and stored.
    seen_by_backward: Callable[[Any, Tensors], Tensors] = lambda case, tensors: tensors
    # The largest terms that are summed or cancelled in each output, and in each gradient of
    # gradients_of. If they cancel, the result is smaller than their rounding errors. Without any,
    # the op's own test has bounds.
    output_magnitudes: Callable[[Any, Tensors], Sequence[Magnitude | None]] = nothing
    gradient_magnitudes: Callable[[Any, Tensors], list[Magnitude]] = nothing
    # Whether the error bound is per element; otherwise it depends on the row's largest value.
    elementwise: bool = False
    # Tensors whose first dimension consists of independent rows, if not all that have the rows of
    # the sample; and whether the order of a case's rows does not change a bit of their results.
    rowwise: tuple[str, ...] | None = None
    rows_permute: Callable[[Any], bool] = lambda case: True
    # Arguments that determine the shape of the others, if not the first alone.
    shaping: tuple[str, ...] | None = None
    # Whether the first result is computed from the others with factors that are constants of the
    # gradient, which is then not the derivative of its values.
    constant_factors: bool = False
    # How many times fewer cases are drawn, of an op whose interpreted kernels are slow.
    cost: int = 1
    # Whether it multiplies matrices, whose summation order depends on strides.
    multiplies: bool = False
    # Whether the forward is PyTorch's own on every device, and launches no kernel of this package.
    is_pytorchs_forward: bool = False
    # Whether an NPU runs the definition for the sample, which has options that its operator lacks.
    npu_runs_definition: bool = False
    # The ATen op whose autocast rule, or lack of a rule, the op shares.
    autocast_as: str
    # The arguments whose dtypes that rule does not change.
    autocast_keeps: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return self.id

    @property
    def id(self) -> str:
        """The name in the table: of the op, and of its form if it has several."""
        return f"{self.name}-{self.form}" if self.form else self.name

    @property
    def base(self) -> str:
        """The name of the op that a user calls."""
        return self.name.removesuffix("_forward")

    @property
    def backward_name(self) -> str:
        return f"{self.base}_backward"

    @property
    def definition(self) -> Callable[..., Any]:
        return library.OPS[self.name].definition

    def overload(self, backward: bool = False) -> Any:
        return library.OPS[self.backward_name if backward else self.name].overload

    def kernel(self, folder: str, backward: bool = False) -> Callable[..., Any]:
        return library.OPS[self.backward_name if backward else self.name].kernels[folder]

    @cached_property
    def case(self) -> Callable[..., Any]:
        """The type of the op's cases."""
        if self.case_type is not None:
            return self.case_type
        options = {name: values[0] for name, values in self.choices.items()}
        mask = ("output_mask", Any, (True,) * max(3, len(self.gradients_of)))
        fields = [mask, *((name, Any, field(default=value)) for name, value in options.items())]
        return make_dataclass(self.name, fields, bases=(Case,), frozen=True, kw_only=True)

    def sample(self, dtype: torch.dtype = torch.float64, rows: int = 3, **form: Any) -> Any:
        """Return a small case with every option in use, changed by the fields `form`."""
        sampled = {name: v(dtype) if callable(v) else v for name, v in self.sampled.items()}
        fields = {"shape": self.sample_shape(rows), "dtype": dtype, **sampled}
        return self.case(**fields | form)

    @cached_property
    def gradients_of(self) -> tuple[str, ...]:
        """The names of the tensors whose gradients backward returns, in order."""
        returns = self.overload(backward=True)._schema.returns
        if self.gradients:
            return self.gradients
        if returns[0].name:
            return tuple(result.name[1:] for result in returns)
        return self.tensor_arguments[: len(returns)]

    @cached_property
    def tensor_arguments(self) -> tuple[str, ...]:
        arguments = self.overload()._schema.arguments
        return tuple(a.name for a in arguments if "Tensor" in str(a.type))

    @cached_property
    def gradients_from(self) -> tuple[str, ...]:
        """The names of the incoming gradients, in the order of the outputs they belong to."""
        names = (argument.name for argument in self.overload(backward=True)._schema.arguments)
        return tuple(takewhile(lambda name: name.startswith("d"), names))

    @cached_property
    def backward_from_output(self) -> bool:
        """True if backward takes the rounded output instead of the inputs."""
        names = {argument.name for argument in self.overload(backward=True)._schema.arguments}
        return not names & set(self.tensor_arguments)

    @cached_property
    def leading(self) -> tuple[str, ...]:
        """The tensors that determine the shape of the others."""
        return self.tensor_arguments[:1] if self.shaping is None else self.shaping

    @cached_property
    def per_row(self) -> tuple[str, ...]:
        """The tensors whose first dimension consists of independent rows."""
        if self.rowwise is not None:
            return self.rowwise
        # Values are drawn on the CPU, whatever the default device is.
        with torch.device("cpu"):
            few, many = [self.tensors(self.sample(torch.float32, rows=rows)) for rows in (3, 5)]
        return tuple(
            name
            for name, value in few.items()
            if value is not None and value.shape[:1] != many[name].shape[:1]
        )

    def forward_args(self, case: Any, tensors: Tensors) -> tuple[Any, ...]:
        return self._arguments(False, case, tensors)

    def backward_args(self, case: Any, tensors: Tensors) -> tuple[Any, ...]:
        return self._arguments(True, case, tensors)

    def public_arguments(self, case: Any) -> dict[str, Any]:
        """Return the arguments of the op that a user calls, by name, as far as this op has them.

        Tensors with a gradient require it. A head's LoRA is left out: the user's op takes its
        factors, and this op takes lora_x, which is computed from one.
        """
        names = [name for name, _ in self._names_and_defaults[False]]
        values = dict(zip(names, self.forward_args(case, self.tensors(case)), strict=True))
        for name in self.gradients_of:
            values[name] = None if values[name] is None else values[name].detach().requires_grad_()
        wanted = inspect.signature(public(self.base)).parameters
        products = {name.replace("lora_x", "lora_b") for name in names if "lora_x" in name}
        return {name: values[name] for name in wanted if name in values and name not in products}

    def _arguments(self, backward: bool, case: Any, tensors: Tensors) -> tuple[Any, ...]:
        def value(name: str, default: Any) -> Any:
            if name in self.computed:
                return self.computed[name](case, tensors)
            if name in tensors:
                return tensors[name]
            if name == "output_mask":
                return list(case.output_mask[: len(self.gradients_of)])
            option = getattr(case, name, default)
            assert option is not MISSING, f"{self.id}: a case has no {name}"
            return list(option) if isinstance(option, tuple) else option

        return tuple(value(*argument) for argument in self._names_and_defaults[backward])

    @cached_property
    def _names_and_defaults(self) -> tuple[list[tuple[str, Any]], ...]:
        return tuple(
            [(a.name, a.default_value if a.has_default_value() else MISSING) for a in arguments]
            for arguments in (self.overload(way)._schema.arguments for way in (False, True))
        )

    def options(self, case: Any) -> list[Any]:
        """Return the values of the op's options, without those that ask for a result."""
        tensors = dict.fromkeys(self.tensor_arguments)
        values = zip(
            self.overload()._schema.arguments, self.forward_args(case, tensors), strict=True
        )
        return [value for argument, value in values if is_option(argument)]

    def has_autocast_rule(self, key: str) -> bool:
        """Return whether the ATen op has an autocast rule.

        torch 2.11 has that of layer_norm, and not yet that of rms_norm.
        """
        aten = "layer_norm" if self.autocast_as == "rms_norm" else self.autocast_as
        return bool(torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{aten}", key))

    def has_gradient(self, i: int) -> bool:
        """Return whether the i-th argument, if it is a tensor, has a gradient."""
        return self.overload()._schema.arguments[i].name not in self.no_gradient

    def results(self, outputs: Any) -> tuple[Tensor, ...]:
        """Return the differentiable outputs."""
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return outputs[: len(self.gradients_from)]

    def exact(self, outputs: Any) -> tuple[Tensor, ...]:
        """Return the differentiable outputs whose gradient is the derivative of their values."""
        return self.results(outputs)[int(self.constant_factors) :]

    def wants(self, case: Case, i: int) -> bool:
        """Return whether the case asks backward for the gradient of gradients_of[i]."""
        arguments = self.overload(backward=True)._schema.arguments
        has_mask = any(argument.name == "output_mask" for argument in arguments)
        return case.output_mask[i] if has_mask else True


def is_option(argument: Any) -> bool:
    """Return whether an argument of a schema is an option that does not ask for a result."""
    asks = argument.name.startswith("return_") or argument.name == "gradient_mask"
    return "Tensor" not in str(argument.type) and not asks


def public(name: str) -> Callable[..., Any]:
    """Return the public function of an op."""
    return getattr(liger_ops, name)


def max_abs(tensor: Tensor | None, default: float = 0.0) -> float:
    return default if tensor is None or tensor.numel() == 0 else float(tensor.double().abs().max())
