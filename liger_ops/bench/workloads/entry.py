"""The classes of the bench's table, an op (Entry), and an op at one shape and dtype (Workload); and
the sizes of commonly trained models, from their published configurations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

import liger_ops

# Tokens on a device at once; fewer if every token has a row as long as the vocabulary.
TOKENS = 8192
TOKENS_OF_VOCABULARY = 4096


@dataclass(frozen=True)
class Model:
    hidden: int
    intermediate: int
    # The number of heads of q and of k, and the elements of a head that rope rotates.
    heads: tuple[int, int, int]
    vocabulary: int
    activation: str = "swiglu"


MODELS = {
    "llama-3.2-1b": Model(2048, 8192, (32, 8, 64), 128256),
    "llama-3.1-8b": Model(4096, 14336, (32, 8, 128), 128256),
    "llama-3.1-70b": Model(8192, 28672, (64, 8, 128), 128256),
    "qwen3-0.6b": Model(1024, 3072, (16, 8, 128), 151936),
    "qwen3-8b": Model(4096, 12288, (32, 8, 128), 151936),
    "qwen3-32b": Model(5120, 25600, (64, 8, 128), 151936),
    "gemma3-4b": Model(2560, 10240, (8, 4, 256), 262208, "geglu"),
    "gemma3-27b": Model(5376, 21504, (32, 16, 128), 262208, "geglu"),
    "deepseek-v3": Model(7168, 18432, (128, 1, 64), 129280),
    "gpt-oss-20b": Model(2880, 2880, (64, 8, 64), 201088, "clamped_swiglu"),
    "nemotron-4-15b": Model(6144, 24576, (48, 8, 128), 256000, "relu_squared"),
}


HIDDEN = {name: (TOKENS, model.hidden) for name, model in MODELS.items()}
VOCABULARY = {name: (TOKENS_OF_VOCABULARY, model.vocabulary) for name, model in MODELS.items()}
HEAD = {
    name: (TOKENS_OF_VOCABULARY, model.hidden, model.vocabulary) for name, model in MODELS.items()
}
ROPE = {name: (2, TOKENS // 2, *model.heads) for name, model in MODELS.items()}


def intermediate(activation: str) -> dict[str, tuple[int, int]]:
    """Return the shapes of the models with this activation."""
    return {
        name: (TOKENS, model.intermediate)
        for name, model in MODELS.items()
        if model.activation == activation
    }


Shape = tuple[int, ...]
Function = Callable[..., Any]
# Computes the true outputs, followed by the true gradients.
Truth = Callable[[Function, Sequence[Tensor], Sequence[Tensor]], list[Tensor]]

MODES = ("forward", "backward", "full")


class Draw:
    """Random tensors of one dtype on one device, drawn in sequence from the seed 0."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self.generator = torch.Generator(device).manual_seed(0)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device, dtype=self.dtype)

    def like(self, tensor: Tensor) -> Tensor:
        """Draw a random tensor of the same shape and strides."""
        return torch.empty_like(tensor, device=self.device).copy_(self.normal(*tensor.shape))

    def leaf(self, *shape: int, scale: float = 1.0) -> Tensor:
        return (self.normal(*shape) * scale).requires_grad_()

    def classes(self, rows: int, count: int) -> Tensor:
        return torch.randint(count, (rows,), generator=self.generator, device=self.device)


def truth_at_once(
    definition: Function, tensors: Sequence[Tensor], dys: Sequence[Tensor]
) -> list[Tensor]:
    """Compute the definition's outputs and gradients in float64."""
    wide = [
        t.detach().double().requires_grad_(t.requires_grad) if t.is_floating_point() else t
        for t in tensors
    ]
    outputs = as_tuple(definition(*wide))
    leaves = [t for t in wide if t.requires_grad]
    grads = torch.autograd.grad(outputs, leaves, [dy.double() for dy in dys])
    return [*(y.detach() for y in outputs), *grads]


def leaves(tensors: int, vectors: int = 0) -> Callable[[Draw, Shape], list[Tensor]]:
    """Return the function that draws an op's inputs: tensors of the full shape, then vectors of the
    size of its second dimension."""

    def inputs(draw: Draw, shape: Shape) -> list[Tensor]:
        return [draw.leaf(*size) for size in (*[shape] * tensors, *[shape[1:2]] * vectors)]

    return inputs


