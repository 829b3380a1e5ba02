"""What a norm computes, found by running a copy of it on the CPU.

`probe` gives a module inputs and weights that it cannot tell from real ones and compares what comes
out with the definitions of the ops, under every option that they have.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .. import library
from ..ops.rms_norm import CASTING_MODES
from .probing import NotAnOp, dtype_name, first_line, own_attributes, undisturbed, uniform

# Two orders of summing a row in float32 differ by less.
FLOAT32_BOUND = 4e-6

# Of the elements, how many may be rounded to the neighbour of the definition's value. Measured over
# widths of 2 to 16384, bfloat16 and float16: none with the right casting mode, 18% at least with a
# wrong one, and 0.1% at most for ATen's layer_norm and group_norm, which sum in an order of their
# own.
ROUNDING_SHARE = 0.02

# For modules without parameters. One that normalises rows of both widths has no width of its own.
ANY_WIDTHS = (40, 56)

Dtypes = tuple[torch.dtype, torch.dtype]
SAME_DTYPES: tuple[Dtypes, ...] = (
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
)


@dataclass(frozen=True)
class Norm:
    """An op, by name, and the options under which it computes what a module computes.

    width is the size of the dimension that the parameters have, or None for a module that has none
    and takes any.
    """

    op: str
    options: dict[str, Any]
    width: int | None

    def __call__(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return self.computed_by(library.OPS[self.op].definition, x, weight, bias)

    def computed_by(
        self,
        function: Callable[..., Any],
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
    ) -> Any:
        """What the op, or another function of its arguments, makes of tensors."""
        tensors = {"weight": weight}
        if self.op != "rms_norm":
            tensors["bias"] = bias
        return function(x, **tensors, **self.options)

    def with_options(self, **options: Any) -> Norm:
        return Norm(self.op, {**self.options, **options}, self.width)


def probe(module: nn.Module, mixed_dtypes: Sequence[Dtypes] = ()) -> Norm:
    """Find the op that computes what a module computes.

    The module's parameters, at most a weight and a bias, are one-dimensional and of one size. A
    copy of it runs on the CPU, with parameters of its own, and is compared with the definitions of
    rms_norm, layer_norm and group_norm:

    * eps is measured on inputs so small that the output depends on little else, then replaced by
      the module's float attribute, or the number of two digits, that it stands for;
    * the values in float32, on two, three and four dimensions, on rows of usual and of tiny size
      and of zeros, in training and in evaluation mode, and the gradients of input, weight and bias;
    * the rounding in bfloat16 and float16, which tells the casting modes of rms_norm apart.

    Nothing of the module is changed, no device but the CPU is used, and the state of no random
    number generator changes.

    Args:
        module: the module. Its parameters may be on any device, meta too.
        mixed_dtypes: pairs of an input dtype and a parameter dtype that must agree as well.

    Returns:
        The op's name and options.

    Raises:
        NotAnOp: no op computes the same; the text gives the reason.
    """
    with undisturbed():
        return _Probe(module).run(mixed_dtypes)


class _Probe:
    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.parameters = {
            name: parameter
            for name, parameter in module._parameters.items()
            if parameter is not None
        }
        self.attributes = list(own_attributes(module).values())

    def run(self, mixed_dtypes: Sequence[Dtypes]) -> Norm:
        refusals = []
        for candidate in self.candidates():
            passed = 0
            try:
                norm = self.with_eps(candidate)
                passed = 1
                self.compare_values(norm)
                passed = 2
                norm = self.with_casting_mode(norm, mixed_dtypes)
                self.compare_gradients(norm)
                return norm
            except NotAnOp as refusal:
                refusals.append((passed, refusal))
        # The candidate that came furthest says the most of the module.
        raise max(refusals, key=lambda pair: pair[0])[1]

    def candidates(self) -> Iterator[Norm]:
        """What the module may compute, eps and the casting mode still open."""
        sizes = self.integers()
        if self.parameters:
            own = next(iter(self.parameters.values())).numel()
            widths: list[int | None] = [own]
            channels = [own]
        else:
            widths = [None, *sizes]
            channels = sorted(sizes, reverse=True)
        for width in widths:
            if "bias" not in self.parameters:
                for offset in (0.0, 1.0) if "weight" in self.parameters else (0.0,):
                    yield Norm("rms_norm", {"eps": 0.0, "offset": offset}, width)
            yield Norm("layer_norm", {"eps": 0.0}, width)
        for count in channels:
            for groups in sizes:
                if count % groups == 0:
                    yield Norm("group_norm", {"eps": 0.0, "num_groups": groups}, count)

    def integers(self) -> list[int]:
        """The sizes that the module may mean: attributes that are ints or tuples of one int."""
        found: dict[int, None] = {}
        for value in self.attributes:
            if isinstance(value, (tuple, list)) and len(value) == 1:
                value = value[0]
            if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**20:
                found[value] = None
        return list(found)

    def with_eps(self, norm: Norm) -> Norm:
        """The candidate with the module's eps.

        y is a multiple of x / sqrt(s + eps), s being the mean square or variance of x. For two x of
        one direction, one with s >> eps and one with s << eps, the quotient r of small y and large
        y is sqrt(s / (s + eps)), so that eps = s (1 / r**2 - 1) with s of the small x. Weight and
        offset cancel.
        """
        width = norm.width or ANY_WIDTHS[0]
        shape = (1, width, 8) if norm.op == "group_norm" else (1, width)
        direction = _input(shape, seed=1)
        small, large = 1e-12, 1e4
        copied = self.copied(torch.float32, width, ones=True)
        small_y = _call(copied, direction * small, "float32")
        large_y = _call(copied, direction * large, "float32")
        spread = _spread(norm, direction * small)
        quotient = small_y.double() / large_y.double()
        estimate = (spread * (1 / quotient**2 - 1)).nanmedian().item()
        return norm.with_options(eps=self.nearest_eps(norm, estimate))

    def nearest_eps(self, norm: Norm, estimate: float) -> float:
        if abs(estimate) < 1e-26:
            return 0.0
        floats = [value for value in self.attributes if isinstance(value, float) and value > 0]
        for value in sorted(floats, key=lambda value: abs(value - estimate)):
            if abs(value - estimate) <= 1e-3 * value:
                return value
        if not 0 < estimate < 1:
            raise NotAnOp("it is no norm over the last dimension or over groups of channels")
        rounded = float(f"{estimate:.1e}")
        if abs(rounded - estimate) <= 1e-5 * rounded:
            return rounded
        raise NotAnOp(
            f"as {norm.op} its eps would be {estimate:.3g}, which is none of its attributes and"
            " no round number"
        )

    def compare_values(self, norm: Norm) -> None:
        for width in (norm.width,) if norm.width else ANY_WIDTHS:
            copied = self.copied(torch.float32, width)
            for shape in _shapes(norm, width):
                x = _input(shape, seed=2) * _scales(norm, shape)
                expected = norm(x, copied.weight, copied.bias)
                for training in (False, True):
                    copied.module.train(training)
                    y = _call(copied, x, f"float32, {len(shape)} dimensions")
                    if not _differences(y, expected).within:
                        raise NotAnOp(
                            "it computes none of rms_norm, layer_norm and group_norm in float32"
                        )

    def compare_gradients(self, norm: Norm) -> None:
        width = norm.width or ANY_WIDTHS[0]
        shape = _shapes(norm, width)[1]
        copied = self.copied(torch.float32, width)
        leaves = [tensor for tensor in (copied.weight, copied.bias) if tensor is not None]
        with torch.enable_grad():
            x = _input(shape, seed=3).requires_grad_()
            leaves.append(x)
            dy = _input(shape, seed=4)
            expected = torch.autograd.grad(norm(x, copied.weight, copied.bias), leaves, dy)
            try:
                y = _call(copied, x, "float32, with gradients")
                found = torch.autograd.grad(y, leaves, dy)
            except RuntimeError as error:
                raise NotAnOp(f"its gradient cannot be taken: {first_line(error)}") from None
        for ours, theirs in zip(expected, found, strict=True):
            # The terms are of order 1; their sum may cancel, as a layer norm's over two elements.
            if (ours - theirs).abs().max() > 1e-4 * max(1.0, ours.abs().max().item()):
                raise NotAnOp(f"it has the values of {norm.op} but another gradient")

    def with_casting_mode(self, norm: Norm, mixed_dtypes: Sequence[Dtypes]) -> Norm:
        """The candidate with the casting mode that rounds where the module rounds."""
        modes = [norm]
        if norm.op == "rms_norm":
            modes = [norm.with_options(casting_mode=mode) for mode in CASTING_MODES]
        shares = [0.0] * len(modes)
        width = norm.width or ANY_WIDTHS[0]
        shape = _shapes(norm, width)[1]
        mixed = list(mixed_dtypes) if self.parameters else []
        for dtypes in [*SAME_DTYPES, *mixed]:
            x_dtype, parameter_dtype = dtypes
            case = f"{dtype_name(x_dtype)}, parameters {dtype_name(parameter_dtype)}"
            copied = self.copied(parameter_dtype, width)
            x = (_input(shape, seed=5) * _scales(norm, shape)).to(x_dtype)
            try:
                y = _call(copied, x, case, check_dtype=False)
            except NotAnOp:
                if dtypes in SAME_DTYPES:
                    raise
                # It never sees this pair, as it cannot take it.
                continue
            if y.dtype is not x_dtype:
                raise NotAnOp(
                    f"it returns {dtype_name(y.dtype)} for input of {dtype_name(x_dtype)} and"
                    f" parameters of {dtype_name(parameter_dtype)}; the ops keep the input's dtype"
                )
            for i, mode in enumerate(modes):
                differences = _differences(y, mode(x, copied.weight, copied.bias))
                shares[i] += differences.share if differences.within else float("inf")
        share, mode = min(zip(shares, modes, strict=True), key=lambda pair: pair[0])
        if share > ROUNDING_SHARE * (len(SAME_DTYPES) + len(mixed)):
            raise NotAnOp(
                f"it has the values of {norm.op} in float32 but rounds elsewhere in lower precision"
            )
        return mode

    def copied(self, dtype: torch.dtype, width: int | None, ones: bool = False) -> _Copy:
        """A copy of the module in evaluation mode, its parameters random and of the given dtype."""
        values = {
            name: nn.Parameter(_parameter(name, width, ones).to(dtype)) for name in self.parameters
        }
        # What deepcopy finds in its memo it does not copy: the real parameters are not read.
        memo = {id(parameter): values[name] for name, parameter in self.parameters.items()}
        try:
            module = copy.deepcopy(self.module, memo)
        except Exception as error:
            raise NotAnOp(f"it cannot be copied: {first_line(error)}") from None
        return _Copy(module.eval(), values.get("weight"), values.get("bias"))


@dataclass
class _Copy:
    module: nn.Module
    weight: Tensor | None
    bias: Tensor | None


@dataclass
class _Differences:
    """Whether two tensors are one rounding apart at most, and the share of elements that are."""

    within: bool
    share: float


def _call(copied: _Copy, x: Tensor, case: str, check_dtype: bool = True) -> Tensor:
    """The copy's output for a copy of x, as nothing forbids it to write into its input."""
    try:
        y = copied.module(x.clone())
    except Exception as error:
        raise NotAnOp(f"it fails on the CPU ({case}): {first_line(error)}") from None
    if not isinstance(y, Tensor):
        raise NotAnOp(f"it returns {type(y).__name__}, not a tensor")
    if y.shape != x.shape:
        raise NotAnOp(f"it returns shape {tuple(y.shape)} for an input of {tuple(x.shape)}")
    if check_dtype and y.dtype is not x.dtype:
        raise NotAnOp(f"it returns {dtype_name(y.dtype)} for input of {dtype_name(x.dtype)}")
    return y


