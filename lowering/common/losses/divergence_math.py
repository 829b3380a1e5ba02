"""Arithmetic of divergence that the kernels of both devices share. p are the teacher's
probabilities, q the student's."""

import triton
import triton.language as tl

from ..triton_math import log_of_normal, soft_cap_slope


@triton.jit
def logits_gradient(slope, grad, x, scale, softcap, hard, sharp):
    """Compute the gradient of a tile of logits from the slope of the divergence with respect to x,
    the scaled and capped logits. sharp is the gradient of the labels' cross-entropy with respect to
    x, and hard its factor; None without labels."""
    dx = grad * slope
    if hard is not None:
        # The slope of a divergence whose gradient is 0 may be inf, and 0 * inf is NaN.
        dx = tl.where(grad != 0.0, dx, 0.0) + hard * sharp
    if softcap is not None:
        dx *= soft_cap_slope(x, softcap)
    return dx * scale


@triton.jit
def shares(log_p, log_q, p, q, beta, KIND: tl.constexpr, BY_POLYNOMIAL: tl.constexpr):
    """Return the terms of a divergence that are means over the student's and over the teacher's
    probabilities.

    Each is 0 where its probability is 0, though the logarithm is -inf. With BY_POLYNOMIAL a
    logarithm is computed by `log_of_normal`.
    """
    ratio = log_p - log_q
    if KIND == "forward_kl":
        return tl.zeros_like(q), tl.where(p == 0.0, 0.0, p * ratio)
    elif KIND == "reverse_kl":
        return tl.where(q == 0.0, 0.0, -q * ratio), tl.zeros_like(p)
    elif KIND == "tvd":
        # NaN * 0 is NaN.
        half = tl.where(q > p, 0.5, tl.where(q < p, -0.5, 0.0))
        return q * half, -p * half
    else:
        # With the larger of p and q factored out of m, no logarithm of the sum is -inf.
        larger = tl.where(ratio >= 0.0, beta, 1.0 - beta)
        sum_ = larger + (1.0 - larger) * tl.exp(-tl.abs(ratio))
        if BY_POLYNOMIAL:
            # The polynomial of NaN is a number: above and below have the NaN.
            log_sum = log_of_normal(sum_)
            above = tl.maximum(ratio, 0.0, propagate_nan=tl.PropagateNan.ALL)
            below = tl.minimum(ratio, 0.0, propagate_nan=tl.PropagateNan.ALL)
        else:
            log_sum = tl.log(sum_)
            above, below = tl.maximum(ratio, 0.0), tl.minimum(ratio, 0.0)
        over_q = -above - log_sum
        over_p = below - log_sum
        student = tl.where(q == 0.0, 0.0, (1.0 - beta) * q * over_q)
        return student, tl.where(p == 0.0, 0.0, beta * p * over_p)


@triton.jit
def slopes(
    log_p, log_q, p, q, divergence, student_share, beta,
    KIND: tl.constexpr, BY_POLYNOMIAL: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a divergence with respect to the student's and the teacher's logits,
    which are divided by their temperatures."""
    student, teacher = shares(log_p, log_q, p, q, beta, KIND, BY_POLYNOMIAL)
    if KIND == "forward_kl":
        return q - p, teacher - p * divergence
    elif KIND == "reverse_kl":
        return student - q * divergence, p - q
    else:
        return student - q * student_share, teacher - p * (divergence - student_share)


@triton.jit
def norm_of(squares):
    """Compute the norm of a row from the sum of its squares: inf for a row of zeros, whose cosine
    and gradient are then 0, and NaN if the sum is not finite."""
    # squares - squares is 0, and NaN for inf: an infinite norm would pass for a row of zeros.
    return tl.where(squares == 0.0, float("inf"), tl.sqrt(squares) + (squares - squares))


@triton.jit
def cosine_of(products, student_norm, teacher_norm):
    """Compute the cosine of two rows from the sum of their products."""
    # One norm at a time: the product of two norms could overflow.
    return products / student_norm / teacher_norm


@triton.jit
def cosine_slopes(x, y, student_norm, teacher_norm, cosine):
    """Compute the gradients of 1 - cosine with respect to x and y, the student's and the teacher's
    scaled logits."""
    of_student, of_teacher = 1.0 / student_norm, 1.0 / teacher_norm
    a, b = x * of_student, y * of_teacher
    return (cosine * a - b) * of_student, (cosine * b - a) * of_teacher
