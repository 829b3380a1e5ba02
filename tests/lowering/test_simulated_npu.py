"""Dispatch on a simulated npu: the ops run their npu kernels there, interpreted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import simulated_npu
from liger_ops import library
from op_checks import as_tuple
from op_table import OPS
from op_under_test import OpUnderTest
from simulated_npu import to_cpu, to_npu

EVERY_OP = pytest.mark.parametrize("op", OPS.values(), ids=OPS.keys())
# One form of each op, for what the dispatcher alone decides.
ONE_FORM = pytest.mark.parametrize("op", {op.name: op for op in OPS.values()}.values(), ids=repr)


@pytest.fixture(autouse=True)
def npu() -> Iterator[None]:
    with simulated_npu.visible():
        yield


def forward_args(op: OpUnderTest, dtype: torch.dtype = torch.float32) -> tuple[object, ...]:
    case = op.sample(dtype, rows=5)
    return op.forward_args(case, op.tensors(case))


def on_npu(args: tuple[object, ...]) -> tuple[object, ...]:
    return tuple(to_npu(arg.clone()) if isinstance(arg, Tensor) else arg for arg in args)


def require_gradients(op: OpUnderTest, args: tuple[object, ...]) -> list[Tensor]:
    """Make the arguments that have a gradient require it, and return them."""
    tensors = [arg for i, arg in enumerate(args) if isinstance(arg, Tensor) and op.has_gradient(i)]
    return [tensor.requires_grad_() for tensor in tensors]


def assert_same(op: OpUnderTest, output: Tensor, expected: Tensor) -> None:
    if op.multiplies:
        torch.testing.assert_close(output, expected)
    else:
        assert torch.equal(output, expected)


def launches(op: OpUnderTest, backward: bool = False) -> bool:
    """Return whether a kernel of this package runs on an NPU for the sample."""
    return not op.npu_runs_definition and (backward or not op.is_pytorchs_forward)


def launched_modules() -> set[str]:
    """The files of lowering.npu whose kernels ran; any other file would mean a wrong kernel."""
    modules = {name.rpartition(".")[0] for name in simulated_npu.launched}
    assert all(module.startswith("liger_ops.lowering.npu.") for module in modules), modules
    return modules


@EVERY_OP
def test_eager_runs_the_npu_kernel(op: OpUnderTest) -> None:
    args = forward_args(op)
    outputs = as_tuple(op.overload()(*on_npu(args)))
    assert bool(launched_modules()) is launches(op)
    for output, expected in zip(outputs, as_tuple(op.kernel("npu")(*args)), strict=True):
        assert (output is None) == (expected is None)
        if output is not None:
            assert output.device.type == "npu"
            assert_same(op, to_cpu(output), expected)


@EVERY_OP
@pytest.mark.parametrize("backend", (None, "aot_eager"))
@pytest.mark.quick("op", path="simulated npu")
def test_training_runs_the_npu_kernels(op: OpUnderTest, backend: str | None) -> None:
    args = forward_args(op)
    given = on_npu(args)
    tensors = require_gradients(op, given)
    call = op.overload()
    if backend:
        torch._dynamo.reset()
        call = torch.compile(lambda *a: op.overload()(*a), backend=backend, fullgraph=True)
    outputs = op.results(call(*given))
    weights = [torch.randn(output.shape) for output in outputs]
    simulated_npu.launched.clear()
    grads = torch.autograd.grad(outputs, tensors, [to_npu(weight) for weight in weights])
    assert bool(launched_modules()) is launches(op, backward=True)

    references = tuple(arg.clone() if isinstance(arg, Tensor) else arg for arg in args)
    inputs = require_gradients(op, references)
    expected = torch.autograd.grad(op.results(op.definition(*references)), inputs, weights)
    for grad, reference in zip(grads, expected, strict=True):
        torch.testing.assert_close(to_cpu(grad), reference)


@ONE_FORM
def test_float64_runs_the_definition(op: OpUnderTest) -> None:
    args = forward_args(op, torch.float64)
    outputs = as_tuple(op.overload()(*on_npu(args)))
    assert not simulated_npu.launched
    for output, expected in zip(outputs, as_tuple(op.definition(*args)), strict=True):
        assert (output is None) == (expected is None)
        if output is not None:
            assert_same(op, to_cpu(output), expected)


@ONE_FORM
def test_autocast_does_what_pytorchs_does(op: OpUnderTest) -> None:
    """float32 if ATen's op has that rule, as its norms do; otherwise the dtypes do not change. An
    op with matrix products casts them in the composed op that contains it."""
    args = forward_args(op, torch.bfloat16)
    with torch.autocast("npu", dtype=torch.bfloat16):
        outputs = as_tuple(op.overload()(*on_npu(args)))
    widens = not op.multiplies and op.has_autocast_rule("AutocastCUDA")
    names = [argument.name for argument in op.overload()._schema.arguments]
    cast = tuple(
        arg.float()
        if widens
        and isinstance(arg, Tensor)
        and arg.is_floating_point()
        and name not in op.autocast_keeps
        else arg
        for name, arg in zip(names, args, strict=False)
    )
    assert bool(launched_modules()) is launches(op)
    for output, expected in zip(outputs, as_tuple(op.kernel("npu")(*cast)), strict=True):
        assert (output is None) == (expected is None)
        if output is not None:
            assert output.dtype is expected.dtype
            assert_same(op, to_cpu(output), expected)


def test_an_op_without_a_kernel_runs_its_definition() -> None:
    calls = []

    def doubled_for_this_test(x: Tensor) -> Tensor:
        calls.append(x.device.type)
        return x * 2

    try:
        call = library.define()(doubled_for_this_test)
        x = torch.randn(3, 4)
        assert torch.equal(to_cpu(call(to_npu(x))), x * 2)
        assert calls == ["npu"]
        assert not simulated_npu.launched
    finally:
        library.OPS.pop("doubled_for_this_test")


def test_the_device_refuses_what_has_neither_kernel_nor_definition() -> None:
    """The simulated device does not silently run another library's op on the CPU when its kernel is
    missing."""
    with torch.library._scoped_library("liger_ops_tests", "FRAGMENT") as other:
        other.define("cpu_only(Tensor x) -> Tensor")
        other.impl("cpu_only", lambda x: x + 1, "CPU")
        with pytest.raises(NotImplementedError, match="no npu kernel"):
            torch.ops.liger_ops_tests.cpu_only(to_npu(torch.randn(2)))
