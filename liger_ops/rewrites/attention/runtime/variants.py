"""Variants: a graph that is compiled once for each state of its inputs, such as full batches."""

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
from ...engine.report import guarded

Compile = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]

# Held by a call that compiles: Dynamo, which is not running then, holds its own.
COMPILING = threading.RLock()


@dataclass(frozen=True)
class InputState:
    """The properties of a batch that select a compiled variant.

    Attributes:
        key: equal for inputs that the same compilation serves.
        specialise: changes a copy of the graph into the variant for inputs in this state.
        data: the further inputs of that variant.
    """

    key: Hashable
    specialise: Callable[[fx.GraphModule], Any]
    data: Sequence[Tensor] = ()


@dataclass(frozen=True)
class InputCheck:
    """A check of the data of some inputs of a graph, on the host, before each call.

    Attributes:
        name: its name in warnings.
        positions: returns the positions of these inputs, among the inputs of a graph.
        state_of: returns the state of the inputs at these positions.
        all_states: returns every state that they may have. With symbolic sizes all variants are
            compiled at once: a later compilation could specialise a size without a guard.
    """

    name: str
    positions: Callable[[fx.GraphModule], list[int]]
    state_of: Callable[[Sequence[Any], Sequence[int]], InputState]
    all_states: Callable[[Sequence[int]], list[InputState]] = lambda positions: []

    def found(self, module: fx.GraphModule, strict: bool | None = None) -> list[int] | None:
        """Return the positions; None with a warning if that raises an exception and is not strict.

        None differs from an empty list: nothing may be concluded from it.
        """
        return guarded(self.name, strict, self.positions, module, otherwise=None)

    def assume(self, module: fx.GraphModule, inputs: Sequence[Any]) -> list[Tensor]:
        """Change the graph into the variant for these inputs, and return its further inputs."""
        if not (positions := self.found(module)):
            return []
        state = self.state_of(inputs, positions)
        state.specialise(module)
        return list(state.data)


class Variants:
    """A callable that checks the inputs of each call, and runs the variant for their state.

    A variant is compiled when it is first needed.
    """

    def __init__(
        self, module: fx.GraphModule, example_inputs: Sequence[Any], check: InputCheck,
        positions: Sequence[int], compile_variant: Compile,
    ) -> None:  # fmt: skip
        self._module, self._check, self._positions = module, check, positions
        self._compile = compile_variant
        # Fake tensors, so that no batch stays in memory for a later compilation.
        self._fakes = [
            example if isinstance(example := value(node), FakeTensor) else example_input
            for node, example_input in zip(inputs_of(module), example_inputs, strict=True)
        ]
        self._context = TracingContext.try_get()
        self._compiled: dict[Hashable, Callable[..., Any]] = {}
        is_any_size = any(map(is_symbolic, inputs_of(module)))
        at_once = check.all_states(positions) if is_any_size else []
        for state in (check.state_of(example_inputs, positions), *at_once):
            self._variant(state, example_inputs)

    def __call__(self, *args: Any) -> Any:
        state = self._check.state_of(args, self._positions)
        if state.key not in self._compiled:
            with COMPILING, tracing(self._context):
                for x in self._fakes:
                    if isinstance(x, FakeTensor):
                        # Dynamo of torch 2.10 leaves a mode in the context that is not its values'.
                        self._context.fake_mode = x.fake_mode
                self._variant(state, self._fakes)
        return self._compiled[state.key](*args, *state.data)

    def _variant(self, state: InputState, inputs: Sequence[Any]) -> None:
        if state.key not in self._compiled:
            module = duplicate(self._module)
            state.specialise(module)
            # The data itself, because the compilation may look at it.
            self._compiled[state.key] = self._compile(module, [*inputs, *state.data])


def duplicate(module: fx.GraphModule) -> fx.GraphModule:
    """Copy a module with its graph and its subgraphs; tensors are shared."""
    copied = fx.GraphModule(module, copy.deepcopy(module.graph))
    copied.meta.update(module.meta)
    for name, submodule in module.named_children():
        if isinstance(submodule, fx.GraphModule) and hasattr(copied, name):
            setattr(copied, name, duplicate(submodule))
    return copied


def inputs_of(module: fx.GraphModule) -> list[fx.Node]:
    return module.graph.find_nodes(op="placeholder")


def is_split(inputs: Sequence[Any]) -> bool:
    """Return whether these are the inputs of a part of a graph that DDP's optimizer splits.

    The optimizer passes fake tensors, and AOTAutograd raises for a part that is compiled later.
    """
    return any(isinstance(tensor, FakeTensor) for tensor in inputs)


def is_symbolic(node: fx.Node) -> bool:
    """Return whether a node is a symbolic size, or a tensor with one."""
    example = value(node)
    sizes = example.shape if isinstance(example, Tensor) else [example]
    return any(isinstance(size, torch.SymInt) for size in sizes)
