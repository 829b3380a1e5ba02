"""Arithmetic of poly_norm's kernels, for every device.

The suffix of a name is the power of x: rstd_3 is 1 / rms of x**3, and scale_3 = weight[0] * rstd_3.
"""

import triton
import triton.language as tl


@triton.jit
def weights_of(weight_ptr, bias_ptr):
    """Load the weights of x**3, x**2 and x, and the bias or 0, as float32."""
    weight_3 = tl.load(weight_ptr).to(tl.float32)
    weight_2 = tl.load(weight_ptr + 1).to(tl.float32)
    weight_1 = tl.load(weight_ptr + 2).to(tl.float32)
    if bias_ptr is not None:
        return weight_3, weight_2, weight_1, tl.load(bias_ptr).to(tl.float32)
    else:
        return weight_3, weight_2, weight_1, 0.0


@triton.jit
def even_powers(x):
    """Return x**2, x**4 and x**6: the squares of x, x**2 and x**3."""
    square = x * x
    fourth = square * square
    return square, fourth, fourth * square


@triton.jit
def poly_result(x, scale_3, scale_2, scale_1, bias):
    """Compute scale_3 * x**3 + scale_2 * x**2 + scale_1 * x + bias."""
    return ((scale_3 * x + scale_2) * x + scale_1) * x + bias


@triton.jit
def slope_factor(weight, rstd, product, N):
    """Compute weight * rstd**3 * mean(dy * u) for a power u of x, where product is sum(dy * u): the
    factor of u in the gradient of u that goes through rstd."""
    # In this order: rstd**3 by itself overflows if rstd is above 7e12.
    return weight * rstd * (rstd * (rstd * product / N))


@triton.jit
def poly_gradient(dy, x, scale_3, scale_2, scale_1, slope_3, slope_2, slope_1):
    """Compute dx. The slopes are those of `slope_factor`."""
    square = x * x
    direct = (3.0 * scale_3 * x + 2.0 * scale_2) * x + scale_1
    through_rstd = (3.0 * slope_3 * square + 2.0 * slope_2) * square + slope_1
    return dy * direct - x * through_rstd
