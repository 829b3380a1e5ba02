"""The checks that every op goes through. Each takes the op's entry of op_table and a case."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from liger_ops import library
from op_table import DEVICE, Case, OpUnderTest, Tensors
from plans import plan

# Rounding errors of float32 arithmetic that a result may collect beside the eager reference's own,
# in units of float32's epsilon times the largest term: the two sum in different orders.
FLOAT32_ROUNDINGS = 8


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill torch.empty with NaN, so that an element that a kernel does not write is seen."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def as_tuple(outputs: Any) -> tuple[Tensor | None, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def widened(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(arg.double() if isinstance(arg, Tensor) else arg for arg in args)


def run_kernel(
    op: OpUnderTest, folder: str, backward: bool, case: Case, args: tuple[Any, ...]
) -> tuple[Tensor | None, ...]:
    kernel = op.kernel(folder, backward)
    with poisoned_memory():
        return as_tuple(kernel(*args, plan=plan(folder, op.name, case)))


def assert_forward_matches_truth(op: OpUnderTest, folder: str, case: Case) -> None:
    """The kernel is no further from float64 than twice the definition in the same dtype, and a
    constant."""
    tensors = case.tensors(op)
    args = op.forward_args(case, tensors)
    before = clones(args)
    outputs = run_kernel(op, folder, False, case, args)
    assert_unchanged(args, before)
    assert_allocated_as_meta(op, False, args, outputs)
    references = as_tuple(op.definition(*args))
    truths = as_tuple(op.definition(*widened(args)))
    magnitudes, _ = bounds(op, case, tensors)
    for i, (output, reference, truth) in enumerate(zip(outputs, references, truths, strict=True)):
        label = f"{op.name}[{folder}] output {i}"
        assert_close(label, case, output, reference, truth, magnitudes[i])


def assert_backward_matches_truth(op: OpUnderTest, folder: str, case: Case) -> None:
    """Likewise for the gradients asked for; truth is autograd through the definition in float64."""
    tensors = case.tensors(op)
    args = op.backward_args(case, tensors)
    before = clones(args)
    outputs = run_kernel(op, folder, True, case, args)
    assert_unchanged(args, before)
    assert_allocated_as_meta(op, True, args, outputs)
    references = as_tuple(library.OPS[op.backward_name].definition(*args))
    truths = true_gradients(op, case, tensors)
    _, magnitudes = bounds(op, case, tensors)
    for i, name in enumerate(op.gradients_of):
        wanted = case.output_mask[i] and truths[i] is not None
        assert (outputs[i] is not None) == wanted, f"{op.name}: d{name} present is not {wanted}"
        if wanted:
            label = f"{op.backward_name}[{folder}] d{name}"
            assert_close(label, case, outputs[i], references[i], truths[i], magnitudes[i])


def true_gradients(op: OpUnderTest, case: Case, tensors: Tensors) -> list[Tensor | None]:
    if op.backward_from_output:
        # Of the output as rounded: autograd through the forward would start from another.
        args = widened(op.backward_args(case, tensors))
        return list(as_tuple(library.OPS[op.backward_name].definition(*args)))
    wide = {
        name: None if value is None else value.double().clone() for name, value in tensors.items()
    }
    dy, ds = wide["dy"], wide["ds"]
    if op.name == "fused_add_rms_norm":
        # The backward op takes the sum as the forward stored it.
        wide["x"] = (tensors["x"] + tensors["residual"]).double()
        wide["residual"] = torch.zeros_like(wide["x"])
    inputs = [wide[name] for name in op.gradients_of]
    for tensor in inputs:
        if tensor is not None:
            tensor.requires_grad_()
    outputs = as_tuple(op.definition(*op.forward_args(case, wide)))
    scalar = (outputs[0] * dy).sum()
    if len(outputs) > 1 and ds is not None:
        scalar = scalar + (outputs[1] * ds).sum()
    given = [tensor for tensor in inputs if tensor is not None]
    grads = iter(torch.autograd.grad(scalar, given))
    return [None if tensor is None else next(grads) for tensor in inputs]


def bounds(op: OpUnderTest, case: Case, tensors: Tensors) -> tuple[list[float], list[float]]:
    """The magnitude of each output and of each gradient."""
    if op.bounds is not None:
        return op.bounds(case, tensors)
    forward, gradient = magnitudes(op, case, tensors)
    return [forward] * 2, [gradient, *parameter_magnitudes(op, case, tensors)]


def magnitudes(op: OpUnderTest, case: Case, tensors: Tensors) -> tuple[float, float]:
    """The largest terms that are summed or cancelled on the way to an output, and to dx.

    Where they cancel, the result is smaller than the rounding errors of what it was made of.
    """
    x = tensors["x"].double()
    if op.name == "fused_add_rms_norm":
        x = x + tensors["residual"].double()
    if x.numel() == 0:
        return 0.0, 0.0
    if op.name == "group_norm":
        groups = x.reshape(x.shape[0], case.num_groups, -1)
        variance = groups.var(-1, unbiased=False)
    elif op.name == "layer_norm":
        variance = x.var(-1, unbiased=False)
    else:
        variance = x.square().mean(-1)
    rstd = (variance + case.eps).rsqrt().max()
    scale = max_abs(tensors["weight"], 1.0) + abs(case.offset)
    normalised = rstd * x.abs().max()
    gradient = rstd * max_abs(tensors["dy"]) * scale * (1 + normalised)
    return float(normalised * scale), float(gradient)


def parameter_magnitudes(op: OpUnderTest, case: Case, tensors: Tensors) -> list[float]:
    """The same for dweight and dbias, sums over every row."""
    x, dy = tensors["x"], tensors["dy"]
    if x.numel() == 0:
        return [0.0, 0.0]
    unscaled = {**tensors, "weight": None}
    normalised, _ = magnitudes(op, Case(**{**vars(case), "offset": 0.0}), unscaled)
    terms = dy.double().abs().sum() / x.shape[op.parameter_dim]
    return [float(terms * (1 + normalised)), float(terms)]


def max_abs(tensor: Tensor | None, default: float = 0.0) -> float:
    return default if tensor is None or tensor.numel() == 0 else float(tensor.double().abs().max())


def assert_close(
    label: str,
    case: Case,
    output: Tensor | None,
    reference: Tensor | None,
    truth: Tensor | None,
    magnitude: float,
) -> None:
    assert output is not None and reference is not None and truth is not None
    assert output.shape == truth.shape, f"{label}: shape {output.shape}, expected {truth.shape}"
    assert output.dtype == reference.dtype, f"{label}: {output.dtype} is not {reference.dtype}"
    if truth.numel() == 0:
        return
    error = (output.double() - truth).abs()
    own = (reference.double() - truth).abs()
    # Rows of one tensor may differ in scale, so each is held to its own.
    dims = -1 if truth.dim() > 0 else None
    allowed = (
        2 * own.amax(dims, keepdim=True)
        + torch.finfo(output.dtype).eps * truth.abs().amax(dims, keepdim=True)
        + FLOAT32_ROUNDINGS * torch.finfo(torch.float32).eps * magnitude
    )
    worst = (error - allowed).flatten().argmax()
    assert bool((error <= allowed).all()), (
        f"{label} of {case}: worst element {int(worst)}: kernel {output.flatten()[worst]!r},"
        f" definition {reference.flatten()[worst]!r}, float64 {truth.flatten()[worst]!r}"
    )


def clones(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(arg.clone() if isinstance(arg, Tensor) else arg for arg in args)


def assert_unchanged(args: tuple[Any, ...], before: tuple[Any, ...]) -> None:
    for i, (arg, copy) in enumerate(zip(args, before, strict=True)):
        if isinstance(arg, Tensor):
            assert torch.equal(arg, copy), f"argument {i} was written to"


def assert_allocated_as_meta(
    op: OpUnderTest, backward: bool, args: tuple[Any, ...], outputs: tuple[Tensor | None, ...]
) -> None:
    """Outputs have the form that tracing was told: shape, strides, dtype."""
    with FakeTensorMode() as mode:
        faked = [mode.from_tensor(arg) if isinstance(arg, Tensor) else arg for arg in args]
        expected = as_tuple(op.overload(backward)(*faked))
    for output, fake in zip(outputs, expected, strict=True):
        assert (output is None) == (fake is None)
        if output is not None:
            assert (output.shape, output.stride(), output.dtype) == (
                tuple(fake.shape),
                fake.stride(),
                fake.dtype,
            )


def assert_deterministic(op: OpUnderTest, folder: str, case: Case) -> None:
    tensors = case.tensors(op)
    for backward, args in (
        (False, op.forward_args(case, tensors)),
        (True, op.backward_args(case, tensors)),
    ):
        first, second = (run_kernel(op, folder, backward, case, args) for _ in range(2))
        for a, b in zip(first, second, strict=True):
            assert a is b is None or torch.equal(a, b), f"{op.name}: two runs differ"


def assert_tile_does_not_matter(op: OpUnderTest, folder: str, case: Case) -> None:
    """Every tile gives the result of every other, but for float32's rounding in another order."""
    whole = replace(case, tile=None)
    tensors = case.tensors(op)
    magnitudes = bounds(op, case, tensors)
    for backward, args in (
        (False, op.forward_args(case, tensors)),
        (True, op.backward_args(case, tensors)),
    ):
        tiled = run_kernel(op, folder, backward, case, args)
        untiled = run_kernel(op, folder, backward, whole, args)
        for a, b, magnitude in zip(tiled, untiled, magnitudes[backward], strict=False):
            if a is not None and b is not None and a.numel():
                unit = torch.finfo(a.dtype).eps * max_abs(b)
                bound = unit + FLOAT32_ROUNDINGS * torch.finfo(torch.float32).eps * magnitude
                assert max_abs(a.double() - b.double()) <= 2 * bound


