"""The steps of random programs. Each spells a pattern of the rewrites, or nearly does.

A step appends the value that it computes, may append an intermediate value, which is then used
elsewhere, or writes into a tensor that an earlier step made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

B, S, H, V = 2, 4, 8, 11
HEADS = 2
D = H // HEADS


@dataclass
class State:
    """The tensors, values and losses of a program so far.

    Losses are kept apart: added to tensors, they would get gradients of many terms that cancel.
    """

    tensors: dict[str, Tensor]
    # The dtype in which the program computes where it widens: float32, and float64 for the truth.
    wide: torch.dtype
    values: list[Tensor]
    losses: list[Tensor]

    def recent(self, i: int) -> Tensor:
        """Return the last value but i, counted modulo the number of values."""
        return self.values[-1 - i % len(self.values)]


Step = Callable[[State], None]


def rms_norm(
    state: State,
    *,
    i: int,
    cast: bool,
    square: str,
    root: str,
    dim: int,
    order: str,
    eps: float,
    leak: bool,
) -> None:
    x, w = state.recent(i), state.tensors["w"]
    h = x.to(state.wide) if cast else x
    squared = {"pow": lambda: h.pow(2), "product": lambda: h * h, "operator": lambda: h**2}[
        square
    ]()
    variance = squared.mean(dim, keepdim=True)
    if root == "rsqrt":
        h = h * torch.rsqrt(variance + eps)
    elif root == "sqrt":
        h = h / torch.sqrt(variance + eps)
    else:
        h = h * torch.pow(variance + eps, -0.5)
    if leak:
        state.values.append(h.to(x.dtype))
    if order == "llama":
        y = w * h.to(x.dtype)
    elif order == "gemma":
        y = (h * (1.0 + w.to(state.wide))).to(x.dtype)
    elif order == "olmo":
        y = (w * h).to(x.dtype)
    else:
        y = h.to(x.dtype)
    state.values.append(y.to(x.dtype))


def torch_norm(state: State, *, i: int, kind: str) -> None:
    x = state.recent(i)
    w, b = state.tensors["w"].to(x.dtype), state.tensors["b"].to(x.dtype)
    if kind == "rms":
        y = F.rms_norm(x, (H,), w, 1e-6)
    elif kind == "layer":
        y = F.layer_norm(x, (H,), w, b, 1e-5)
    elif kind == "layer without weight":
        y = F.layer_norm(x.to(state.wide), (H,), None, None, 1e-5).to(x.dtype)
    elif kind == "layer by hand":
        h = x.to(state.wide)
        mean = h.mean(-1, keepdim=True)
        variance = (h - mean).pow(2).mean(-1, keepdim=True)
        y = (w.to(state.wide) * ((h - mean) * torch.rsqrt(variance + 1e-5))).to(x.dtype)
    else:
        y = F.group_norm(x, 2, w[:S], b[:S], 1e-5)
    state.values.append(y)


def add(state: State, *, i: int, j: int, how: str) -> None:
    x, residual = state.recent(i), state.recent(j)
    if how == "row":
        state.values.append(x + residual[:, :1])
    elif how == "operator":
        state.values.append(residual + x)
    elif how == "scaled":
        state.values.append(torch.add(residual, x * 0.5))
    else:
        state.values.append(torch.add(x, residual, alpha=2))


def gate(
    state: State, *, i: int, j: int, activation: str, packed: bool, swapped: bool, leak: bool
) -> None:
    x, up = state.recent(i), state.recent(j)
    if packed:
        x, up = F.linear(x, state.tensors["packed"].to(x.dtype)).chunk(2, dim=-1)
    if swapped:
        x, up = up, x
    if activation == "silu":
        z = F.silu(x)
    elif activation == "sigmoid":
        z = x * torch.sigmoid(x)
    elif activation == "clamped":
        x, up = x.clamp(max=1.5), up.clamp(min=-1.5, max=1.5) + 1
        z = x * torch.sigmoid(x * 1.702)
    elif activation == "relu":
        z = F.relu(x).square()
    else:
        z = F.gelu(x, approximate=activation)
    if leak:
        state.values.append(z)
    state.values.append(up * z)


def rope(state: State, *, i: int, j: int, turn: str, rotary: int, cast: bool) -> None:
    cos, sin = (state.tensors[name][..., :rotary].unsqueeze(1) for name in ("cos", "sin"))

    def turned(x: Tensor) -> Tensor:
        if turn == "interleaved":
            return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
        first, second = x[..., : rotary // 2], x[..., rotary // 2 :]
        return torch.cat((second, -first) if turn == "back" else (-second, first), dim=-1)

    def rotated(x: Tensor) -> Tensor:
        part, rest = x[..., :rotary], x[..., rotary:]
        part = part.to(state.wide) if cast else part
        part = (part * cos + turned(part) * sin).to(x.dtype)
        return torch.cat((part, rest), dim=-1) if rotary < D else part

    q, k = (state.recent(n).view(B, S, HEADS, D).transpose(1, 2) for n in (i, j))
    for turned_heads in (rotated(q), rotated(k)):
        state.values.append(turned_heads.transpose(1, 2).reshape(B, S, H).to(q.dtype))


def block(state: State, *, add: Step, norm: Step) -> None:
    add(state)
    norm(state)


def project(state: State, *, i: int) -> None:
    x = state.recent(i)
    state.values.append(F.linear(x, state.tensors["square"].to(x.dtype)))


def reshape(state: State, *, i: int, how: str) -> None:
    x = state.recent(i)
    if how == "view":
        state.values.append(x.reshape(-1, H).view(B, S, H))
    elif how == "transpose":
        state.values.append(x.transpose(0, 1).contiguous().transpose(0, 1))
    else:
        state.values.append(x.contiguous()[:, :])


def write(state: State, *, i: int, j: int, how: str) -> None:
    x, y = state.recent(i), state.recent(j)
    if how == "mul":
        x.mul_(0.5)
    elif how == "view":
        x.transpose(0, 1)[1:].add_(1.0)
    elif how == "flat":
        x.contiguous().view(-1)[::2].mul_(2.0)
    elif how == "activation":
        F.relu(x, inplace=True)
    elif how == "copy":
        x[:, :2].copy_(y[:, 2:])
    elif how == "item":
        x[:, 0] = 1.0
    else:
        x += y.detach()


def loss(
    state: State, *, i: int, cast: bool, scale: str, shift: bool, reduction: str, leak: bool
) -> None:
    x = state.recent(i)
    logits = F.linear(x, state.tensors["head"].to(x.dtype))
    if leak:
        state.values.append(logits.sum(-1, keepdim=True) + x)
    if scale == "divided":
        logits = logits / 4.0
    elif scale == "capped":
        logits = torch.tanh(logits / 3.0) * 3.0
    logits = logits.to(state.wide) if cast else logits
    labels = state.tensors["labels"]
    if shift:
        logits, labels = logits[:, :-1].contiguous(), labels[:, 1:].contiguous()
    value = F.cross_entropy(logits.view(-1, V), labels.view(-1), reduction=reduction)
    if reduction == "sum":
        value = value / 7
    state.losses.append(value)


def apart(state: State, x: Tensor, body: tuple[Step, ...]) -> Tensor:
    """Run a body on `x` in a graph of its own, in which it writes to nothing from outside."""
    inside = State(state.tensors, state.wide, [x * 2.0, x + 1.0], [])
    for step in body:
        step(inside)
    return (inside.values[-1] + sum(inside.losses)).to(x.dtype).contiguous()


def checkpointed(state: State, *, i: int, body: tuple[Step, ...]) -> None:
    x = state.recent(i)
    block = partial(apart, state, body=body)
    state.values.append(checkpoint(block, x, use_reentrant=False))


def conditional(
    state: State, *, i: int, holds: bool, body: tuple[Step, ...], other: tuple[Step, ...]
) -> None:
    """Run one of two bodies by a condition on data, which is the same in every precision."""
    x = state.recent(i)
    if not torch.compiler.is_compiling():
        # torch.cond would compile.
        state.values.append(apart(state, x, body if holds else other))
        return
    labels = state.tensors["labels"]
    predicate = labels.max() > 0 if holds else labels.max() < 0
    branches = [partial(apart, state, body=steps) for steps in (body, other)]
    state.values.append(torch.cond(predicate, *branches, (x,)))