def _differences(y: Tensor, expected: Tensor) -> _Differences:
    both_nan = y.isnan() & expected.isnan()
    differ = (y != expected) & ~both_nan
    bound = FLOAT32_BOUND * (1 + expected.float().abs())
    share = 0.0
    if y.dtype.itemsize < 4:
        # One unit in the last place, of a value that the float32 error has moved.
        bound = bound + torch.finfo(y.dtype).eps * expected.float().abs()
        share = differ.float().mean().item()
    apart = (y.float() - expected.float()).abs()
    # Infinities that are equal differ by NaN.
    within = ((apart <= bound) | ~differ).all().item()
    return _Differences(bool(within), share)


def _shapes(norm: Norm, width: int | None) -> list[tuple[int, ...]]:
    """Input shapes of two, three and four dimensions; narrow rows are many, to count roundings."""
    assert width is not None
    rows = max(8, 2048 // width)
    if norm.op == "group_norm":
        # The variance of a single element is 0, and rounding errors are all that ATen makes of it.
        alone = norm.options["num_groups"] == width
        smallest = (rows, width, 8) if alone else (rows, width)
        return [smallest, (8, width, max(6, rows // 2)), (4, width, 3, 5)]
    # A row of so many is a probe of roundings by itself, and three times as many take seconds.
    inner = 3 if width <= 2**14 else 1
    return [(8, width), (rows, inner, width), (4, 2, inner, width)]


def _scales(norm: Norm, shape: tuple[int, ...]) -> Tensor:
    """A factor for each row, in turn: usual, as small as eps, large, and zero."""
    eps = norm.options["eps"]
    cycle = torch.tensor([1.0, eps**0.5, 30.0, 3 * eps**0.5, 0.0], dtype=torch.float32)
    count = torch.arange(shape[0]) % len(cycle)
    return cycle[count].reshape(-1, *[1] * (len(shape) - 1))


def _spread(norm: Norm, x: Tensor) -> Tensor:
    """For each element, what eps is added to in its row: the mean square, or the variance."""
    x = x.double()
    if norm.op == "rms_norm":
        return (x * x).mean(-1, keepdim=True)
    if norm.op == "layer_norm":
        return x.var(-1, correction=0, keepdim=True)
    groups = x.reshape(x.shape[0], norm.options["num_groups"], -1)
    return groups.var(-1, correction=0, keepdim=True).expand_as(groups).reshape(x.shape)


def _input(shape: Sequence[int], seed: int) -> Tensor:
    """Random numbers of mean 0.5, so that subtracting the mean matters.

    Neighbours are at least 1 apart: the variance of a row of two is then no difference of nearly
    equal numbers, of which every implementation has rounding errors of its own.
    """
    signs = 1 - 2 * (torch.arange(math.prod(shape)).reshape(shape) % 2)
    return uniform(shape, seed) + signs + 0.5


def _parameter(name: str, width: int | None, ones: bool) -> Tensor:
    assert width is not None
    if ones:
        return torch.full((width,), 0.0 if name == "bias" else 1.0, dtype=torch.float32)
    # Apart from 0, where one rounding is large beside the value, and from 1, which hides an offset.
    return 1.75 + uniform((width,), seed=6 if name == "bias" else 7)
