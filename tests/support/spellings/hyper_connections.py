"""A hyper-connection and its layer, in methods that near misses change."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextHyperConnection

HC, HIDDEN = 4, 12
CONFIG = SimpleNamespace(
    hc_mult=HC, hc_sinkhorn_iters=3, hc_eps=1e-3, rms_norm_eps=1e-5, hidden_size=HIDDEN
)
OPTIONS = {
    "tmax": 3, "rms_eps": 1e-5, "pre_eps": 1e-3, "sinkhorn_eps": 1e-3, "post_mult": 2.0,
}  # fmt: skip


class Connection(nn.Module):
    """DeepSeek-V4's equations. With float64 inputs they compute in float64, the tests' truth."""

    def __init__(self) -> None:
        super().__init__()
        columns = HC * (HC + 2)
        self.fn = nn.Parameter(torch.empty(columns, HC * HIDDEN))
        self.base = nn.Parameter(torch.empty(columns))
        self.scale = nn.Parameter(torch.empty(3))

    def rows(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], x.shape[1], -1)

    def projection(self, x: Tensor) -> Tensor:
        wide = self.rows(x)
        wide = wide if x.dtype is torch.float64 else wide.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
        return F.linear(wide, self.fn.to(wide.dtype))

    def post(self, logits: Tensor) -> Tensor:
        return 2 * torch.sigmoid(logits)

    def start(self, logits: Tensor) -> Tensor:
        return torch.softmax(logits, dim=-1) + 1e-3

    def sinkhorn(self, matrix: Tensor) -> Tensor:
        matrix = matrix / (matrix.sum(dim=-2, keepdim=True) + 1e-3)
        for _ in range(2):
            matrix = matrix / (matrix.sum(dim=-1, keepdim=True) + 1e-3)
            matrix = matrix / (matrix.sum(dim=-2, keepdim=True) + 1e-3)
        return matrix

    def collapsed(self, h_pre: Tensor, x: Tensor) -> Tensor:
        return (h_pre.unsqueeze(-1) * x).sum(dim=2).to(x.dtype)

    def forward(self, hidden_streams: Tensor) -> Any:
        mix = self.projection(hidden_streams)
        pre_w, post_w, comb_w = mix.split([HC, HC, HC * HC], dim=-1)
        pre_b, post_b, comb_b = self.base.split([HC, HC, HC * HC])
        pre_scale, post_scale, comb_scale = self.scale.unbind(0)
        comb_w = comb_w.view(*comb_w.shape[:-1], HC, HC)
        h_pre = torch.sigmoid(pre_w * pre_scale + pre_b) + 1e-3
        post = self.post(post_w * post_scale + post_b)
        comb = self.sinkhorn(self.start(comb_w * comb_scale + comb_b.view(HC, HC)))
        return post, comb, self.collapsed(h_pre, hidden_streams)


class Layer(nn.Module):
    """A connection around a linear layer, as decoder layers mix it."""

    def __init__(self, connection: nn.Module) -> None:
        super().__init__()
        self.hc = connection
        self.body = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        post, comb, y = self.hc(x)
        y = self.body(y)
        return post.to(x.dtype).unsqueeze(-1) * y.unsqueeze(-2) + torch.matmul(
            comb.to(x.dtype).transpose(-1, -2), x
        )


def layer(connection: nn.Module, dtype: torch.dtype = torch.float32) -> Layer:
    """Return a layer with random weights; base and scale are float32, as in transformers."""
    module = Layer(connection)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    module.body.to(dtype)
    module.hc.fn.data = module.hc.fn.data.to(dtype)
    return module


MODULES: dict[str, Any] = {
    "deepseek_v4": lambda: DeepseekV4HyperConnection(CONFIG),
    "glm5_next": lambda: Glm5NextTextHyperConnection(CONFIG),
}


class RowsLast(Connection):
    def sinkhorn(self, matrix: Tensor) -> Tensor:
        matrix = super().sinkhorn(matrix)
        return matrix / (matrix.sum(dim=-1, keepdim=True) + 1e-3)


class OtherSums(Connection):
    """One of the sums has another eps."""

    def sinkhorn(self, matrix: Tensor) -> Tensor:
        matrix = super().sinkhorn(matrix)
        matrix = matrix / (matrix.sum(dim=-1, keepdim=True) + 1e-3)
        return matrix / (matrix.sum(dim=-2, keepdim=True) + 2e-3)


class OtherStart(Connection):
    def start(self, logits: Tensor) -> Tensor:
        return torch.softmax(logits, dim=-1) + 2e-3


class Exponentials(Connection):
    """The start of the paper, which no model has."""

    def start(self, logits: Tensor) -> Tensor:
        return torch.exp(logits) + 1e-3


class AcrossColumns(Connection):
    def start(self, logits: Tensor) -> Tensor:
        return torch.softmax(logits, dim=-2) + 1e-3


class PostWithEps(Connection):
    """The post weights of HYV4."""

    def post(self, logits: Tensor) -> Tensor:
        return torch.sigmoid(logits) + 1e-3


class NormAfter(Connection):
    """The projection of HYV4: the product is multiplied by 1 / rms of each token."""

    def projection(self, x: Tensor) -> Tensor:
        wide = x.view(x.shape[0], x.shape[1], -1)
        wide = wide if x.dtype is torch.float64 else wide.float()
        mix = F.linear(wide, self.fn.to(wide.dtype))
        return mix * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)


class Rounded(Connection):
    """The projection is rounded to x's dtype, which differs in bfloat16 alone."""

    def projection(self, x: Tensor) -> Tensor:
        mix = super().projection(x)
        return mix.to(x.dtype).to(mix.dtype)


class Watched(Connection):
    """An iterate of Sinkhorn is used elsewhere."""

    def sinkhorn(self, matrix: Tensor) -> Tensor:
        first = matrix / (matrix.sum(dim=-2, keepdim=True) + 1e-3)
        rows = first / (first.sum(dim=-1, keepdim=True) + 1e-3)
        return rows / (rows.sum(dim=-2, keepdim=True) + 1e-3) + 0 * first


NEAR_MISSES: dict[str, tuple[type[Connection], str]] = {
    "rows-last": (RowsLast, "do not start and end with the columns"),
    "other-sums": (OtherSums, "not that added to every sum"),
    "other-start": (OtherStart, "not that added to every sum"),
    "exponentials": (Exponentials, "do not start from a softmax"),
    "across-columns": (AcrossColumns, "softmax has -2 where the op has -1"),
    "post-with-eps": (PostWithEps, "post_mult"),
    "norm-after": (NormAfter, "the matrix's logits are not those of the op"),
    "watched": (Watched, "is used elsewhere"),
}
