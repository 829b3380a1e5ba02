"""Modules as models write them, for which the kernels hub has layers. They need torch alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HIDDEN = 12


class Norm(nn.Module):
    """Llama's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1.0, 2.0, HIDDEN))
        self.variance_epsilon = 1e-2

    def normalised(self, x: Tensor) -> Tensor:
        x = x.float()
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.weight * self.normalised(hidden_states).to(hidden_states.dtype)


class RoundedOnce(Norm):
    """GPT-OSS's."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return (self.weight * self.normalised(hidden_states)).to(hidden_states.dtype)


class ZeroCentred(Norm):
    """Gemma's."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        y = self.normalised(hidden_states) * (1.0 + self.weight.float())
        return y.type_as(hidden_states)


class Centred(Norm):
    """A near miss: it subtracts the mean."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states - hidden_states.mean(-1, keepdim=True))


class Doubled(Norm):
    """A near miss: it adds 2 to the weight."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return (self.weight + 2) * self.normalised(hidden_states).to(hidden_states.dtype)


class GatedNorm(Norm):
    """Qwen3-Next's."""

    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        assert gate is not None
        y = self.weight * self.normalised(hidden_states).to(hidden_states.dtype)
        return (y * F.silu(gate.float())).to(hidden_states.dtype)


class SigmoidGatedNorm(Norm):
    """Kimi Linear's."""

    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        assert gate is not None
        y = self.weight.float() * self.normalised(hidden_states)
        return (y * torch.sigmoid(gate.float())).to(hidden_states.dtype)


class TanhGatedNorm(Norm):
    """A near miss."""

    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        assert gate is not None
        return super().forward(hidden_states) * torch.tanh(gate)


class Rotary(nn.Module):
    """A function of a model, in the module that `kernels` makes of it."""

    def __init__(self, turned: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.turned = turned

    def forward(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
    ) -> tuple[Tensor, Tensor]:
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return q * cos + self.turned(q) * sin, k * cos + self.turned(k) * sin


class RotaryOfPairs(nn.Module):
    """GPT-OSS's: the tables have one number for the two elements of a pair."""

    def forward(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
    ) -> tuple[Tensor, Tensor]:
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)

        def rotate(x: Tensor) -> Tensor:
            a, b = x.chunk(2, -1)
            return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

        return rotate(q), rotate(k)


