"""Layers of the kernels hub, by the names that transformers looks them up by.

`kernels.kernelize` puts the forward of such a class into the place of a module's own. The classes
have no state: `self` is the model's module, with its parameters and attributes. A layer calls an op
with the options that compute what the module's class computes, and where there are none it runs the
module's own forward (`recognise`). All of them train, and compile without a graph break with torch
2.13 or later.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.activations.geglu import geglu
from ..ops.activations.swiglu import swiglu
from ..ops.losses.cross_entropy import cross_entropy
from ..ops.norms.gated_rms_norm import gated_rms_norm
from ..ops.norms.rms_norm import rms_norm
from ..ops.rope.rope import rope
from .experts import run_experts
from .recognise import KINDS, LayerKind, Parts, identity_of, numbers, own_forward, run

__all__ = [
    "FastGELU", "ForCausalLMLoss", "GeGLUMLP", "GeLU", "GeluTanh", "MegaBlocksMoeMLP", "NewGELU",
    "QuickGELU", "RMSNorm", "RMSNormGated", "RMSNormZeroCentered", "SiLU", "SwiGLUMLP",
    "rotary_pos_emb",
]  # fmt: skip


# Dynamo of older versions cannot call `options_of`, a function of a module, while it traces.
TRACES = torch.__version__ >= "2.13"


class HubLayer(nn.Module):
    """The attributes by which `kernels` knows what a layer can do."""

    can_torch_compile = TRACES
    has_backward = True


class HubRMSNorm(HubLayer):
    """`rms_norm`, of modules with `weight`, and `variance_epsilon` or `eps`: its offset and casting
    mode are the module's."""

    def forward(self, hidden_states: Tensor) -> Any:
        if getattr(self, "weight", None) is None:
            return own_forward(self, hidden_states)
        return run("RMSNorm", self, (hidden_states,), (hidden_states.dtype, self.weight.dtype))


RMSNorm = HubRMSNorm


class RMSNormZeroCentered(HubRMSNorm):
    """`rms_norm`, of modules that add 1 to their weight (Qwen3.5)."""


class RMSNormGated(HubLayer):
    """`gated_rms_norm`: the norm before or after the gate, with silu or sigmoid."""

    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Any:
        if gate is None:
            return own_forward(self, hidden_states)
        dtypes = (hidden_states.dtype, gate.dtype, self.weight.dtype)
        form = (*dtypes, identity_of(getattr(self, "activation", None)))
        return run("RMSNormGated", self, (hidden_states, gate), form)


class rotary_pos_emb(HubLayer):
    """`rope`, of queries and keys of four dimensions: the layout of pairs is the function's."""

    def forward(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
    ) -> Any:
        positions = 2 if unsqueeze_dim == 1 else 1
        if (
            q.dim() != 4 or cos.dim() != 3 or unsqueeze_dim not in (1, 2)
            or q.shape[positions] != cos.shape[1] or cos.shape[0] not in (1, q.shape[0])
        ):  # fmt: skip
            return own_forward(self, q, k, cos, sin, unsqueeze_dim)
        is_per_pair = 2 * cos.shape[-1] == q.shape[-1]
        form = (q.dtype, k.dtype, cos.dtype, sin.dtype, is_per_pair, unsqueeze_dim)
        return run("rotary_pos_emb", self, (q, k, cos, sin, unsqueeze_dim), form)


class SwiGLUMLP(HubLayer):
    """`swiglu` or `geglu` between the projections `gate_proj`, `up_proj` and `down_proj`, or
    `gate_up_proj` and `down_proj`: the activation is the module's."""

    def forward(self, x: Tensor) -> Any:
        activations = [getattr(self, name, None) for name in ("act_fn", "activation_fn")]
        return run("gated MLP", self, (x,), tuple(map(identity_of, activations)))


class GeGLUMLP(SwiGLUMLP):
    """`geglu` or `swiglu`: `SwiGLUMLP` under its other name."""


class MegaBlocksMoeMLP(HubLayer):
    """`moe_experts` with the module's `router` (GPT-OSS)."""

    def forward(self, hidden_states: Tensor) -> Any:
        return run("MegaBlocksMoeMLP", self, (hidden_states,))


