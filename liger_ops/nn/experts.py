"""The experts of a mixture-of-experts layer, as a module."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..ops.experts.moe_experts import moe_experts
from .derived import check_size, documented, named

__all__ = ["MoEExperts"]


@documented(moe_experts)
class MoEExperts(nn.Module):
    """The experts of a mixture-of-experts layer: MLPs, summed for each token as a router chose.

    Args:
        num_experts: the number E of experts.
        hidden_size: the size D of x and y.
        intermediate_size: the size I of the rows between an expert's two products.
        bias: whether the experts have biases.

    Attributes:
        gate_up_proj: (E, 2I, D), or (E, I, D) for "relu_squared".
        down_proj: (E, D, I). Both start as the weights of torch.nn.Linear.
        gate_up_proj_bias, down_proj_bias: (E, 2I) or (E, I), and (E, D), which start as 0; or None.

    Example:
        >>> experts = liger_ops.nn.MoEExperts(4, hidden_size=8, intermediate_size=16)
        >>> index, weights = torch.tensor([[0, 3], [1, 2], [0, 1]]), torch.full((3, 2), 0.5)
        >>> experts(torch.zeros(3, 8), index, weights).shape
        torch.Size([3, 8])
    """

    def __init__(
        self, num_experts: int, hidden_size: int, intermediate_size: int, bias: bool = False,
        activation: str = "silu", alpha: float = 1.702, limit: float = 7.0, up_offset: float = 1.0,
        interleaved: bool = False, recompute: bool = False,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        sizes = {"num_experts": num_experts, "hidden_size": hidden_size}
        for name, size in {**sizes, "intermediate_size": intermediate_size}.items():
            check_size(type(self).__name__, name, size)
        self.activation, self.interleaved, self.recompute = activation, interleaved, recompute
        self.alpha, self.limit, self.up_offset = alpha, limit, up_offset
        E, D, I = num_experts, hidden_size, intermediate_size
        F = I if activation == "relu_squared" else 2 * I

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        self.gate_up_proj, self.down_proj = parameter(E, F, D), parameter(E, D, I)
        self.gate_up_proj_bias = parameter(E, F) if bias else None
        self.down_proj_bias = parameter(E, D) if bias else None
        # Raises the op's own errors for wrong options now, not at the first forward.
        with torch.device("meta"):
            index, x = torch.empty(0, 1, dtype=torch.int64), torch.empty(0, D, dtype=dtype)
        gate_up, down = self.gate_up_proj.to("meta"), self.down_proj.to("meta")
        moe_experts(x, gate_up, down, index, x[:, :1], None, None, *self._options())
        self.reset_parameters()

    def _options(self) -> tuple[str, float, float, float, bool, bool]:
        scalars = (self.alpha, self.limit, self.up_offset)
        return self.activation, *scalars, self.interleaved, self.recompute

    def reset_parameters(self) -> None:
        """Draw the weights as `torch.nn.Linear` does, and set the biases to 0."""
        for weight in (self.gate_up_proj, self.down_proj):
            bound = weight.shape[-1] ** -0.5
            nn.init.uniform_(weight, -bound, bound)
        for bias in (self.gate_up_proj_bias, self.down_proj_bias):
            if bias is not None:
                nn.init.zeros_(bias)

    def forward(
        self, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor,
        gate_up_lora_a: Tensor | None = None, gate_up_lora_b: Tensor | None = None,
        down_lora_a: Tensor | None = None, down_lora_b: Tensor | None = None,
        gate_up_lora_scale: float = 1.0, down_lora_scale: float = 1.0,
    ) -> Tensor:  # fmt: skip
        lora = (gate_up_lora_a, gate_up_lora_b, down_lora_a, down_lora_b)
        return moe_experts(
            x, self.gate_up_proj, self.down_proj, top_k_index, top_k_weights,
            self.gate_up_proj_bias, self.down_proj_bias, *self._options(),
            *lora, gate_up_lora_scale, down_lora_scale,
        )  # fmt: skip

    def extra_repr(self) -> str:
        E, D, I = self.down_proj.shape
        sizes = f"num_experts={E}, hidden_size={D}, intermediate_size={I}"
        return f"{sizes}, {named(self, 'activation', 'interleaved', 'recompute')}"
