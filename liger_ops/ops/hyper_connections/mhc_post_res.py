"""The streams of a hyper-connection after a layer."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import library
from ..precision import widened


@library.define(axes="x=* Hc c, f_out=* c, h_post=* Hc, h_res=* Hc Hc -> y=* Hc c")
def mhc_post_res(x: Tensor, f_out: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
    """The streams of a hyper-connection after a layer: mixed with each other, plus the layer's
    result.

        y[o, c] = sum over i of h_res[o, i] * x[i, c] + h_post[o] * f_out[c]

    for each token. y is computed in float32 and rounded once, to x.dtype. The gradients of h_post
    and h_res are summed over the channels in float32, in an order that does not change between
    runs. Only the inputs are saved.

    The models deepseek_v4 and glm5_next of transformers mix with the transposed matrix: h_res is
    `comb.transpose(-1, -2)` there.

    Under autocast the op runs in the dtypes of its inputs. float64 runs the definition on every
    device.

    Args:
        x: (..., hc, C), floating point, any strides; hc is from 1 to 64.
        f_out: (..., C), floating point: the layer's result.
        h_post: (..., hc), floating point.
        h_res: (..., hc, hc), floating point. The dtypes of the four may differ.

    Returns:
        (..., hc, C), contiguous, of x's dtype.

    Raises:
        TypeError: a tensor is not floating point.
        ValueError: a shape or a device is not as above.

    Source: Xie et al., "mHC: Manifold-Constrained Hyper-Connections", arXiv 2512.24880, 2025.

    Example:
        >>> x, f_out = torch.tensor([[[1.0], [2.0]]]), torch.tensor([[10.0]])
        >>> h_res = torch.tensor([[[0.0, 1.0], [1.0, 0.0]]])
        >>> liger_ops.mhc_post_res(x, f_out, torch.tensor([[1.0, 0.5]]), h_res)
        tensor([[[12.],
                 [ 6.]]])
    """
    wide = widened(x)
    mixed = torch.matmul(h_res.to(wide.dtype), wide)
    added = h_post.to(wide.dtype).unsqueeze(-1) * f_out.to(wide.dtype).unsqueeze(-2)
    return (mixed + added).to(x.dtype).contiguous()


@library.define()
def mhc_post_res_backward(
    dy: Tensor, x: Tensor, f_out: Tensor, h_post: Tensor, h_res: Tensor, output_mask: list[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """The gradient of `mhc_post_res`.

        dx[i, c]     = sum over o of h_res[o, i] * dy[o, c]
        df_out[c]    = sum over o of h_post[o] * dy[o, c]
        dh_post[o]   = sum over c of dy[o, c] * f_out[c]
        dh_res[o, i] = sum over c of dy[o, c] * x[i, c]

    Args:
        dy: (..., hc, C), any strides.
        x, f_out, h_post, h_res: as given to `mhc_post_res`.
        output_mask: whether dx, df_out, dh_post and dh_res are computed and allocated.

    Returns:
        dx, df_out, dh_post and dh_res, contiguous, of the shapes and dtypes of x, f_out, h_post and
        h_res; each may be None.

    Raises:
        TypeError, ValueError: as `mhc_post_res`; or dy does not have x's shape.
    """
    wide = widened(x)
    dtype = wide.dtype
    dy = dy.to(dtype)
    dx = df_out = dh_post = dh_res = None
    if output_mask[0]:
        dx = torch.matmul(h_res.to(dtype).transpose(-1, -2), dy).to(x.dtype).contiguous()
    if output_mask[1]:
        df_out = (h_post.to(dtype).unsqueeze(-1) * dy).sum(-2).to(f_out.dtype)
    if output_mask[2]:
        dh_post = (dy * f_out.to(dtype).unsqueeze(-2)).sum(-1).to(h_post.dtype).contiguous()
    if output_mask[3]:
        dh_res = torch.matmul(dy, wide.transpose(-1, -2)).to(h_res.dtype).contiguous()
    return dx, df_out, dh_post, dh_res


library.gradient("mhc_post_res")
library.keep_dtypes_under_autocast("mhc_post_res")
library.keep_dtypes_under_autocast("mhc_post_res_backward")