def assert_rows_are_independent(op: OpUnderTest, folder: str, case: Case) -> None:
    """Permuting the first dimension permutes the result, bit for bit."""
    tensors = case.tensors(op)
    rows = torch.randperm(case.shape[0], generator=torch.Generator().manual_seed(case.seed))
    rows = rows.to(DEVICE)
    permuted = {
        name: value[rows] if name in op.per_row and value is not None else value
        for name, value in tensors.items()
    }
    for backward, arguments in ((False, op.forward_args), (True, op.backward_args)):
        outputs = run_kernel(op, folder, backward, case, arguments(case, tensors))
        others = run_kernel(op, folder, backward, case, arguments(case, permuted))
        of_rows = len(outputs)
        if backward:
            of_rows = sum(name in op.per_row for name in op.gradients_of)
        for output, other in zip(outputs[:of_rows], others[:of_rows], strict=True):
            assert output is other is None or torch.equal(output[rows], other)


def assert_rejects(op: OpUnderTest, args: tuple[Any, ...], message: str) -> None:
    """ValueError with this message, the same eagerly, in tracing and compiled."""
    errors = []
    for call in (op.overload(), library.OPS[op.name].check_and_define):
        try:
            call(*args)
        except ValueError as error:
            errors.append(str(error))
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(arg) if isinstance(arg, Tensor) else arg for arg in args]
        try:
            op.overload()(*fakes)
        except ValueError as error:
            errors.append(str(error))
    torch._dynamo.reset()
    compiled = torch.compile(op.overload(), fullgraph=True, dynamic=False, backend="eager")
    try:
        compiled(*args)
    except Exception as error:
        # Dynamo quotes the message, and escapes the quotes in it.
        text = str(error).replace("\\'", "'")
        errors.append(message if message in text else text)
    assert errors == [message] * 4, errors
