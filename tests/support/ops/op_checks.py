"""Checks that run for every op. Each takes an entry of op_table and a case."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import simulated_npu
from liger_ops import library
from liger_ops.invariant_mode import is_invariant
from op_under_test import DEVICE, Case, Magnitude, OpUnderTest, Tensors, max_abs
from plans import plan

# The float32 rounding errors that a result may have beside those of the eager reference, which sums
# in another order. The unit is float32's epsilon times the largest term.
FLOAT32_ROUNDINGS = 8


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill torch.empty with NaN, so that an element that a kernel does not write is noticed."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def as_tuple(outputs: Any) -> tuple[Tensor | None, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def widened(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(in_float64(arg) for arg in args)


def in_float64(value: Any) -> Any:
    """Convert a floating point tensor to float64, and a complex one to complex128."""
    if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
        return value.to(torch.promote_types(value.dtype, torch.float64))
    return value


def run_kernel(
    op: OpUnderTest, folder: str, backward: bool, case: Case, args: tuple[Any, ...]
) -> tuple[Tensor | None, ...]:
    kernel = op.kernel(folder, backward)
    with poisoned_memory():
        # A kernel that computes products by PyTorch has no plan.
        planned = {"plan": plan(folder, op, case, backward)} if hasattr(case, "tile") else {}
        outputs = as_tuple(kernel(*args, **planned))
    assert_own_memory(args, outputs)
    return outputs


def assert_own_memory(args: tuple[Any, ...], outputs: tuple[Tensor | None, ...]) -> None:
    """Check that no output shares memory with an argument or an output: PyTorch relies on it."""
    taken = {memory(arg) for arg in args if isinstance(arg, Tensor) and arg.numel()}
    for i, output in enumerate(outputs):
        if output is not None and output.numel():
            assert memory(output) not in taken, f"output {i} is not in memory of its own"
            taken.add(memory(output))


def memory(tensor: Tensor) -> int:
    # The storage of a simulated device's tensor is empty.
    return simulated_npu.to_cpu(tensor).untyped_storage().data_ptr()


def assert_forward_matches_truth(op: OpUnderTest, folder: str, case: Case) -> None:
    """Check that the kernel's error against float64 is at most twice the definition's, plus a
    constant. The definition runs in the case's dtype."""
    tensors = op.tensors(case)
    args = op.forward_args(case, tensors)
    before = clones(args)
    outputs = run_kernel(op, folder, False, case, args)
    assert_unchanged(args, before)
    assert_allocated_as_meta(op, False, args, outputs)
    references = as_tuple(op.definition(*args))
    truths = as_tuple(op.definition(*widened(args)))
    magnitudes = op.output_magnitudes(case, tensors)
    for i, magnitude in enumerate(magnitudes):
        if magnitude is None:
            continue
        label = f"{op.id}[{folder}] output {i}"
        assert_close(op, label, case, outputs[i], references[i], truths[i], magnitude)


def assert_backward_matches_truth(op: OpUnderTest, folder: str, case: Case) -> None:
    """Check the requested gradients likewise, against autograd of the definition in float64."""
    tensors = op.tensors(case)
    args = op.backward_args(case, tensors)
    before = clones(args)
    outputs = run_kernel(op, folder, True, case, args)
    assert_unchanged(args, before)
    assert_allocated_as_meta(op, True, args, outputs)
    references = as_tuple(library.OPS[op.backward_name].definition(*args))
    truths = true_gradients(op, case, tensors)
    magnitudes = op.gradient_magnitudes(case, tensors)
    for i, name in enumerate(op.gradients_of):
        wanted = op.wants(case, i) and truths[i] is not None
        assert (outputs[i] is not None) == wanted, f"{op.id}: d{name} present is not {wanted}"
        if wanted:
            label = f"{op.backward_name}[{folder}] d{name}"
            assert_close(op, label, case, outputs[i], references[i], truths[i], magnitudes[i])


