"""The layer's input from the streams of a hyper-connection."""

from __future__ import annotations

from torch import Tensor

from ... import library
from ..tensors import widened


@library.define(axes="x=* Hc c, h_pre=* Hc -> y=* c")
def mhc_pre(x: Tensor, h_pre: Tensor) -> Tensor:
    """Compute a layer's input: the weighted sum of the streams of a hyper-connection.

        y[c] = sum over i of h_pre[i] * x[i, c]

    for each token. y is summed in float32 and rounded once, to x.dtype. The gradient of h_pre is
    summed over the channels in float32, in an order that does not change between runs. Only the
    inputs are saved, and nothing as large as x is in memory beside x and its gradient.

    Under autocast the op runs in the dtypes of its inputs. float64 runs the definition on every
    device.

    Args:
        x: (..., hc, C), floating point, any strides; hc is from 1 to 64.
        h_pre: (..., hc), floating point; its dtype may differ from x's.

    Returns:
        (..., C), contiguous, of x's dtype.

    Raises:
        TypeError: a tensor is not floating point.
        ValueError: x has no streams, more than 64, or no channels; h_pre is not (..., hc); or the
            devices differ.

    Source: Xie et al., "mHC: Manifold-Constrained Hyper-Connections", arXiv 2512.24880, 2025.

    Example:
        >>> x = torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])
        >>> liger_ops.mhc_pre(x, torch.tensor([[1.0, 10.0]]))
        tensor([[31., 42.]])
    """
    wide = widened(x)
    return (h_pre.to(wide.dtype).unsqueeze(-1) * wide).sum(-2).to(x.dtype)


mhc_pre_backward = library.derive_backward("mhc_pre", "dy x h_pre output_mask -> dx dh_pre")