def peer(
    name: str, *options: Any, order: Sequence[int] | None = None, **more: Any
) -> Callable[[Any], Function]:
    """Return a function of a package that calls its function `name` with the tensors, in this
    order, and then the options."""

    def function_of(package: Any) -> Function:
        function = getattr(package, name)

        def call(*tensors: Tensor) -> Any:
            ordered = tensors if order is None else [tensors[i] for i in order]
            return function(*ordered, *options, **more)

        return call

    return function_of


def moved(forward: int, backward: int) -> dict[str, int]:
    """Return for each mode the number of times that it moves as many elements as the shape has."""
    return {"forward": forward, "backward": backward, "full": forward + backward}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """An op in the bench: its implementations, inputs, least work and shapes."""

    op: str
    # A call of the public op; by default the op itself.
    ours: Function = cast(Function, None)
    # The op with its options for less memory, if it has any.
    low_memory: Function | None = None
    # The code in models. If that is a call of ATen's fused op, only `aten` is set.
    eager: Function | None = None
    aten: Function | None = None
    # Provider -> the name of its function, or a function of its package that returns the function.
    peers: Mapping[str, str | Callable[[Any], Function]] = field(default_factory=dict)
    # The names of the sizes of a shape.
    dims: tuple[str, ...] = ("M", "N")
    # Makes the arguments. Those that require gradients are differentiated.
    inputs: Callable[[Draw, Shape], list[Tensor]] = leaves(1)
    # Mode -> least number of times that every element is moved, or takes part in an operation.
    # By default the forward reads x and writes y, and the backward reads x and dy and writes dx.
    passes: Mapping[str, int] = field(default_factory=lambda: moved(2, 3))
    elements: Callable[[Shape], int] = math.prod
    # Mode -> the number of elements, for an op whose modes do not move multiples of `elements`.
    counts: Callable[[Shape], dict[str, int]] | None = None
    is_matrix_product: bool = False
    # The shapes in docs/reports/benchmarks.md, and those of named models.
    figures: tuple[Shape, ...] = ()
    models: Mapping[str, Shape]
    # A host-bound shape, at which the host's time is measured.
    small: Shape = (2048, 4096)
    truth: Truth = truth_at_once

    def __post_init__(self) -> None:
        if self.ours is None:
            object.__setattr__(self, "ours", getattr(liger_ops, self.op))

    @property
    def definition(self) -> Function:
        definition = self.eager or self.aten
        assert definition is not None, f"{self.op} has neither eager nor aten"
        return definition

    @torch.no_grad()
    def upstream(self, draw: Draw, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Draw the gradients of the outputs: random, or 1 for a loss."""
        empty = [torch.empty_like(tensor, device="meta") for tensor in tensors]
        return [
            draw.like(y) if y.dim() else torch.ones((), device=draw.device)
            for y in as_tuple(self.definition(*empty))
        ]

    def work(self, shape: Shape) -> dict[str, int]:
        """Return for each mode the least number of elements to move, or of operations."""
        if self.counts is not None:
            return self.counts(shape)
        return {mode: times * self.elements(shape) for mode, times in self.passes.items()}


@dataclass(frozen=True)
class Workload:
    """An op at one shape and dtype."""

    entry: Entry
    shape: Shape
    dtype: torch.dtype

    @property
    def modes(self) -> tuple[str, ...]:
        return tuple(mode for mode in MODES if mode in self.entry.passes)

    @property
    def is_small(self) -> bool:
        return self.shape == self.entry.small

    def work(self, mode: str) -> int:
        """Return the least number of bytes that a mode has to move, or of operations."""
        count = self.entry.work(self.shape)[mode]
        return count if self.entry.is_matrix_product else count * self.dtype.itemsize

    @property
    def shape_text(self) -> str:
        return "x".join(map(str, self.shape))

    @property
    def row(self) -> tuple[str, str, str]:
        """The names of op, dtype and shape in the results."""
        return self.entry.op, dtype_name(self.dtype), self.shape_text

    def __str__(self) -> str:
        op, dtype, shape = self.row
        return f"{op} {shape} {dtype}"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def as_tuple(outputs: Any) -> tuple[Tensor, ...]:
    return tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,)


def wide(x: Tensor) -> Tensor:
    """Cast to float32 as models do, but keep float64, so that the truth can run the same code."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
