"""A linear layer with a LoRA, whose input is x or a gated activation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import library
from ..autograd import is_differentiated
from .activations.tiled_mlp import ACTIVATIONS
from .heads.head import cast_for_products, rows_of
from .tensors import is_eager

AXES = "x=* D, weight=N D: x, a=R D, b=N R: a, bias=N: x, up=* D: x -> y=* N, lora_x=* R: a"


@library.compose
def lora_linear(
    x: Tensor, weight: Tensor, a: Tensor, b: Tensor, scale: float, bias: Tensor | None = None,
    up: Tensor | None = None, activation: str = "silu",
) -> Tensor:  # fmt: skip
    """Apply a linear layer with a LoRA, without forming the sum of their weights.

        y = x @ weight.T + bias + scale * (x @ a.T) @ b.T

    With `up`, the layer's input is activation(x) * up instead of x, as in the last layer of a gated
    MLP: `swiglu` or `geglu` compute it, and the backward computes it again instead of keeping it.

    Products are PyTorch's, and none is larger than a linear layer's. The product with b.T is added
    to y, and its gradient to dx, within the product. The backward keeps x, up and x @ a.T. A
    gradient that is not required, such as a frozen weight's, is neither computed nor allocated.

    y is rounded twice: x @ weight.T + bias, and the sum. If a and b have a wider dtype, such as
    float32 beside bfloat16, all products with a and b, and the sums that they are added to, have
    that dtype, and x, dy and the layer's results are converted to it. Under autocast, inputs are
    cast as those of a linear layer are.

    Args:
        x: (..., D), floating point.
        weight: (N, D), of x's dtype.
        a: (R, D), of x's dtype or a wider one.
        b: (N, R), of a's dtype.
        scale: the factor of the LoRA.
        bias: (N,), of x's dtype, or None.
        up: (..., D), of x's dtype, or None.
        activation: "silu"; "gelu", with erf; or "gelu_tanh", its approximation: of x, if up is
            given.

    Returns:
        (..., N), contiguous, of x's dtype.

    Raises:
        TypeError: a tensor is not floating point; weight, bias or up does not have x's dtype, or b
            a's; or a has a narrower dtype than x.
        ValueError: the shapes do not fit together, the devices differ, or activation is unknown.

    Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021.

    Example:
        >>> x, weight, a, b = torch.ones(2, 3), torch.ones(4, 3), torch.ones(1, 3), torch.ones(4, 1)
        >>> liger_ops.lora_linear(x, weight, a, b, 0.5)
        tensor([[4.5000, 4.5000, 4.5000, 4.5000],
                [4.5000, 4.5000, 4.5000, 4.5000]])
    """
    cast = iter(cast_for_products(*[t for t in (x, weight, a, b, bias, up) if t is not None]))
    x, weight, a, b = (next(cast) for _ in range(4))
    bias, up = (t if t is None else next(cast) for t in (bias, up))
    return lora_linear_forward(x, weight, a, b, scale, bias, up, activation)[0]


@library.forward("...", returns="y lora_x", axes=AXES, options={"activation": tuple(ACTIVATIONS)})
def lora_linear_forward(call: Any) -> tuple[Tensor, Tensor]:
    """Compute `lora_linear`, and the product x @ a.T that its backward needs.

    Autocast changes nothing here.

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
    rows = _input_rows(call)
    lora_x = F.linear(rows.to(call.a.dtype), call.a)
    y = F.linear(rows, call.weight, call.bias)
    y = _add_product(y, lora_x, call.b.t(), call.scale)
    leading = call.x.shape[:-1]
    return y.reshape(*leading, y.shape[1]), lora_x.reshape(*leading, lora_x.shape[1])


@library.backward(
    "lora_linear_forward",
    "dy x weight a b bias lora_x up ... output_mask -> dx dweight da db dbias dup",
)
def lora_linear_backward(call: Any) -> Any:
    """Compute the gradient of `lora_linear`."""
    wanted_x, wanted_weight, wanted_a, wanted_b, wanted_bias, wanted_up = call.output_mask
    wanted_x = wanted_x or (wanted_up and call.up is not None)
    dy, lora_x, dtype = rows_of(call.dy), rows_of(call.lora_x), call.a.dtype
    x, second_order = None, is_differentiated()
    if wanted_weight or wanted_a or second_order:
        x = _input_rows(call)
    if x is not None and second_order:
        # The saved lora_x is a constant to autograd. A second derivative reaches x and a through
        # their product, which is computed again for it.
        lora_x = F.linear(x.to(dtype), call.a)
    dx = dweight = da = db = dbias = dup = None
    if wanted_bias and call.bias is not None:
        dbias = dy.sum(0)
    if wanted_weight and x is not None:
        dweight = dy.t() @ x
    wide = dy.to(dtype)
    if wanted_b:
        # With beta=0 addmm does not read its first argument: b and lora_x give the shape alone.
        db = torch.addmm(call.b, wide.t(), lora_x, beta=0, alpha=call.scale)
    if wanted_x or wanted_a:
        dlora_x = torch.addmm(lora_x, wide, call.b, beta=0, alpha=call.scale)
        del wide
        if wanted_a and x is not None:
            da = dlora_x.t() @ x.to(dtype)
        del x
        if wanted_x:
            dx = _add_product(dy @ call.weight, dlora_x, call.a, 1.0).reshape(call.x.shape)
    if dx is not None and call.up is not None:
        backward, options = _activation(call, "_backward")
        mask = [call.output_mask[0], wanted_up]
        dx, dup = backward(dx, call.x, call.up, *options, mask)
    return dx, dweight, da, db, dbias, dup


def _input_rows(call: Any) -> Tensor:
    """Return the layer's input as rows: x, or the activation of x and up."""
    if call.up is None:
        return rows_of(call.x)
    gated, options = _activation(call)
    return rows_of(gated(call.x, call.up, *options))


def _activation(call: Any, suffix: str = "") -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the activation's function, and its options.

    The function is the device's kernel, or the definition, if there is none or if the computation
    is traced or differentiated: a kernel is not an op.
    """
    name, options = ACTIVATIONS[call.activation]
    op = library.OPS[name + suffix]
    kernel = op.kernels.get(call.x.device.type) if is_eager(call.x) else None
    return kernel or op.definition, options


def _add_product(total: Tensor, left: Tensor, right: Tensor, scale: float) -> Tensor:
    """Return total + scale * left @ right, summed in left's dtype and rounded to total's.

    The result takes total's memory if the dtypes are equal and nothing traces or differentiates it.
    """
    wide = total.to(left.dtype)
    add = wide.addmm_ if is_eager(wide, left, right) else wide.addmm
    return add(left, right, alpha=scale).to(total.dtype)


library.keep_dtypes_under_autocast("lora_linear_forward", "lora_linear_backward")
