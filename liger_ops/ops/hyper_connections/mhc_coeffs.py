"""The coefficients of a manifold-constrained hyper-connection."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import library
from ...accepted import AT_LEAST_0, AT_LEAST_1
from ..tensors import widened

# The largest hc: kernels hold a token's hc x hc matrix in registers.
MOST_STREAMS = 64


@library.compose
def mhc_coeffs(
    x: Tensor, phi: Tensor, b: Tensor, alpha_pre: Tensor, alpha_post: Tensor, alpha_res: Tensor,
    tmax: int = 20, rms_eps: float = 1e-6, pre_eps: float = 0.0, sinkhorn_eps: float = 1e-6,
    post_mult: float = 2.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute the coefficients of a manifold-constrained hyper-connection (mHC), for each token.

        mix              = (x @ phi) / sqrt(mean(x**2) + rms_eps), x as one row of hc * C elements
        pre, post, res   = mix split into hc, hc and hc * hc columns; b likewise
        h_pre            = sigmoid(alpha_pre * pre + b_pre) + pre_eps
        h_post           = sigmoid(alpha_post * post + b_post) * post_mult
        h_res            = sinkhorn(alpha_res * res + b_res), of (hc, hc) logits

    sinkhorn adds sinkhorn_eps to the softmax over the last dimension, and divides the columns by
    their sums. Then tmax - 1 times it divides the rows by their sums, and the columns by theirs.
    sinkhorn_eps is added to every sum. The rows and columns of h_res then sum to nearly 1.

    Everything is computed in float32. The product with phi and its two gradients are matrix
    products of PyTorch, which use TF32 if `torch.backends.cuda.matmul.fp32_precision` says so. The
    gradients of b and the alphas are summed over the tokens in float32, in an order that does not
    change between runs.

    The forward saves the inputs and, for each token, the product and 1 / rms: hc * (hc + 2) + 1
    numbers in float32. The backward computes the iterates of sinkhorn again, in registers.

    Memory, beside the results and the gradients: phi in float32, and x and its gradient in float32
    for some rows at a time, at most 32 MiB or one row. On a GPU, x in bfloat16 is not widened, but
    multiplied by phi in bfloat16, or by three bfloat16 parts that add up to phi.

    An Ascend NPU runs the definition for more than 8 streams: their matrices do not fit its buffer.

    Under autocast the op runs in the dtypes of its inputs. float64 runs the definition on every
    device.

    This op calls `mhc_coeffs_forward`, which returns what the backward needs too.

    Args:
        x: (..., hc, C), floating point, any strides; hc is from 1 to 64, C at least 1.
        phi: (hc * C, hc * hc + 2 * hc), floating point.
        b: (hc * hc + 2 * hc,), floating point.
        alpha_pre, alpha_post, alpha_res: (), floating point. The dtypes of all may differ.
        tmax: the iterations of sinkhorn, at least 1.
        rms_eps: added to the mean square, at least 0.
        pre_eps: added to h_pre.
        sinkhorn_eps: added to the softmax and to every sum, at least 0.
        post_mult: the factor of h_post.

    Returns:
        h_pre: (..., hc), h_post: (..., hc), h_res: (..., hc, hc), with h_res[o, i] from stream i to
        stream o; contiguous, float32, or float64 if x is.

    Raises:
        TypeError: a tensor is not floating point.
        ValueError: x has no streams, more than 64, or no channels; the other shapes do not fit x's;
            the devices differ; tmax is below 1; or rms_eps or sinkhorn_eps is negative.

    Source: Xie et al., "mHC: Manifold-Constrained Hyper-Connections", arXiv 2512.24880, 2025.

    Example:
        >>> x, phi, one = torch.ones(1, 2, 3), torch.zeros(6, 8), torch.tensor(1.0)
        >>> liger_ops.mhc_coeffs(x, phi, torch.zeros(8), one, one, one)[2]
        tensor([[[0.5000, 0.5000],
                 [0.5000, 0.5000]]])
    """
    return mhc_coeffs_forward(
        x, phi, b, alpha_pre, alpha_post, alpha_res,
        tmax, rms_eps, pre_eps, sinkhorn_eps, post_mult,
    )[:3]  # fmt: skip


