"""A graph that is compiled once for each kind of data that its inputs hold."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ....torch_private import FakeTensor, TracingContext, tracing
from ...engine.canonical import value
from ...engine.failure import guarded

Compile = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]

# Held by a call that compiles: Dynamo, which is not running then, holds its own.
COMPILING = threading.RLock()


@dataclass(frozen=True)
class Seen:
    """What a look at the inputs finds.

    Attributes:
        key: equal for inputs that the same compilation serves.
        assume: lets a copy of the graph assume it.
        data: further inputs of that graph.
    """

    key: Hashable
    assume: Callable[[fx.GraphModule], Any]
    data: Sequence[Tensor] = ()


@dataclass(frozen=True)
class Look:
    """A look at the data of some inputs of a graph, on the host.

    Attributes:
        name: what a warning calls it.
        places: the positions of these inputs, among the inputs of the graph.
        seen: what the inputs at these positions hold.
        every: everything that they may hold. With symbolic sizes all of it is compiled at once: a
            later compilation could specialise a size without a guard.
    """

    name: str
    places: Callable[[fx.GraphModule], list[int]]
    seen: Callable[[Sequence[Any], Sequence[int]], Seen]
    every: Callable[[Sequence[int]], list[Seen]] = lambda places: []

    def found(self, module: fx.GraphModule, strict: bool | None = None) -> list[int] | None:
        """The places; None with a warning if that raises an exception, unless it is strict."""
        return guarded(self.name, strict, self.places, module, otherwise=None)

    def assume(self, module: fx.GraphModule, inputs: Sequence[Any]) -> list[Tensor]:
        """Let the graph be the variant for these inputs; returns its further inputs."""
        if not (places := self.found(module)):
            return []
        seen = self.seen(inputs, places)
        seen.assume(module)
        return list(seen.data)


class Variants:
    """Looks at the inputs of each call, and runs the compilation for what it finds.

    A variant is compiled when it is first needed.
    """

    def __init__(
        self, module: fx.GraphModule, example_inputs: Sequence[Any], look: Look,
        places: Sequence[int], compile_one: Compile,
    ) -> None:  # fmt: skip
        self._module, self._look, self._places = module, look, places
        self._compile = compile_one
        # Fake tensors, so that no batch stays in memory for a later compilation.
        self._fakes = [
            example if isinstance(example := value(node), FakeTensor) else given
            for node, given in zip(inputs_of(module), example_inputs, strict=True)
        ]
        self._context = TracingContext.try_get()
        self._made: dict[Hashable, Callable[..., Any]] = {}
        is_any_size = any(map(is_symbolic, inputs_of(module)))
        at_once = look.every(places) if is_any_size else []
        for seen in (look.seen(example_inputs, places), *at_once):
            self._variant(seen, example_inputs)

    def __call__(self, *args: Any) -> Any:
        seen = self._look.seen(args, self._places)
        if seen.key not in self._made:
            with COMPILING, tracing(self._context):
                self._variant(seen, self._fakes)
        return self._made[seen.key](*args, *seen.data)

    def _variant(self, seen: Seen, inputs: Sequence[Any]) -> None:
        if seen.key not in self._made:
            module = duplicate(self._module)
            seen.assume(module)
            # The data itself, because the compilation may look at it.
            self._made[seen.key] = self._compile(module, [*inputs, *seen.data])


def duplicate(module: fx.GraphModule) -> fx.GraphModule:
    """A copy with graphs of its own, down to the subgraphs; tensors are shared."""
    copied = fx.GraphModule(module, copy.deepcopy(module.graph))
    copied.meta.update(module.meta)
    for name, part in module.named_children():
        if isinstance(part, fx.GraphModule) and hasattr(copied, name):
            setattr(copied, name, duplicate(part))
    return copied


def inputs_of(module: fx.GraphModule) -> list[fx.Node]:
    return module.graph.find_nodes(op="placeholder")


def is_split(inputs: Sequence[Any]) -> bool:
    """Whether these are the inputs of a part of a graph that DDP's optimizer splits.

    It gives fake tensors, and AOTAutograd raises for a part that is compiled later.
    """
    return any(isinstance(one, FakeTensor) for one in inputs)


def is_symbolic(node: fx.Node) -> bool:
    """Whether a node is a symbolic size, or a tensor of one."""
    example = value(node)
    sizes = example.shape if isinstance(example, Tensor) else [example]
    return any(isinstance(size, torch.SymInt) for size in sizes)
