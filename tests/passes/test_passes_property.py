"""Random programs of the operations that models are made of, rewritten and not: equal results.

A program is a list of steps on a list of tensors. A step appends what it computes, may append a
value on the way too, which is then used elsewhere, or writes into a tensor that an earlier step
made. Each spells a pattern of the rewrites, or what is nearly one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from hypothesis import given, reject
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import liger_ops  # noqa: F401
from compiled_models import assert_as_near_to_truth, compiled

B, S, H, V = 2, 4, 8, 11
HEADS = 2
D = H // HEADS


@dataclass
class State:
    """What steps work on. Losses are kept apart: added to tensors, they would get gradients of many
    terms that cancel."""

    tensors: dict[str, Tensor]
    # What the program takes for float32: float64 where the truth is sought.
    wide: torch.dtype
    values: list[Tensor]
    losses: list[Tensor]

    def recent(self, i: int) -> Tensor:
        """The last value but i, of as many as there are."""
        return self.values[-1 - i % len(self.values)]


Step = Callable[[State], None]


@dataclass(frozen=True)
class Precision:
    """The dtypes of a program, and how far roundings may take its results.

    Its values cancel, so that an error far above a rounding proves nothing in float32; float64
    throughout shows the smallest difference between two equations.
    """

    x: torch.dtype
    weight: torch.dtype
    wide: torch.dtype
    allowance: float


@dataclass(frozen=True)
class Program:
    steps: tuple[Step, ...]
    kept: tuple[int, ...]
    precision: Precision

    def __call__(self, wide: torch.dtype, **tensors: Tensor) -> tuple[Tensor, ...]:
        state = State(tensors, wide, [tensors["x"] * 1.0, tensors["y"] * 1.0], [])
        for step in self.steps:
            step(state)
        outputs = [state.recent(i) for i in self.kept]
        # The sum keeps most steps alive.
        outputs += [state.values[-1], torch.stack(state.values[::2]).sum(0)]
        return (*outputs, *state.losses)

    def tensors(self, dtype: torch.dtype, weight_dtype: torch.dtype) -> dict[str, Tensor]:
        """The same numbers in every dtype, those of bfloat16."""
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).bfloat16()

        angle = draw(1, S, D // 2).float()
        angle = torch.cat((angle, angle), -1)
        tensors = {"x": draw(B, S, H), "y": draw(B, S, H)}
        weights = {
            "w": draw(H),
            "b": draw(H),
            "square": draw(H, H) * H**-0.5,
            "packed": draw(2 * H, H) * H**-0.5,
            "head": draw(V, H),
        }
        tables = {"cos": angle.cos().bfloat16(), "sin": angle.sin().bfloat16()}
        return {
            **{name: value.to(dtype).requires_grad_() for name, value in tensors.items()},
            **{name: value.to(weight_dtype).requires_grad_() for name, value in weights.items()},
            **{name: value.to(dtype) for name, value in tables.items()},
            "labels": torch.tensor([[1, 2, -100, 3], [0, 10, 4, -100]]),
        }


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


def add(
    state: State,
    *,
    i: int,
    j: int,
    how: str,
) -> None:
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
    state: State,
    *,
    i: int,
    j: int,
    activation: str,
    packed: bool,
    swapped: bool,
    leak: bool,
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


def rope(
    state: State,
    *,
    i: int,
    j: int,
    turn: str,
    rotary: int,
    cast: bool,
) -> None:
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


def write(
    state: State,
    *,
    i: int,
    j: int,
    how: str,
) -> None:
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
    state: State,
    *,
    i: int,
    cast: bool,
    scale: str,
    shift: bool,
    reduction: str,
    leak: bool,
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
    """What a body makes of `x` in a graph of its own. It writes to nothing from outside."""
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
    """Which branch is taken is in the data, and the same in every precision."""
    x = state.recent(i)
    if not torch.compiler.is_compiling():
        # torch.cond would compile.
        state.values.append(apart(state, x, body if holds else other))
        return
    labels = state.tensors["labels"]
    predicate = labels.max() > 0 if holds else labels.max() < 0
    branches = [partial(apart, state, body=steps) for steps in (body, other)]
    state.values.append(torch.cond(predicate, *branches, (x,)))


INDEX = st.sampled_from([0, 0, 0, 1, 1, 2, 3, 5])
# What makes a near miss is the exception.
USUALLY = st.sampled_from([True] * 4 + [False])
RARELY = st.sampled_from([False] * 4 + [True])


def steps() -> st.SearchStrategy[Step]:
    """Those below, alone and in graphs of their own."""
    body = st.lists(plain_steps(), min_size=1, max_size=4).map(tuple)
    return st.one_of(
        plain_steps(),
        plain_steps(),
        st.builds(partial, st.just(checkpointed), i=INDEX, body=body),
        st.builds(
            partial, st.just(conditional), i=INDEX, holds=st.booleans(), body=body, other=body
        ),
    )


def plain_steps() -> st.SearchStrategy[Step]:
    one_of = st.sampled_from
    norms = st.builds(
        partial,
        st.just(rms_norm),
        i=INDEX,
        cast=USUALLY,
        square=one_of(["pow", "product", "operator"]),
        root=one_of(["rsqrt", "sqrt", "power"]),
        dim=one_of([-1] * 5 + [2, 1]),
        order=one_of(["llama", "gemma", "olmo", "without"]),
        eps=one_of([1e-6, 1e-5, 0.5]),
        leak=RARELY,
    )
    kinds = ["rms", "layer", "layer without weight", "layer by hand", "group"]
    activations = ["silu", "silu", "sigmoid", "none", "tanh", "clamped", "relu"]
    adds = st.builds(
        partial,
        st.just(add),
        i=INDEX,
        j=INDEX,
        how=one_of(["operator", "operator", "scaled", "row", "alpha"]),
    )
    return st.one_of(
        norms,
        adds,
        st.builds(partial, st.just(block), add=adds, norm=norms),
        st.builds(partial, st.just(torch_norm), i=INDEX, kind=one_of(kinds)),
        st.builds(
            partial,
            st.just(gate),
            i=INDEX,
            j=INDEX,
            activation=one_of(activations),
            packed=st.booleans(),
            swapped=RARELY,
            leak=RARELY,
        ),
        st.builds(
            partial,
            st.just(rope),
            i=INDEX,
            j=INDEX,
            turn=one_of(["halves", "halves", "interleaved", "back"]),
            rotary=one_of([D, D, D // 2]),
            cast=RARELY,
        ),
        st.builds(partial, st.just(project), i=INDEX),
        st.builds(partial, st.just(reshape), i=INDEX, how=one_of(["view", "transpose", "slice"])),
        st.builds(
            partial,
            st.just(write),
            i=INDEX,
            j=INDEX,
            how=one_of(["mul", "copy", "item", "add", "view", "flat", "activation"]),
        ),
        st.builds(
            partial,
            st.just(loss),
            i=INDEX,
            cast=USUALLY,
            scale=one_of(["", "divided", "capped"]),
            shift=st.booleans(),
            reduction=one_of(["mean", "sum"]),
            leak=st.booleans(),
        ),
    )


PRECISIONS = [
    Precision(torch.float64, torch.float64, torch.float64, 1e-10),
    Precision(torch.float32, torch.float32, torch.float32, 1e-4),
    Precision(torch.bfloat16, torch.bfloat16, torch.float32, 8 * torch.finfo(torch.bfloat16).eps),
    Precision(torch.bfloat16, torch.float32, torch.float32, 8 * torch.finfo(torch.bfloat16).eps),
]
PROGRAMS = st.builds(
    Program,
    steps=st.lists(steps(), min_size=4, max_size=12).map(tuple),
    kept=st.lists(INDEX, max_size=2).map(tuple),
    precision=st.sampled_from(PRECISIONS),
)


def results(
    function: Callable[..., tuple[Tensor, ...]], wide: torch.dtype, tensors: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The outputs, and the gradients of what goes in, from one random gradient of each output."""
    outputs = function(wide, **tensors)
    generator = torch.Generator().manual_seed(1)
    total = sum(
        (output.double() * torch.randn(output.shape, generator=generator).double()).sum()
        for output in outputs
    )
    leaves = {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}
    # Zero where there is none: torch.cond gives that of what the other branch alone uses.
    grads = torch.autograd.grad(total, list(leaves.values()), materialize_grads=True)
    return {
        **{f"output {i}": output.detach() for i, output in enumerate(outputs)},
        **{f"gradient of {name}": grad for name, grad in zip(leaves, grads, strict=True)},
    }


def test_random_programs() -> None:
    found: Counter[str] = Counter()

    @given(PROGRAMS)
    def check(program: Program) -> None:
        wide = program.tensors(torch.float64, torch.float64)
        try:
            truth = results(program, torch.float64, wide)
        except RuntimeError as error:
            assert "inplace" in str(error)
            reject()
        runs = {}
        for backend in ("none", "liger"):
            function, inner = compiled(program, backend, dynamic=False)
            tensors = program.tensors(program.precision.x, program.precision.weight)
            runs[backend] = results(function, program.precision.wide, tensors)
        found.update(inner.counts[0])
        assert_as_near_to_truth(runs["liger"], runs["none"], truth, program.precision.allowance)

    check()
    # The rewrites were at work: the programs are not all near misses.
    assert len(found) >= 8 and found.total() >= 40, found