@library.forward(
    "...",
    returns="h_pre h_post h_res product rstd",
    axes="x=* Hc C, phi=Hc*C Hc*Hc+2*Hc, b=Hc*Hc+2*Hc, alpha_pre=, alpha_post=, alpha_res= -> "
    "h_pre=* Hc, h_post=* Hc, h_res=* Hc Hc, product=* Hc*Hc+2*Hc, rstd=*",
    dtype="float32+x",
    options={"tmax": AT_LEAST_1, "rms_eps": AT_LEAST_0, "sinkhorn_eps": AT_LEAST_0},
)
def mhc_coeffs_forward(call: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute `mhc_coeffs`, and the product and 1 / rms from which the backward starts.

    Returns:
        h_pre, h_post, h_res: the results of `mhc_coeffs`; only they are differentiable.
        product: x @ phi, (..., hc * hc + 2 * hc).
        rstd: 1 / sqrt(mean(x**2) + rms_eps), (...). Both are float32, or float64 if x is.

    Raises:
        TypeError, ValueError: as `mhc_coeffs`.

    Example:
        >>> x, phi, one = torch.full((1, 2, 3), 2.0), torch.zeros(6, 8), torch.tensor(1.0)
        >>> liger_ops.mhc_coeffs_forward(x, phi, torch.zeros(8), one, one, one)[4]
        tensor([0.5000])
    """
    hc, alphas = call.x.shape[-2], (call.alpha_pre, call.alpha_post, call.alpha_res)
    rows, product, rstd = _projected(call.x, call.phi, call.rms_eps)
    logits = product * rstd * _factors(rows, hc, *alphas) + call.b.to(rows.dtype)
    pre, post, res = _split(logits, hc)
    h_res = _sinkhorn(res, call.tmax, call.sinkhorn_eps)
    # Only the coefficients are differentiable; product and rstd are saved for the backward.
    return (
        torch.sigmoid(pre) + call.pre_eps, torch.sigmoid(post) * call.post_mult,
        h_res.contiguous(), product.detach(), rstd.detach().squeeze(-1),
    )  # fmt: skip


def _projected(x: Tensor, phi: Tensor, rms_eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return x as (..., hc * C), its product with phi, and 1 / rms, (..., 1)."""
    rows = widened(x).flatten(-2)
    rstd = torch.rsqrt((rows * rows).mean(-1, keepdim=True) + rms_eps)
    return rows, torch.matmul(rows, phi.to(rows.dtype)), rstd


def _factors(rows: Tensor, hc: Any, *alphas: Tensor) -> Tensor:
    """Return the alpha of each column, in one tensor."""
    counts = (hc, hc, hc * hc)
    return torch.cat(
        [alpha.to(rows.dtype).expand(n) for alpha, n in zip(alphas, counts, strict=True)]
    )


def _split(logits: Tensor, hc: Any) -> tuple[Tensor, Tensor, Tensor]:
    pre, post, res = logits.split([hc, hc, hc * hc], -1)
    return pre, post, res.unflatten(-1, (hc, hc))


def _sinkhorn(logits: Tensor, tmax: int, eps: float) -> Tensor:
    matrix = torch.softmax(logits, -1) + eps
    matrix = matrix / _sums(matrix, -2, eps)
    for _ in range(tmax - 1):
        matrix = matrix / _sums(matrix, -1, eps)
        matrix = matrix / _sums(matrix, -2, eps)
    return matrix


def _sums(matrix: Tensor, dim: int, eps: float) -> Tensor:
    return matrix.sum(dim, keepdim=True) + eps


mhc_coeffs_backward = library.derive_backward(
    "mhc_coeffs_forward",
    "dh_pre? dh_post? dh_res? x phi b alpha_pre alpha_post alpha_res product rstd tmax rms_eps"
    " sinkhorn_eps post_mult output_mask -> dx dphi db dalpha_pre dalpha_post dalpha_res",
    returns="dx dphi db dalpha_pre dalpha_post dalpha_res",
)


library.keep_dtypes_under_autocast("mhc_coeffs_forward", "mhc_coeffs_backward")
