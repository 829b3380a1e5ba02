"""Tests and checks that the activations share."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from activation_cases import ActivationCase
from kernel_tests import Test
from op_checks import run_kernel
from op_under_test import OpUnderTest

# The interpreter is NumPy, which warns of the infinities that these tests produce on purpose.
INFINITIES_ARE_MEANT = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

WIDE_ROWS = {
    f"{columns}-{layout}": ActivationCase(shape=(3, columns), dtype=torch.bfloat16, layout=layout)
    for columns, layout in ((14336, "contiguous"), (20011, "sliced"))
}


def a_nan_stays_one(kernels: pytest.MarkDecorator) -> Test:
    @pytest.mark.device_kernels
    @kernels
    def test_a_nan_stays_one(op: OpUnderTest, folder: str) -> None:
        """Every result and gradient that depends on a NaN is NaN."""
        case = op.sample(torch.float32, rows=1)
        for name in op.gradients_of:
            tensors = op.tensors(case)
            if tensors[name] is None:
                continue
            tensors[name].fill_(float("nan"))
            outputs = run_kernel(op, folder, False, case, op.forward_args(case, tensors))
            gradients = run_kernel(op, folder, True, case, op.backward_args(case, tensors))
            for output in outputs + gradients:
                # The gradient of up depends on gate alone.
                if output is not None and not (name == "up" and output is gradients[1]):
                    assert bool(output.isnan().all()), (op.id, name)

    return test_a_nan_stays_one


def assert_model_may_be_replaced(
    theirs: Callable[[], Tensor], ours: Callable[[], Tensor], model: nn.Module
) -> None:
    """The results and the gradients of the model's parameters agree within the dtype's rounding.

    Model code rounds after every operation, so its error is the larger one.
    """
    expected, found = theirs(), ours()
    assert found.dtype is expected.dtype
    # Rounding errors of terms that cancel in the surrounding products have this size.
    dtype = expected.dtype
    bounds = {} if dtype is torch.float32 else {"rtol": 4 * torch.finfo(dtype).eps}
    parameters = list(model.parameters())
    dy = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    pairs = [(found, expected)] + [
        (a, b)
        for a, b in zip(
            torch.autograd.grad(found, parameters, dy, allow_unused=True),
            torch.autograd.grad(expected, parameters, dy, allow_unused=True),
            strict=True,
        )
        if a is not None or b is not None
    ]
    for a, b in pairs:
        if bounds:
            bounds["atol"] = bounds["rtol"] * float(b.abs().max())
        torch.testing.assert_close(a, b, **bounds)