def halves(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def neighbours(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def unsigned(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((b, a), -1)


class MLP(nn.Module):
    """Llama's."""

    def __init__(self, act_fn: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(HIDDEN, 20, bias=False), nn.Linear(HIDDEN, 20)
        self.down_proj, self.act_fn = nn.Linear(20, HIDDEN), act_fn

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class PackedMLP(nn.Module):
    """Phi-3's."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(HIDDEN, 40, bias=False)
        self.down_proj = nn.Linear(20, HIDDEN, bias=False)

    def forward(self, hidden_states: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(hidden_states).chunk(2, -1)
        return self.down_proj(up * F.silu(gate))


class ScaledMLP(MLP):
    """A near miss."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * super().forward(x)


class Experts(nn.Module):
    """Experts with the attributes that `use_experts_implementation` gives them."""

    def __init__(self, experts: int = 3) -> None:
        super().__init__()
        self.has_gate, self.has_bias, self.is_transposed = True, True, True
        self.has_post_expert_norm = False
        self.alpha, self.limit = 1.702, 7.0
        self.gate_up_proj = nn.Parameter(torch.randn(experts, HIDDEN, 40))
        self.gate_up_proj_bias = nn.Parameter(torch.randn(experts, 40))
        self.down_proj = nn.Parameter(torch.randn(experts, 20, HIDDEN))
        self.down_proj_bias = nn.Parameter(torch.randn(experts, HIDDEN))

    def _apply_gate(self, h: Tensor) -> Tensor:
        """GPT-OSS's."""
        gate, up = h[..., ::2].clamp(max=self.limit), h[..., 1::2].clamp(-self.limit, self.limit)
        return (up + 1) * gate * torch.sigmoid(self.alpha * gate)

    def forward(self, rows: Tensor, index: Tensor, scores: Tensor) -> Tensor:
        h = torch.einsum("td,edf->tef", rows, self.gate_up_proj) + self.gate_up_proj_bias
        y = torch.einsum("tei,eid->ted", self._apply_gate(h), self.down_proj) + self.down_proj_bias
        return (y.gather(1, index[..., None].expand(-1, -1, HIDDEN)) * scores[..., None]).sum(1)


class Router(nn.Module):
    def __init__(self, experts: int = 3) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, HIDDEN))

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(rows, self.weight)
        values, index = logits.topk(2)
        return logits, values.softmax(-1), index


class MoeMLP(nn.Module):
    """GPT-OSS's."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = Router(), Experts()

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        _, scores, index = self.router(rows)
        return self.experts(rows, index, scores).reshape(hidden_states.shape), scores


class NextTokenLoss(nn.Module):
    """transformers' ForCausalLMLoss, in the module that `kernels` makes of it."""

    def forward(
        self, logits: Tensor, labels: Tensor | None, vocab_size: int,
        num_items_in_batch: Tensor | int | None = None, ignore_index: int = -100,
        shift_labels: Tensor | None = None, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        if shift_labels is None:
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:].contiguous()
        rows, target = logits.float().view(-1, vocab_size), shift_labels.view(-1)
        if num_items_in_batch is None:
            return F.cross_entropy(rows, target, ignore_index=ignore_index)
        loss = F.cross_entropy(rows, target, ignore_index=ignore_index, reduction="sum")
        return loss / num_items_in_batch


class Case(NamedTuple):
    """A module, the layer that it asks for, the op that the layer calls, and its arguments."""

    layer: str
    op: str
    module: nn.Module
    args: tuple[Any, ...]


def cases() -> dict[str, Case]:
    torch.manual_seed(0)
    x, gate = torch.randn(2, 5, HIDDEN), torch.randn(2, 5, HIDDEN)
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8)
    turned = (q.transpose(1, 2), k.transpose(1, 2))
    tables, half = torch.randn(2, 2, 5, 8).unbind(), torch.randn(2, 2, 5, 4).unbind()
    logits, labels = torch.randn(2, 5, 7), torch.randint(0, 7, (2, 5))
    labels[0, 3:] = -100
    tanh = nn.GELU(approximate="tanh")
    return {
        "norm": Case("RMSNorm", "rms_norm", Norm(), (x,)),
        "zero-centred": Case("RMSNormZeroCentered", "rms_norm", ZeroCentred(), (x,)),
        "silu-gated": Case("RMSNormGated", "gated_rms_norm", GatedNorm(), (x, gate)),
        "sigmoid-gated": Case("RMSNormGated", "gated_rms_norm", SigmoidGatedNorm(), (x, gate)),
        "rotary": Case("rotary_pos_emb", "rope", Rotary(halves), (q, k, *tables)),
        "interleaved": Case("rotary_pos_emb", "rope", Rotary(neighbours), (q, k, *tables)),
        "heads last": Case("rotary_pos_emb", "rope", Rotary(halves), (*turned, *tables, 2)),
        "per pair": Case("rotary_pos_emb", "rope", RotaryOfPairs(), (q, k, *half)),
        "mlp": Case("SwiGLUMLP", "swiglu", MLP(nn.SiLU()), (x,)),
        "packed mlp": Case("SwiGLUMLP", "swiglu", PackedMLP(), (x,)),
        "geglu mlp": Case("GeGLUMLP", "geglu", MLP(tanh), (x,)),
        "erf mlp": Case("GeGLUMLP", "geglu", MLP(F.gelu), (x,)),
        "experts": Case("MegaBlocksMoeMLP", "moe_experts", MoeMLP(), (x,)),
        "loss": Case("ForCausalLMLoss", "cross_entropy", NextTokenLoss(), (logits, labels, 7)),
        "counted loss": Case(
            "ForCausalLMLoss", "cross_entropy", NextTokenLoss(), (logits, labels, 7, 4)
        ),
    }


def near_misses() -> dict[str, Case]:
    kept = cases()
    return {
        "centred": kept["norm"]._replace(module=Centred()),
        "doubled": kept["norm"]._replace(module=Doubled()),
        "tanh-gated": kept["silu-gated"]._replace(module=TanhGatedNorm()),
        "unsigned": kept["rotary"]._replace(module=Rotary(unsigned)),
        "relu mlp": kept["mlp"]._replace(module=MLP(F.relu)),
        "scaled mlp": kept["mlp"]._replace(module=ScaledMLP(F.silu)),
    }