class ForCausalLMLoss(HubLayer):
    """`cross_entropy` of the next token. The logits are not copied in float32."""

    def forward(
        self, logits: Tensor, labels: Tensor | None, vocab_size: int,
        num_items_in_batch: Tensor | int | None = None, ignore_index: int = -100,
        shift_labels: Tensor | None = None, **kwargs: Any,
    ) -> Any:  # fmt: skip
        args = (logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels)
        return run("ForCausalLMLoss", self, args, (logits.dtype,), **kwargs)


class SiLU(HubLayer):
    """`torch.nn.functional.silu`."""

    def forward(self, input: Tensor) -> Tensor:
        return F.silu(input)


class GeLU(HubLayer):
    """`torch.nn.functional.gelu`, with erf."""

    def forward(self, input: Tensor) -> Tensor:
        return F.gelu(input)


class GeluTanh(HubLayer):
    """`torch.nn.functional.gelu`, with tanh."""

    def forward(self, input: Tensor) -> Tensor:
        return F.gelu(input, approximate="tanh")


class NewGELU(GeluTanh):
    """`torch.nn.functional.gelu`, with tanh: one kernel in place of eight."""


class FastGELU(GeluTanh):
    """`torch.nn.functional.gelu`, with tanh."""


class QuickGELU(HubLayer):
    """x * sigmoid(1.702 * x)."""

    def forward(self, input: Tensor) -> Tensor:
        return input * torch.sigmoid(1.702 * input)


def _in_own_dtypes(op: Any, x: Tensor, *args: Any, **options: Any) -> Any:
    """Call an op without autocast, which casts nothing in a model's own norm either."""
    device = x.device.type
    if not torch.is_autocast_enabled(device):
        return op(x, *args, **options)
    with torch.autocast(device, enabled=False):
        return op(x, *args, **options)


def _eps(module: Any) -> float:
    eps: float = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
    return eps


def _norm(module: Any, x: Tensor, **options: Any) -> Any:
    return _in_own_dtypes(rms_norm, x, module.weight, _eps(module), **options)


def _norm_example(module: Any, dtype: torch.dtype, weight_dtype: torch.dtype) -> Any:
    N = module.weight.shape[-1]
    # Small numbers, for which eps matters, and others.
    x = numbers(4, N) * torch.tensor([1e-3, 0.1, 1.0, 30.0])[:, None]
    weight = nn.Parameter(numbers(N, dtype=weight_dtype, phase=0.9))
    return {"weight": weight}, [(x.to(dtype),)]


KINDS["RMSNorm"] = LayerKind(
    _norm,
    [
        (("offset", offset), ("casting_mode", mode))
        for offset in (0.0, 1.0)
        for mode in ("llama", "gemma", "none")
    ],
    _norm_example,
    own_forward,
)


def _gated_norm(module: Any, x: Tensor, gate: Tensor, **options: Any) -> Any:
    return _in_own_dtypes(gated_rms_norm, x, gate, module.weight, _eps(module), **options)


def _gated_norm_example(
    module: Any, dtype: torch.dtype, gate_dtype: torch.dtype, weight_dtype: torch.dtype,
    activation: Any,
) -> Any:  # fmt: skip
    parts, [(x,)] = _norm_example(module, dtype, weight_dtype)
    return parts, [(x, numbers(*x.shape, dtype=gate_dtype, phase=0.5) * 4)]


KINDS["RMSNormGated"] = LayerKind(
    _gated_norm,
    [
        (("norm_before_gate", before), ("activation", activation), ("casting_mode", mode))
        for before in (True, False)
        for activation in ("silu", "sigmoid")
        for mode in ("llama", "gemma")
    ],
    _gated_norm_example,
    own_forward,
)


def _rotary(
    module: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int, **options: Any
) -> tuple[Tensor, Tensor]:
    if unsqueeze_dim == 1:
        return rope(q, k, cos, sin, **options)
    q, k = rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin, **options)
    return q.transpose(1, 2), k.transpose(1, 2)


def _rotary_example(
    module: Any, q_dtype: torch.dtype, k_dtype: torch.dtype, cos_dtype: torch.dtype,
    sin_dtype: torch.dtype, is_per_pair: bool, unsqueeze_dim: int,
) -> Any:  # fmt: skip
    B, H, S, D = 2, 3, 5, 8
    R = D // 2 if is_per_pair else D
    q, k = numbers(B, H, S, D, dtype=q_dtype), numbers(B, 1, S, D, dtype=k_dtype, phase=0.7)
    if unsqueeze_dim == 2:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    cos, sin = numbers(B, S, R, dtype=cos_dtype), numbers(B, S, R, dtype=sin_dtype, phase=0.8)
    return {}, [(q, k, cos, sin, unsqueeze_dim)]


