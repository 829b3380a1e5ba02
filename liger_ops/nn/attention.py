"""Attention of documents, neighborhood attention, multi-token attention and attention residuals, as
modules.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..ops.attention.attn_res import attn_res
from ..ops.attention.multi_token_attention import multi_token_attention
from ..ops.attention.neighborhood_attention import neighborhood_attention
from ..ops.attention.varlen_attention import varlen_attention
from ..ops.attention.windows import per_dimension
from .derived import OptionsModule, check_size, documented, named

__all__ = ["AttnRes", "MultiTokenAttention", "NeighborhoodAttention", "VarlenAttention"]


@documented(neighborhood_attention)
@dataclass(eq=False, repr=False)
class NeighborhoodAttention(OptionsModule):
    """Attention of every query to the keys in a window around the query.

    It has no parameters: a model's own layers project to query, key and value.

    Args:
        kernel_size: the number of keys in a window; a value for all dimensions, or a list with one
            for each dimension.
        dilation: the distance of two neighbouring keys in a window; likewise.
        is_causal: whether a query attends to no later position; likewise.
        border: "clipped", as in Liger-Kernel, or "shifted", as in NATTEN.
        scale: the factor of the scores; None for 1 / sqrt(D).

    Example:
        >>> query, value = torch.zeros(1, 1, 4, 1), torch.arange(4.0).view(1, 1, 4, 1)
        >>> liger_ops.nn.NeighborhoodAttention(3)(query, query, value).flatten()
        tensor([0.5000, 1.0000, 2.0000, 2.5000])
    """

    kernel_size: int | list[int]
    dilation: int | list[int] = 1
    is_causal: bool | list[bool] = False
    border: str = "clipped"
    scale: float | None = None

    def _check(self) -> None:
        """Raise the op's own errors now, except those that depend on the inputs' lengths."""
        options = (self.kernel_size, self.dilation, self.is_causal)
        dims = max(len(per_dimension(values, 1)) for values in options)
        # Dimensions so long that every window fits; without samples nothing is computed.
        query = torch.empty(0, 1, *[2**20] * dims, 1, device="meta")
        neighborhood_attention(query, query, query, *self.options)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return neighborhood_attention(query, key, value, *self.options)


@documented(varlen_attention)
@dataclass(eq=False, repr=False)
class VarlenAttention(OptionsModule):
    """Attention of tokens to the tokens of their own document, for documents of any lengths.

    It has no parameters: a model's own layers project to query, key and value, and have the sinks.
    With l_n keys of document n, token i of the document has

        y_i = sum_j exp(s_ij) * value_j / (sum_j exp(s_ij) + exp(sink)) over its keys j with
              i - window_left <= j <= i + window_right and 0 <= j < l_n, that key_mask
              shows,
        s_ij = scale * query_i . key_j, or softcap * tanh(s_ij / softcap) if softcap is given.

    Example:
        >>> x, documents = torch.arange(5.0).view(5, 1, 1), torch.tensor([0, 2, 5])
        >>> attention = liger_ops.nn.VarlenAttention(window_left=1)
        >>> attention(torch.zeros_like(x), x, x, documents, 3).flatten()
        tensor([0.0000, 0.5000, 2.0000, 2.5000, 3.5000])
    """

    window_left: int = -1
    window_right: int = 0
    scale: float | None = None
    softcap: float | None = None
    engine: str = "auto"

    def _check(self) -> None:
        x = torch.empty(0, 1, 1, device="meta")
        documents = torch.empty(1, dtype=torch.int32, device="meta")
        varlen_attention(x, x, x, documents, 1, None, None, None, *self.options)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, max_seqlen: int,
        lengths: Tensor | None = None, key_mask: Tensor | None = None,
        sinks: Tensor | None = None, bounds: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        documents = (cu_seqlens, max_seqlen, lengths, key_mask)
        arguments = (*documents, sinks, *self.options, bounds)
        return varlen_attention(query, key, value, *arguments)


@documented(multi_token_attention)
class MultiTokenAttention(nn.Module):
    """Causal attention weights, mixed over neighbouring queries, keys and heads.

    Its arguments are those of `torch.nn.Conv2d`, and of Liger-Kernel's `LigerMultiTokenAttention`.

    Args:
        in_channels: the number C of heads of scores.
        out_channels: the number E of heads of the result.
        kernel_size: the size of the convolution over queries and keys; a value for both dimensions,
            or a list with one for each.
        bias: whether the module has a bias.

    Attributes:
        weight: (E, C / groups, P, Q). It starts as the weight of `torch.nn.Conv2d`.
        bias: (E,), or None. It starts as zeros.

    Example:
        >>> module = liger_ops.nn.MultiTokenAttention(2, 4, 3, padding=1)
        >>> module(torch.zeros(1, 2, 5, 5)).shape
        torch.Size([1, 4, 5, 5])
    """

    bias: nn.Parameter | None

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: int | list[int],
        stride: int | list[int] = 1, padding: int | list[int] = 0, dilation: int | list[int] = 1,
        groups: int = 1, bias: bool = True, sparse: bool = False,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.kernel_size, self.stride, self.padding, self.dilation = (
            per_dimension(value, 2) for value in (kernel_size, stride, padding, dilation)
        )
        sizes = {"in_channels": in_channels, "out_channels": out_channels, "groups": groups}
        for name, size in sizes.items():
            check_size("MultiTokenAttention", name, size)
        for size in self.kernel_size:
            check_size("MultiTokenAttention", "kernel_size", size)
        self.in_channels, self.out_channels, self.groups = in_channels, out_channels, groups
        self.sparse = sparse
        shape = (out_channels, in_channels // groups, *self.kernel_size)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        parameter = torch.empty(out_channels, device=device, dtype=dtype) if bias else None
        self.register_parameter("bias", None if parameter is None else nn.Parameter(parameter))
        self._check_options()
        self.reset_parameters()

    def _check_options(self) -> None:
        """Raise the op's own errors now, except those that depend on the length of scores."""
        with torch.device("meta"):
            scores, weight = torch.empty(0, self.in_channels, 2**20, 2**20), self.weight
            multi_token_attention(scores, torch.empty(weight.shape), None, *self._options)

    @property
    def _options(self) -> tuple[list[int], list[int], list[int], int, bool]:
        return self.stride, self.padding, self.dilation, self.groups, self.sparse

    def reset_parameters(self) -> None:
        """Draw weight as `torch.nn.Conv2d` does, and set bias to 0."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, scores: Tensor) -> Tensor:
        return multi_token_attention(scores, self.weight, self.bias, *self._options)

    def extra_repr(self) -> str:
        options = named(self, "kernel_size", "stride", "padding", "dilation", "groups")
        has_bias = self.bias is not None
        return (
            f"{self.in_channels}, {self.out_channels}, {options}, bias={has_bias},"
            f" sparse={self.sparse}"
        )


@documented(attn_res)
class AttnRes(nn.Module):
    """The mean of the blocks' outputs, weighted by attention over them.

    Args:
        hidden_size: the size D of the last dimension.
        x: (N, ..., D), or a list of N tensors (..., D), which is stacked.

    Attributes:
        query: (D,). It starts as 0: all blocks have the same weight.
        weight: (D,). It starts as 1.

    Example:
        >>> mix = liger_ops.nn.AttnRes(4)
        >>> mix([torch.zeros(2, 4), torch.ones(2, 4)]).shape
        torch.Size([2, 4])
    """

    def __init__(
        self, hidden_size: int, eps: float = 1e-6,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if hidden_size < 1:
            raise ValueError(f"AttnRes: hidden_size must be a positive int, got {hidden_size}")
        if not eps >= 0:
            raise ValueError(f"AttnRes: eps must be a number of at least 0, got {eps}")
        self.hidden_size = hidden_size
        self.eps = eps
        self.query = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set query to 0 and weight to 1."""
        nn.init.zeros_(self.query)
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor | list[Tensor] | tuple[Tensor, ...]) -> Tensor:
        blocks = x if isinstance(x, Tensor) else torch.stack(tuple(x))
        return attn_res(blocks, self.query, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}"
