"""rms_norm: checks and outputs."""

from __future__ import annotations

from torch import Tensor

from .. import library
from . import checks


@library.fake("rms_norm")
def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting_mode: str = "llama",
) -> Tensor:
    check("rms_norm", x, weight, eps, offset, casting_mode)
    return checks.like(x)


@library.fake("rms_norm_backward")
def rms_norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    offset: float,
    output_mask: list[bool],
) -> tuple[Tensor | None, Tensor | None]:
    op = "rms_norm_backward"
    check(op, x, weight, eps, offset)
    checks.same_form(op, x, "x", dy=dy)
    return checks.like_if(output_mask[0], x), checks.like_if(output_mask[1], weight)


def check(
    op: str,
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    offset: float,
    casting_mode: str | None = None,
) -> None:
    checks.floating(op, x=x, weight=weight)
    checks.at_least_dims(op, x, 1, "(..., N)")
    checks.same_device(op, x, weight=weight)
    checks.shape(op, "weight", weight, x.shape[-1:], "x's last dimension")
    checks.epsilon(op, eps)
    checks.casting(op, weight, offset, casting_mode)