def true_gradients(op: OpUnderTest, case: Case, tensors: Tensors) -> list[Tensor | None]:
    """Compute the gradients in float64, None for tensors that are absent."""
    if op.backward_from_output:
        # Use the rounded output: autograd through the forward would use a different one.
        args = widened(op.backward_args(case, tensors))
        return list(as_tuple(library.OPS[op.backward_name].definition(*args)))
    wide = {
        name: None if value is None else in_float64(value).clone()
        for name, value in op.seen_by_backward(case, tensors).items()
    }
    inputs = [wide[name] for name in op.gradients_of]
    for tensor in inputs:
        if tensor is not None:
            tensor.requires_grad_()
    outputs = op.results(op.definition(*op.forward_args(case, wide)))
    pairs = zip(outputs, (wide[name] for name in op.gradients_from), strict=True)
    scalar = sum((output * grad).sum() for output, grad in pairs if grad is not None)
    leaves = [tensor for tensor in inputs if tensor is not None]
    grads = iter(torch.autograd.grad(scalar, leaves))
    return [None if tensor is None else next(grads) for tensor in inputs]


def amax(tensor: Tensor, op: OpUnderTest) -> Tensor:
    """Return the largest value of each row, or every element for an elementwise op."""
    if op.elementwise or tensor.dim() == 0:
        return tensor
    return tensor.amax(-1, keepdim=True)


def roundings(dtype: torch.dtype, values: Tensor, magnitude: Magnitude) -> Tensor:
    """Return the largest error of values computed in float32 and stored in dtype."""
    stored = torch.finfo(dtype).eps * (values + torch.finfo(dtype).tiny)
    return stored + FLOAT32_ROUNDINGS * torch.finfo(torch.float32).eps * magnitude


def assert_close(
    op: OpUnderTest,
    label: str,
    case: Case,
    output: Tensor | None,
    reference: Tensor | None,
    truth: Tensor | None,
    magnitude: Magnitude,
) -> None:
    """Check one result: shape, dtype, the places of NaN, and the error against float64."""
    assert output is not None and reference is not None and truth is not None
    assert output.shape == truth.shape, f"{label}: shape {output.shape}, expected {truth.shape}"
    assert output.dtype == reference.dtype, f"{label}: {output.dtype} is not {reference.dtype}"
    if truth.numel() == 0:
        return
    # NaN must be in the same places in truth and result, and has no error.
    assert torch.equal(output.isnan(), truth.isnan()), f"{label} of {case}: NaN is elsewhere"
    if truth.isnan().any():
        output, reference, truth = (value.nan_to_num(0.0) for value in (output, reference, truth))
    error = (output.double() - truth).abs()
    own = (reference.double() - truth).abs()
    allowed = 2 * amax(own, op) + roundings(output.dtype, amax(truth.abs(), op), magnitude)
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
    """Check that outputs have the shape, strides and dtype that tracing was given."""
    with FakeTensorMode() as mode:
        faked = [mode.from_tensor(arg) if isinstance(arg, Tensor) else arg for arg in args]
        expected = as_tuple(op.overload(backward)(*faked))
    for output, fake in zip(outputs, expected, strict=True):
        assert (output is None) == (fake is None)
        if output is not None:
            # A simulated device's tensor without elements has other strides than its values.
            strides = simulated_npu.to_cpu(output).stride()
            assert (output.shape, strides, output.dtype) == (
                tuple(fake.shape),
                fake.stride(),
                fake.dtype,
            )


def assert_deterministic(op: OpUnderTest, folder: str, case: Case) -> None:
    """Check that two runs on a device give the same bits.

    The interpreter always runs the programs in one order, so there is nothing to check.
    """
    if DEVICE == "cpu":
        return
    tensors = op.tensors(case)
    for backward, args in (
        (False, op.forward_args(case, tensors)),
        (True, op.backward_args(case, tensors)),
    ):
        first, second = (run_kernel(op, folder, backward, case, args) for _ in range(2))
        for a, b in zip(first, second, strict=True):
            assert a is b is None or torch.equal(a, b), f"{op.id}: two runs differ"


def assert_tile_does_not_matter(op: OpUnderTest, folder: str, case: Case) -> None:
    """Check that all tiles give the same result, up to float32 rounding in another order."""
    if case.tile is None:
        return
    whole = replace(case, tile=None)
    tensors = op.tensors(case)
    for backward, args, magnitudes in (
        (False, op.forward_args(case, tensors), op.output_magnitudes(case, tensors)),
        (True, op.backward_args(case, tensors), op.gradient_magnitudes(case, tensors)),
    ):
        tiled = run_kernel(op, folder, backward, case, args)
        untiled = run_kernel(op, folder, backward, whole, args)
        for a, b, magnitude in zip(tiled, untiled, magnitudes, strict=False):
            assert_equal_but_for_rounding(op, a, b, magnitude)


