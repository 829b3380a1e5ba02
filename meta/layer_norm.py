"""layer_norm: checks and outputs."""

from __future__ import annotations

from torch import Tensor

from .. import library
from . import checks


@library.fake("layer_norm")
def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    _check("layer_norm", x, weight, bias, eps)
    return checks.like(x)


@library.fake("layer_norm_backward")
def layer_norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    output_mask: list[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    op = "layer_norm_backward"
    _check(op, x, weight, bias, eps)
    checks.same_form(op, x, "x", dy=dy)
    tensors = (x, weight, bias)
    dx, dweight, dbias = map(checks.like_if, output_mask, tensors)
    return dx, dweight, dbias


def _check(op: str, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> None:
    checks.floating(op, x=x, weight=weight, bias=bias)
    checks.at_least_dims(op, x, 1, "(..., N)")
    checks.same_device(op, x, weight=weight, bias=bias)
    checks.shape(op, "weight", weight, x.shape[-1:], "x's last dimension")
    checks.shape(op, "bias", bias, x.shape[-1:], "x's last dimension")
    checks.epsilon(op, eps)
