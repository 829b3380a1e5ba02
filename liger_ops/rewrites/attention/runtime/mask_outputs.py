"""Masks that a graph returns: how each was computed is kept, for the graphs that it is given to.

Graphs end at the hooks of FSDP2, at DDP's forward and at every graph break, and a mask that one
graph makes is a dense tensor for the next. So a graph that returns a mask also returns a copy of
the data that the mask was computed from, such as the attention_mask, and its callable registers
under the mask, weakly, the operations that compute it and that data. `known` returns these for a
tensor that is the same object, in the same memory, and was not written since.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.weak import WeakTensorKeyDictionary

from ....torch_private import FakeTensor
from ...engine.canonical import value
from ...engine.failure import guarded
from ...engine.graph_state import GraphState, needed_by
from ...engine.memory import is_plain
from ...engine.rewrite import derive
from ..mask.algebra import Unknown, data_of
from ..mask.blocks import dense_datum
from ..mask.evaluate import IndexFunctions
from ..mask.proof import visible_keys
from .variants import is_symbolic

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]

# (batch, heads, queries, keys)
DIMENSIONS = 4


@dataclass(frozen=True)
class Recipe:
    """The operations that compute a mask from its data; equal if they do the same.

    Attributes:
        code: the operations, with the sizes and dtypes of the data and of the mask.
        graph: a graph with an input for each tensor of the data, in order, and the mask as output.
    """

    code: str
    graph: fx.Graph = field(compare=False)


@dataclass(frozen=True)
class MaskOrigin:
    """What a mask was computed from. Nothing else refers to the tensors in `data`."""

    recipe: Recipe
    data: tuple[Tensor, ...]
    state: tuple[Any, ...]


_origins: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
# For the copies of data, which nothing writes: whether they are 1 everywhere.
_ones: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def origin_of(mask: Any) -> MaskOrigin | None:
    """What `mask` was computed from; None if that is unknown, or the mask was written since."""
    found = _origins.get(mask) if _is_real(mask) else None
    return found if found is not None and found.state == _state(mask) else None


def _is_real(mask: Any) -> bool:
    """Whether a value is a tensor with data and a version."""
    is_tensor = isinstance(mask, Tensor) and not isinstance(mask, FakeTensor)
    return is_tensor and not mask.is_inference()


def is_ones(tensor: Tensor) -> bool:
    """Whether a tensor is 1 everywhere, which is looked at once for the data of a mask."""
    found = _ones.get(tensor)
    if found is None:
        found = bool((tensor == 1).all())
        if tensor in _ones:
            _ones[tensor] = found
    return found


def _state(mask: Tensor) -> tuple[Any, ...]:
    # `mask.data = other` changes the memory, and not the version.
    return mask._version, mask.data_ptr(), mask.shape, mask.stride(), mask.dtype, mask.device


def with_data(module: fx.GraphModule, strict: bool | None = None) -> Wrap | None:
    """Let the graph also return the data of the masks that it returns.

    Returns what wraps the graph's callable, or None, and no change, if it returns no such mask. An
    exception is a warning unless it is strict.
    """
    found = guarded("masks", strict, _returned, module, otherwise=[])
    if not found:
        return None
    (output,) = module.graph.find_nodes(op="output")
    results: Any = output.args[0]
    extended, masks = list(results), []
    for place, recipe, data in found:
        masks.append((place, recipe, slice(len(extended), len(extended) + len(data))))
        extended += [
            derive(output, torch.clone, one, memory_format=torch.contiguous_format) for one in data
        ]
    output.args = (tuple(extended),)
    module.recompile()
    return lambda compiled: _recording(compiled, len(results), masks)


def _recording(
    compiled: Callable[..., Any], outputs: int, masks: Sequence[tuple[int, Recipe, slice]]
) -> Callable[..., Any]:
    """Run a compiled graph, register the masks that it returns, and drop its further outputs.

    The output at a place is computed by a recipe from the outputs in a slice.
    """

    def run(*args: Any) -> Any:
        results = compiled(*args)
        for place, recipe, where in masks:
            if _is_real(mask := results[place]):
                data = tuple(results[where])
                _origins[mask] = MaskOrigin(recipe, data, _state(mask))
                for one in data:
                    _ones[one] = None
        return tuple(results[:outputs])

    return run


def _returned(module: fx.GraphModule) -> list[tuple[int, Recipe, list[fx.Node]]]:
    """The place of each mask among the outputs, its recipe and the nodes of its data."""
    (output,) = module.graph.find_nodes(op="output")
    results = output.args[0]
    if not isinstance(results, (tuple, list)):
        return []
    functions, state = IndexFunctions(data=True), GraphState(module.graph)
    found = []
    for place, node in enumerate(results):
        if may_be_mask(node) and node.op in ("call_function", "call_method"):
            try:
                found.append((place, *_recipe(node, functions, state)))
            except Unknown:
                continue
    return found


def may_be_mask(node: Any) -> bool:
    origin_of = value(node)
    return (
        isinstance(origin_of, FakeTensor)
        and is_plain(origin_of)
        and origin_of.dim() == DIMENSIONS
        and not origin_of.requires_grad
        and (origin_of.dtype == torch.bool or origin_of.dtype.is_floating_point)
    )


def _recipe(
    mask: fx.Node, functions: IndexFunctions, state: GraphState
) -> tuple[Recipe, list[fx.Node]]:
    """The recipe of a mask, and the nodes of its data. Raises Unknown if there is none."""
    data = data_of(visible_keys(functions.value(mask)))
    if dense_datum(data) is not None:
        raise Unknown("it reads a dense tensor")
    read = {one.node for one in data}
    given = [one for one in mask.graph.nodes if one in read]
    nodes = _between(given, mask)
    if state.ever_written([*nodes, *given]) or any(map(state.transformed, nodes)):
        raise Unknown("it is written in place")
    # Compiled, two outputs that share memory may count their writes apart.
    (output,) = mask.graph.find_nodes(op="output")
    results = list(output.args[0])
    if results.count(mask) > 1 or not set(results).isdisjoint(state.sharing(mask)):
        raise Unknown("it shares memory with another output")
    graph: fx.Graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for i, one in enumerate(given):
        copies[one] = graph.placeholder(f"data_{i}")
    for one in nodes:
        copies[one] = graph.node_copy(one, copies.__getitem__)
        copies[one].meta.clear()
    graph.output(copies[mask])
    about = [(str(one.dtype), one.shape, one.device) for one in map(value, [*given, mask])]
    return Recipe(f"{graph.python_code('self').src}{about}", graph), given


def _between(given: Sequence[fx.Node], mask: fx.Node) -> list[fx.Node]:
    """The nodes that compute `mask` from `given`, in order."""
    needed = needed_by(mask, end=given.__contains__).difference(given)
    ordered = [one for one in mask.graph.nodes if one in needed]
    for one in (*ordered, *given):
        if is_symbolic(one):
            raise Unknown("its sizes are symbols")
        is_input = one in given and one.op == "placeholder"
        if not is_input and one.op not in ("call_function", "call_method"):
            raise Unknown(f"it is computed from {one.name}")
    return ordered
