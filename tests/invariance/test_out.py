"""Within `liger_ops.invariant`, `out` is refused, resized and computed in as PyTorch does it."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import liger_ops
from op_under_test import DEVICE

Into = Callable[..., Tensor]

A, B = torch.rand(2, 3, 40, dtype=torch.bfloat16), torch.rand(2, 40, 5, dtype=torch.bfloat16)
X, D = A[0].to(DEVICE), B[0].to(DEVICE)
Y = X.softmax(-1)
A, B = A.to(DEVICE), B.to(DEVICE)
ROW, MATRIX = (3,), (3, 40)
aten, nn = torch.ops.aten, torch._C._nn

# Functions that write to `out`, and the shape of their results.
PRODUCTS: dict[str, tuple[Into, tuple[int, ...]]] = {
    "mm": (lambda out: torch.mm(X, D, out=out), (3, 5)),
    "addmm": (lambda out: torch.addmm(D[0], X, D, out=out), (3, 5)),
    "bmm": (lambda out: torch.bmm(A, B, out=out), (2, 3, 5)),
    "baddbmm": (lambda out: torch.baddbmm(B[:, :3], A, B, out=out), (2, 3, 5)),
    "mv": (lambda out: torch.mv(X, X[0], out=out), ROW),
    "addmv": (lambda out: torch.addmv(X[:, 0], X, X[0], out=out), ROW),
}
OTHERS: dict[str, tuple[Into, tuple[int, ...]]] = {
    "sum": (lambda out: torch.sum(X, -1, out=out), ROW),
    "sum in float16": (lambda out: torch.sum(X, -1, dtype=torch.float16, out=out), ROW),
    "nansum": (lambda out: torch.nansum(X, -1, out=out), ROW),
    "mean": (lambda out: torch.mean(X, -1, out=out), ROW),
    "prod": (lambda out: torch.prod(X[:, :3], -1, out=out), ROW),
    "logsumexp": (lambda out: torch.logsumexp(X, -1, out=out), ROW),
    "var": (lambda out: torch.var(X, -1, correction=1, out=out), ROW),
    "std": (lambda out: torch.std(X, -1, correction=1, out=out), ROW),
    "vector_norm": (lambda out: torch.linalg.vector_norm(X, dim=-1, out=out), ROW),
    "norm": (lambda out: torch.norm(X, dim=-1, out=out), ROW),
    "cumsum": (lambda out: torch.cumsum(X, -1, out=out), MATRIX),
    "cumprod": (lambda out: torch.cumprod(X[:, :3], -1, out=out), (3, 3)),
    "logcumsumexp": (lambda out: torch.logcumsumexp(X, -1, out=out), MATRIX),
    "softmax": (lambda out: torch.softmax(X, -1, out=out), MATRIX),
    "log_softmax": (lambda out: aten._log_softmax.out(X, -1, False, out=out), MATRIX),
    "softmax_backward": (
        lambda out: aten._softmax_backward_data.out(X, Y, -1, X.dtype, grad_input=out), MATRIX
    ),
    "exp": (lambda out: torch.exp(X, out=out), MATRIX),
    "pow": (lambda out: torch.pow(X, 2.5, out=out), MATRIX),
    "gelu": (lambda out: nn.gelu(X, out=out), MATRIX),
    "silu_backward": (lambda out: aten.silu_backward.grad_input(X, X, grad_input=out), MATRIX),
    "atan2": (lambda out: torch.atan2(X, X, out=out), MATRIX),
}  # fmt: skip
IN_PLACE: dict[str, tuple[Into, tuple[int, ...]]] = {
    "addmm_": (lambda out: out.addmm_(X, D), (3, 5)),
    "exp_": (lambda out: out.exp_(), MATRIX),
    "pow_ of a number": (lambda out: out.pow_(2.5), MATRIX),
    "pow_ of a tensor": (lambda out: out.pow_(X), MATRIX),
    "cumsum_ in float32": (lambda out: out.cumsum_(-1, dtype=torch.float32), MATRIX),
    "add_": (lambda out: out.add_(X, alpha=0.3), MATRIX),
}
FORMS = PRODUCTS | OTHERS | IN_PLACE
OTHER_DEVICE = "meta" if DEVICE == "cpu" else "cpu"
OUTS: dict[str, Callable[[tuple[int, ...]], Tensor]] = {
    **{
        str(dtype).removeprefix("torch."): lambda shape, dtype=dtype: torch.ones(
            shape, dtype=dtype, device=DEVICE
        )
        for dtype in (torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.complex64)
    },
    "empty": lambda shape: torch.ones(0, dtype=X.dtype, device=DEVICE),
    "another shape": lambda shape: torch.ones((7, *shape), dtype=X.dtype, device=DEVICE),
    "another device": lambda shape: torch.ones(shape, dtype=X.dtype, device=OTHER_DEVICE),
}


def outcome(function: Into, out: Tensor) -> tuple[Tensor | None, Exception | None, list[str]]:
    """Return the result or the error of a call, and the warnings of it."""
    result = error = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result = function(out)
        except RuntimeError as raised:
            error = raised
    return result, error, [str(warning.message) for warning in caught]


@pytest.mark.device_kernels
@pytest.mark.parametrize("which", OUTS)
@pytest.mark.parametrize("name", FORMS)
def test_an_out_is_taken_or_refused_as_by_pytorch(name: str, which: str) -> None:
    """PyTorch refuses an `out` of another dtype or device for some operators, and computes some
    sums in its dtype. It gives `out` another shape, and warns if it had elements."""
    function, shape = FORMS[name]
    expected, refusal, warned = outcome(function, OUTS[which](shape))
    out = OUTS[which](shape)
    with liger_ops.invariant():
        result, error, warned_too = outcome(function, out)
    assert type(error) is type(refusal)
    # mv is computed as a product of matrices, by whose names PyTorch refuses the dtype of `out`.
    if name != "mv" and which not in ("empty", "another shape"):
        assert str(error) == str(refusal)
    if expected is None or result is None:
        return
    assert result is out
    assert [text for text in warned if "resized" in text] == [
        text for text in warned_too if "resized" in text
    ]
    if result.device.type != "meta":
        # The order of the sums is another one.
        torch.testing.assert_close(result, expected)


@pytest.mark.device_kernels
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_is_not_cast_in_silence(name: str) -> None:
    function, shape = PRODUCTS[name]
    out = torch.zeros(shape, device=DEVICE)
    with liger_ops.invariant(), pytest.raises(RuntimeError, match=r"BFloat16.*float|Float.*BFloat"):
        function(out)
    assert not out.any()