KINDS["rotary_pos_emb"] = LayerKind(
    _rotary,
    [
        (("interleaved", interleaved), ("per_pair", per_pair), ("deinterleave", deinterleave))
        for interleaved, deinterleave in ((False, False), (True, False), (True, True))
        for per_pair in (False, True)
    ],
    _rotary_example,
    own_forward,
)


def _activated(activation: str, gate: Tensor, up: Tensor | None = None) -> Tensor:
    return swiglu(gate, up) if activation == "silu" else geglu(gate, up, activation)


def _gated_mlp(module: Any, x: Tensor, activation: str) -> Any:
    if hasattr(module, "gate_up_proj"):
        return module.down_proj(_activated(activation, module.gate_up_proj(x)))
    return module.down_proj(_activated(activation, module.gate_proj(x), module.up_proj(x)))


def _gated_mlp_example(module: Any, *activations: Any) -> Any:
    D, I = 6, 10
    widths = {"gate_up_proj": (D, 2 * I), "gate_proj": (D, I), "up_proj": (D, I)}
    parts = {
        name: _linear(*shape, phase=float(i))
        for i, (name, shape) in enumerate(widths.items())
        if hasattr(module, name)
    }
    return {**parts, "down_proj": _linear(I, D, phase=0.1)}, [(numbers(3, D) * 3,)]


def _linear(inputs: int, outputs: int, phase: float) -> nn.Linear:
    linear = nn.Linear(inputs, outputs, device="meta")
    linear.weight = nn.Parameter(numbers(outputs, inputs, phase=phase))
    linear.bias = nn.Parameter(numbers(outputs, phase=phase + 0.5))
    return linear


KINDS["gated MLP"] = LayerKind(
    _gated_mlp,
    [(("activation", activation),) for activation in ("silu", "tanh", "none")],
    _gated_mlp_example,
    own_forward,
)


def _routed(module: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    rows = x.reshape(-1, x.shape[-1])
    _, scores, index = module.router(rows)
    return run_experts(module.experts, rows, index, scores).view(x.shape), scores


class _Router(nn.Module):
    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        T = len(rows)
        index = torch.arange(2 * T).view(T, 2) % 3
        return numbers(T, 3), numbers(T, 2), index


class _ExampleExperts(nn.Module):
    def forward(self, rows: Tensor, index: Tensor, scores: Tensor) -> Tensor:
        return rows * (scores * (1.0 + index)).sum(-1, keepdim=True)


def _routed_example(module: Any) -> tuple[Parts, Any]:
    return {"router": _Router(), "experts": _ExampleExperts()}, [(numbers(2, 3, 6),)]


KINDS["MegaBlocksMoeMLP"] = LayerKind(_routed, [()], _routed_example, own_forward)


def _next_token_loss(
    module: Any, logits: Tensor, labels: Tensor | None, vocab_size: int,
    num_items_in_batch: Tensor | int | None, ignore_index: int, shift_labels: Tensor | None,
) -> Tensor:  # fmt: skip
    if shift_labels is None:
        assert labels is not None, "ForCausalLMLoss: labels or shift_labels must be given"
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    target = shift_labels.reshape(-1).to(logits.device)
    loss = cross_entropy(
        logits.view(-1, vocab_size), target, ignore_index=ignore_index,
        reduction="mean" if num_items_in_batch is None else "sum",
    )  # fmt: skip
    if num_items_in_batch is None:
        return loss
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(loss.device)
    return loss / num_items_in_batch


def _loss_example(module: Any, dtype: torch.dtype) -> Any:
    B, S, V = 2, 4, 8
    logits = 5 * numbers(B, S, V, dtype=dtype)
    labels = torch.arange(B * S).view(B, S) * 3 % V
    labels[1, 2] = 77
    batches = (labels, None), (None, labels)
    return {}, [(logits, given, V, n, 77, shifted) for given, shifted in batches for n in (None, 3)]


KINDS["ForCausalLMLoss"] = LayerKind(_next_token_loss, [()], _loss_example, own_forward)
