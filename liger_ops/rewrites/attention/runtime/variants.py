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


Look = Callable[[Sequence[Any]], Seen]


class Variants:
    """Looks at the inputs of each call, on the host, and runs the compilation for what it finds.

    A variant is compiled when it is first needed, and those of `at_once` with the first.
    """

    def __init__(
        self, module: fx.GraphModule, example_inputs: Sequence[Any], look: Look,
        compile_one: Compile, at_once: Sequence[Seen] = (),
    ) -> None:  # fmt: skip
        self._module, self._look, self._compile = module, look, compile_one
        # Fake tensors, so that no batch stays in memory for a later compilation.
        self._fakes = [
            known if isinstance(known := value(node), FakeTensor) else given
            for node, given in zip(inputs_of(module), example_inputs, strict=True)
        ]
        self._context = TracingContext.try_get()
        self._made: dict[Hashable, Callable[..., Any]] = {}
        for seen in (look(example_inputs), *at_once):
            self._variant(seen, example_inputs)

    def __call__(self, *args: Any) -> Any:
        seen = self._look(args)
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
    known = value(node)
    sizes = known.shape if isinstance(known, Tensor) else [known]
    return any(isinstance(size, torch.SymInt) for size in sizes)
