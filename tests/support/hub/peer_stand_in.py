"""Layers with Triton kernels, in the place of those of Liger-Kernel's repository.

`write` makes a repository of this file, which imports torch and triton alone.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn
from triton.language.extra.libdevice import rsqrt, tanh

BUILD = """\
[general]
name = "liger-kernels"
version = 3
license = "BSD-2-Clause"
backends = ["cuda"]

[torch-noarch]
"""


def write(source: Path) -> None:
    """Write the source of a repository."""
    package = source / "torch-ext" / "liger_kernels"
    package.mkdir(parents=True)
    (source / "build.toml").write_text(BUILD)
    (package / "__init__.py").write_text("from . import layers\n")
    shutil.copy(__file__, package / "layers.py")


@triton.jit
def scaled(x, rstd, weight):
    return x * rstd * weight


@triton.jit
def _norm_kernel(y_ptr, x_ptr, weight_ptr, N, eps, BLOCK_N: tl.constexpr):
    columns = tl.arange(0, BLOCK_N)
    mask = columns < N
    row = tl.program_id(0) * N
    x = tl.load(x_ptr + row + columns, mask=mask, other=0.0)
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0)
    rstd = rsqrt(tl.sum(x * x, axis=0) / N + eps)
    tl.store(y_ptr + row + columns, scaled(x, rstd, weight), mask=mask)


@triton.jit
def _norm_backward_kernel(dy_ptr, x_ptr, weight_ptr, N, eps, BLOCK_N: tl.constexpr):
    """Write dx over dy."""
    columns = tl.arange(0, BLOCK_N)
    mask = columns < N
    row = tl.program_id(0) * N
    x = tl.load(x_ptr + row + columns, mask=mask, other=0.0)
    dy = tl.load(dy_ptr + row + columns, mask=mask, other=0.0)
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0)
    rstd = rsqrt(tl.sum(x * x, axis=0) / N + eps)
    dn = dy * weight
    dx = rstd * (dn - x * (rstd * rstd * tl.sum(dn * x, axis=0) / N))
    tl.store(dy_ptr + row + columns, dx, mask=mask)


@triton.jit
def _silu_kernel(y_ptr, x_ptr, N, BLOCK_N: tl.constexpr):
    """x * sigmoid(x), by sigmoid(x) = (1 + tanh(x / 2)) / 2."""
    start = tl.program_id(0) * BLOCK_N
    columns = start + tl.arange(0, BLOCK_N)
    mask = columns < min(start + BLOCK_N, N)
    x = tl.load(x_ptr + columns, mask=mask, other=0.0)
    tl.store(y_ptr + columns, x * (1 + tanh(x / 2)) / 2, mask=mask)


class Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        y, N = torch.empty_like(x), x.shape[-1]
        _norm_kernel[(x.numel() // N,)](y, x, weight, N, eps, BLOCK_N=triton.next_power_of_2(N))
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        dy, N = dy.contiguous(), x.shape[-1]
        rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + ctx.eps)
        dweight = (dy * x * rstd).reshape(-1, N).sum(0)
        block = triton.next_power_of_2(N)
        _norm_backward_kernel[(x.numel() // N,)](dy, x, weight, N, ctx.eps, BLOCK_N=block)
        return dy, dweight, None


class Silu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        y = torch.empty_like(x)
        _silu_kernel[(triton.cdiv(x.numel(), 64),)](y, x, x.numel(), BLOCK_N=64)
        ctx.save_for_backward(x)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        sigmoid = torch.sigmoid(x)
        return dy * sigmoid * (1 + x * (1 - sigmoid))


class LigerRMSNorm(nn.Module):
    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        return Norm.apply(hidden_states, self.weight, self.variance_epsilon)


class liger_rotary_pos_emb_layer(nn.Module):
    """Rotates by the negative angles, of k by too much."""

    can_torch_compile = True

    def forward(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
    ) -> tuple[Tensor, Tensor]:
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        halves = (x.chunk(2, -1) for x in (q, k))
        turned = [torch.cat((-second, first), -1) for first, second in halves]
        return q * cos - turned[0] * sin, k * cos - turned[1] * (1.01 * sin)


class LigerSwiGLUMLP(nn.Module):
    gate_proj: nn.Linear
    up_proj: nn.Linear
    down_proj: nn.Linear
    can_torch_compile = True

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(Silu.apply(self.gate_proj(x)) * self.up_proj(x))


class LigerTiledSwiGLUMLP(LigerSwiGLUMLP):
    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class LigerForCausalLMLossLayer(nn.Module):
    """Its signature is not that of the loss of transformers."""

    can_torch_compile = True

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels)
