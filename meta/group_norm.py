"""group_norm: checks and outputs."""

from __future__ import annotations

from torch import Tensor

from .. import library
from . import checks


@library.fake("group_norm")
def group_norm(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    _check("group_norm", x, num_groups, weight, bias, eps)
    return checks.like(x)


@library.fake("group_norm_backward")
def group_norm_backward(
    dy: Tensor,
    x: Tensor,
    num_groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    output_mask: list[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    op = "group_norm_backward"
    _check(op, x, num_groups, weight, bias, eps)
    checks.same_form(op, x, "x", dy=dy)
    tensors = (x, weight, bias)
    dx, dweight, dbias = map(checks.like_if, output_mask, tensors)
    return dx, dweight, dbias


def _check(
    op: str,
    x: Tensor,
    num_groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> None:
    checks.floating(op, x=x, weight=weight, bias=bias)
    checks.at_least_dims(op, x, 2, "(N, C, *spatial)")
    checks.same_device(op, x, weight=weight, bias=bias)
    if num_groups < 1 or x.shape[1] % num_groups != 0:
        raise ValueError(
            f"{op}: num_groups must be a divisor of x's {x.shape[1]} channels, got {num_groups}"
        )
    checks.shape(op, "weight", weight, x.shape[1:2], "x's channels")
    checks.shape(op, "bias", bias, x.shape[1:2], "x's channels")
    checks.epsilon(op, eps)
