"""A linear layer with a LoRA."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import library
from .eager import is_eager
from .heads.head import cast_for_products, rows_of

AXES = "x=* D, weight=N D: x, a=R D, b=N R: a, bias=N: x -> y=* N, lora_x=* R: a"


@library.compose
def lora_linear(
    x: Tensor, weight: Tensor, a: Tensor, b: Tensor, scale: float, bias: Tensor | None = None
) -> Tensor:
    """A linear layer with a LoRA, without the sum of their weights.

        y = x @ weight.T + bias + scale * (x @ a.T) @ b.T

    Products are PyTorch's, and none is larger than a linear layer's. The second of the LoRA is
    added to y, and its gradient to dx, within the product. The backward keeps x and x @ a.T. A
    gradient that is not required, such as a frozen weight's, is neither computed nor allocated.

    With a and b of x's dtype, y is rounded twice: x @ weight.T + bias, and the sum. With wider
    ones, float32 beside bfloat16, the products of the LoRA, their gradients and the sums are in
    their dtype, as peft's are, and x and dy are converted for a product. Under autocast, inputs
    are cast as those of a linear layer are.

    Args:
        x: (..., D), floating point.
        weight: (N, D), of x's dtype.
        a: (R, D), of x's dtype or a wider one.
        b: (N, R), of a's dtype.
        scale: the factor of the LoRA.
        bias: (N,), of x's dtype, or None.

    Returns:
        (..., N), contiguous, of x's dtype.

    Raises:
        TypeError: a tensor is not floating point, or not of the dtype above.
        ValueError: a shape or a device is not as above.

    Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021.

    Example:
        >>> x, weight, a, b = torch.ones(2, 3), torch.ones(4, 3), torch.ones(1, 3), torch.ones(4, 1)
        >>> liger_ops.lora_linear(x, weight, a, b, 0.5)
        tensor([[4.5000, 4.5000, 4.5000, 4.5000],
                [4.5000, 4.5000, 4.5000, 4.5000]])
    """
    given = (x, weight, a, b) if bias is None else (x, weight, a, b, bias)
    x, weight, a, b, *cast = cast_for_products(*given)
    return lora_linear_forward(x, weight, a, b, scale, cast[0] if cast else None)[0]


@library.forward("...", returns="y lora_x", axes=AXES)
def lora_linear_forward(call: Any) -> tuple[Tensor, Tensor]:
    """`lora_linear`, in the dtypes of its inputs under autocast too, with what its backward needs.

    Returns:
        y: the result of `lora_linear`, the only one with a gradient.
        lora_x: (..., R), x @ a.T, of a's dtype.

    Raises:
        TypeError, ValueError: as `lora_linear`.

    Example:
        >>> x, weight, a, b = torch.ones(1, 3), torch.ones(4, 3), torch.ones(1, 3), torch.ones(4, 1)
        >>> liger_ops.lora_linear_forward(x, weight, a, b, 0.5)
        (tensor([[4.5000, 4.5000, 4.5000, 4.5000]]), tensor([[3.]]))
    """
    rows = rows_of(call.x)
    y = F.linear(rows, call.weight, call.bias)
    lora_x = F.linear(rows.to(call.a.dtype), call.a)
    y = add_product(y, lora_x, call.b.t(), call.scale)
    leading = call.x.shape[:-1]
    return y.reshape(*leading, y.shape[1]), lora_x.reshape(*leading, lora_x.shape[1])


@library.backward(
    "lora_linear_forward",
    "dy x weight a b bias lora_x ... output_mask -> dx dweight da db dbias",
)
def lora_linear_backward(call: Any) -> Any:
    """The gradient of `lora_linear`."""
    x, dy, a, dtype = rows_of(call.x), rows_of(call.dy), call.a, call.a.dtype
    # A gradient of this one goes to x and a through their product.
    lora_x = F.linear(x.to(dtype), a) if torch.is_grad_enabled() else rows_of(call.lora_x)
    wanted_x, wanted_weight, wanted_a, wanted_b, wanted_bias = call.output_mask
    dx = dweight = da = db = dbias = None
    if wanted_weight:
        dweight = dy.t() @ x
    if wanted_bias and call.bias is not None:
        dbias = dy.sum(0)
    if wanted_x:
        dx = dy @ call.weight
    wide = dy.to(dtype)
    if wanted_b:
        # Without a term, of which the shape alone counts.
        db = torch.addmm(call.b, wide.t(), lora_x, beta=0, alpha=call.scale)
    if wanted_x or wanted_a:
        dlora_x = torch.addmm(lora_x, wide, call.b, beta=0, alpha=call.scale)
        if wanted_a:
            da = dlora_x.t() @ x.to(dtype)
        if dx is not None:
            dx = add_product(dx, dlora_x, a).reshape(call.x.shape)
    return dx, dweight, da, db, dbias


def add_product(total: Tensor, left: Tensor, right: Tensor, scale: float = 1.0) -> Tensor:
    """total + scale * left @ right, of total's dtype; in its memory where nothing else sees it."""
    wide = total.to(left.dtype)
    add = wide.addmm_ if is_eager(wide, left, right) else wide.addmm
    return add(left, right, alpha=scale).to(total.dtype)


library.keep_dtypes_under_autocast("lora_linear_forward", "lora_linear_backward")
