"""Random programs of the operations that models are made of, rewritten and not: equal results.

A program is a list of the steps of `random_steps` on a list of tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from hypothesis import given, reject
from hypothesis import strategies as st
from torch import Tensor

import liger_ops  # noqa: F401
from compiled_models import assert_as_near_to_truth, compiled
from random_steps import (
    B,
    D,
    H,
    S,
    State,
    Step,
    V,
    add,
    block,
    checkpointed,
    conditional,
    gate,
    loss,
    project,
    reshape,
    rms_norm,
    rope,
    torch_norm,
    write,
)


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
        partial, st.just(rms_norm), i=INDEX, cast=USUALLY,
        square=one_of(["pow", "product", "operator"]), root=one_of(["rsqrt", "sqrt", "power"]),
        dim=one_of([-1] * 5 + [2, 1]), order=one_of(["llama", "gemma", "olmo", "without"]),
        eps=one_of([1e-6, 1e-5, 0.5]), leak=RARELY,
    )  # fmt: skip
    kinds = ["rms", "layer", "layer without weight", "layer by hand", "group"]
    activations = ["silu", "silu", "sigmoid", "none", "tanh", "clamped", "relu"]
    adds = st.builds(
        partial, st.just(add), i=INDEX, j=INDEX,
        how=one_of(["operator", "operator", "scaled", "row", "alpha"]),
    )  # fmt: skip
    return st.one_of(
        norms,
        adds,
        st.builds(partial, st.just(block), add=adds, norm=norms),
        st.builds(partial, st.just(torch_norm), i=INDEX, kind=one_of(kinds)),
        st.builds(
            partial, st.just(gate), i=INDEX, j=INDEX, activation=one_of(activations),
            packed=st.booleans(), swapped=RARELY, leak=RARELY,
        ),
        st.builds(
            partial, st.just(rope), i=INDEX, j=INDEX,
            turn=one_of(["halves", "halves", "interleaved", "back"]), rotary=one_of([D, D, D // 2]),
            cast=RARELY,
        ),
        st.builds(partial, st.just(project), i=INDEX),
        st.builds(partial, st.just(reshape), i=INDEX, how=one_of(["view", "transpose", "slice"])),
        st.builds(
            partial, st.just(write), i=INDEX, j=INDEX,
            how=one_of(["mul", "copy", "item", "add", "view", "flat", "activation"]),
        ),
        st.builds(
            partial, st.just(loss), i=INDEX, cast=USUALLY, scale=one_of(["", "divided", "capped"]),
            shift=st.booleans(), reduction=one_of(["mean", "sum"]), leak=st.booleans(),
        ),
    )  # fmt: skip


PRECISIONS = [
    Precision(torch.float64, torch.float64, torch.float64, 1e-10),
    Precision(torch.float32, torch.float32, torch.float32, 1e-4),
    Precision(torch.bfloat16, torch.bfloat16, torch.float32, 8 * torch.finfo(torch.bfloat16).eps),
    Precision(torch.bfloat16, torch.float32, torch.float32, 8 * torch.finfo(torch.bfloat16).eps),
]
PROGRAMS = st.builds(
    Program, steps=st.lists(steps(), min_size=4, max_size=12).map(tuple),
    kept=st.lists(INDEX, max_size=2).map(tuple), precision=st.sampled_from(PRECISIONS),
)  # fmt: skip


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