def assert_rows_are_independent(op: OpUnderTest, implementation: str, case: Case) -> None:
    """Check that some rows of the first dimension, in another order, have the results that they
    have among all, interpreted bit for bit: a row's bits do not depend on its batch.

    On a device, a compiler may contract the multiplications and additions of a tile's rows
    differently. Of ops that multiply matrices all rows are taken, because the sums of a product
    depend on how many it has. Within `liger_ops.invariant` neither is so.
    """
    tensors = op.tensors(case)
    rows = torch.randperm(case.shape[0], generator=torch.Generator().manual_seed(case.seed))
    if not op.multiplies or is_invariant():
        rows = rows[: max(1, case.seed % max(len(rows), 1))]
    rows = rows.to(next(value.device for value in tensors.values() if value is not None))
    chosen = {
        name: value[rows] if name in op.per_row and value is not None else value
        for name, value in tensors.items()
    }
    few = replace(case, shape=(len(rows), *case.shape[1:]))
    for backward, arguments in ((False, op.forward_args), (True, op.backward_args)):
        run = run_definition if implementation == "definition" else run_kernel
        outputs = run(op, implementation, backward, case, arguments(case, tensors))
        others = run(op, implementation, backward, few, arguments(few, chosen))
        magnitudes = (op.gradient_magnitudes if backward else op.output_magnitudes)(case, tensors)
        for i, (output, other) in enumerate(zip(outputs, others, strict=True)):
            if backward and op.gradients_of[i] not in op.per_row:
                continue
            assert (output is None) == (other is None)
            if output is None or output.dim() == 0:
                continue
            if DEVICE == "cpu" or is_invariant():
                assert torch.equal(output[rows], other)
            elif i < len(magnitudes) and magnitudes[i] is not None:
                # A result without a magnitude is a rounding error, such as that of lse. It is
                # another number if a sum has another order.
                allowed = magnitudes[i]
                allowed = allowed[rows] if isinstance(allowed, Tensor) else allowed
                assert_equal_but_for_rounding(op, output[rows], other, allowed)


def run_definition(
    op: OpUnderTest, _: str, backward: bool, case: Case, args: tuple[Any, ...]
) -> tuple[Tensor | None, ...]:
    name = op.backward_name if backward else op.name
    return as_tuple(library.OPS[name].check_and_define(*args))


def assert_equal_but_for_rounding(
    op: OpUnderTest, a: Tensor | None, b: Tensor | None, magnitude: Magnitude
) -> None:
    assert (a is None) == (b is None)
    if a is not None and b is not None and magnitude is not None and a.numel():
        values = b.double().abs() if op.elementwise else max_abs(b)
        bound = 2 * roundings(a.dtype, values, magnitude)
        close = (a.double() - b.double()).abs() <= bound
        assert bool((close | (a == b)).all())


# Words of the messages that are TypeErrors, because they are about dtypes.
OF_DTYPES = ("dtype", "floating point", "int64 or int32", "be int64", "torch.complex")


def assert_rejects(op: OpUnderTest, args: tuple[Any, ...], message: str) -> None:
    """Check that a call raises an error that begins with the op's name and `message`: eagerly,
    while tracing, and compiled."""
    error = TypeError if any(words in message for words in OF_DTYPES) else ValueError
    message = f"{op.base}: {message}"
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(arg) if isinstance(arg, Tensor) else arg for arg in args]
        with pytest.raises(error) as traced:
            op.overload()(*fakes)
    assert str(traced.value).startswith(message), traced.value
    for call in (op.overload(), library.OPS[op.name].check_and_define):
        with pytest.raises(error) as eager:
            call(*args)
        assert str(eager.value) == str(traced.value)
    torch._dynamo.reset()
    compiled = torch.compile(op.overload(), fullgraph=True, dynamic=False, backend="eager")
    with pytest.raises(Exception) as raised:
        compiled(*args)
    # Dynamo quotes the message, and escapes quotes in it.
    assert message in str(raised.value).replace("\\'", "'")
