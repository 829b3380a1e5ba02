"""The convolution of multi_token_attention by PyTorch, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from ....ops.attention.multi_token_attention import Convolution


class CausalConvolution(Convolution):
    """The convolution, with zeros where the key is after the query. A device's kernels are a
    subclass."""

    def takes(self, weight: Tensor) -> bool:
        """Return whether this class can convolve with this weight."""
        return True

    def forward(self, p: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return y, contiguous. p is contiguous, and 0 where the key is after the query."""
        # In place, tril writes nothing but the zeros.
        return self(p, weight, bias).contiguous().tril_()

    def masked(self, dy: Tensor, weight: Tensor) -> Tensor:
        """Return dc, dy with zeros where the key is after the query, for the methods below."""
        return dy.to(weight.dtype).tril()

    def gradient_of_input(self, dc: Tensor, weight: Tensor, L: int) -> Tensor:
        """Return dp, of weight's dtype."""
        # As in torch.nn.grad.conv2d_input: of the convolution's input, only the shape is used.
        channels = weight.shape[1] * self.groups
        shape_of_p = weight.new_empty(1).expand(len(dc), channels, L, L)
        dp, _, _ = self.gradients(dc, shape_of_p, weight, [True, False, False])
        assert dp is not None
        return dp

    def gradients_of_weights(
        self, dc: Tensor, p: Tensor, weight: Tensor, bias: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return dweight and, with `bias`, dbias, of weight's dtype or float32."""
        _, dweight, _ = self.gradients(dc, p, weight, [False, True, False])
        assert dweight is not None
        return dweight, dc.sum((0, 2, 3), dtype=torch.float32) if bias else None
