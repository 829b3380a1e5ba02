"""The streams of a hyper-connection after a layer."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import library
from ..tensors import widened


@library.define(axes="x=* Hc c, f_out=* c, h_post=* Hc, h_res=* Hc Hc -> y=* Hc c")
def mhc_post_res(x: Tensor, f_out: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
    """Mix the streams of a hyper-connection after a layer, and add the layer's result.

        y[o, c] = sum over i of h_res[o, i] * x[i, c] + h_post[o] * f_out[c]

    for each token. y is computed in float32 and rounded once, to x.dtype. The gradients of h_post
    and h_res are summed over the channels in float32, in an order that does not change between
    runs. Only the inputs are saved.

    The models deepseek_v4 and glm5_next of transformers mix with the transposed matrix: for them
    h_res is `comb.transpose(-1, -2)`.

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
        ValueError: x has no streams, more than 64, or no channels; the other shapes do not fit x's;
            or the devices differ.

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


mhc_post_res_backward = library.derive_backward(
    "mhc_post_res", "dy x f_out h_post h_res output_mask -> dx df_out dh_post dh_res"
)
library.keep_dtypes_under_autocast("mhc_post_res", "mhc_post_res_backward")
