"""Masks that a graph returns: remember how each was computed, for the graphs that take it.

Graphs end at the hooks of FSDP2, at DDP's forward and at every graph break, and a mask that one
graph computes is a dense tensor for the next. So a graph that returns a mask also returns a copy of
the data that the mask was computed from, such as the attention_mask, and its callable registers
under the mask, weakly, the operations that compute it and that data. `origin_of` returns these for
a tensor that is the same object, in the same memory, and was not written since.
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
from ...engine.effects import is_plain
from ...engine.graph_state import GraphState, needed_by
from ...engine.insertion import derive
from ...engine.maps.algebra import Unknown, data_of
from ...engine.report import guarded
from ..mask.blocks import dense_datum
from ..mask.evaluate import IndexFunctions
from ..mask.proof import visible_keys
from .variants import is_symbolic

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]

# Dimensions of a mask: (batch, heads, queries, keys).
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
    """The recipe and the data that a mask was computed from.

    Attributes:
        recipe: the operations.
        data: copies, to which nothing else refers, so nothing can write them.
        state: the mask's version, memory and metadata when it was computed (`_state`).
    """

    recipe: Recipe
    data: tuple[Tensor, ...]
    state: tuple[Any, ...]


_origins: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
# For the copies of data, which nothing writes: whether they are 1 everywhere.
_ones: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def origin_of(mask: Any) -> MaskOrigin | None:
    """Return the origin of `mask`; None if it is unknown, or the mask was written since."""
    origin = _origins.get(mask) if _is_real(mask) else None
    return origin if origin is not None and origin.state == _state(mask) else None


def _is_real(mask: Any) -> bool:
    """Return whether a value is a tensor with data and a version."""
    is_tensor = isinstance(mask, Tensor) and not isinstance(mask, FakeTensor)
    return is_tensor and not mask.is_inference()


def is_ones(tensor: Tensor) -> bool:
    """Return whether a tensor is 1 everywhere; this waits for the device.

    For the data of a mask the answer is kept.
    """
    answer = _ones.get(tensor)
    if answer is None:
        answer = bool((tensor == 1).all())
        if tensor in _ones:
            _ones[tensor] = answer
    return answer


def _state(mask: Tensor) -> tuple[Any, ...]:
    # `mask.data = other` changes the memory, and not the version.
    return mask._version, mask.data_ptr(), mask.shape, mask.stride(), mask.dtype, mask.device


def with_data(module: fx.GraphModule, strict: bool | None = None) -> Wrap | None:
    """Let the graph also return the data of the masks that it returns.

    Return the function that wraps the compiled graph, which registers the masks. Return None, and
    change nothing, if the graph returns no such mask. An exception is a warning unless it is
    strict.
    """
    masks_found = guarded("masks", strict, _returned, module, otherwise=[])
    if not masks_found:
        return None
    (output,) = module.graph.find_nodes(op="output")
    results: Any = output.args[0]
    extended, masks = list(results), []
    for position, recipe, data in masks_found:
        masks.append((position, recipe, slice(len(extended), len(extended) + len(data))))
        extended += [
            derive(output, torch.clone, tensor, memory_format=torch.contiguous_format)
            for tensor in data
        ]
    output.args = (tuple(extended),)
    module.recompile()
    return lambda compiled: _recording(compiled, len(results), masks)


def _recording(
    compiled: Callable[..., Any], outputs: int, masks: Sequence[tuple[int, Recipe, slice]]
) -> Callable[..., Any]:
    """Wrap a compiled graph: register the masks that it returns, and drop its further outputs.

    Args:
        compiled: the compiled graph.
        outputs: the number of outputs that the caller expects.
        masks: for each mask its position among the outputs, its recipe, and the slice of the
            outputs that is its data.
    """

    def run(*args: Any) -> Any:
        results = compiled(*args)
        for position, recipe, data_slice in masks:
            if _is_real(mask := results[position]):
                data = tuple(results[data_slice])
                _origins[mask] = MaskOrigin(recipe, data, _state(mask))
                for tensor in data:
                    _ones[tensor] = None
        return tuple(results[:outputs])

    return run


def _returned(module: fx.GraphModule) -> list[tuple[int, Recipe, list[fx.Node]]]:
    """Return the position of each mask among the outputs, its recipe and the nodes of its data."""
    (output,) = module.graph.find_nodes(op="output")
    results = output.args[0]
    if not isinstance(results, (tuple, list)):
        return []
    functions, state = IndexFunctions(data=True), GraphState(module.graph)
    recipes = []
    for position, node in enumerate(results):
        if may_be_mask(node) and node.op in ("call_function", "call_method"):
            try:
                recipes.append((position, *_recipe(node, functions, state)))
            except Unknown:
                continue
    return recipes


def may_be_mask(node: Any) -> bool:
    example = value(node)
    return (
        isinstance(example, FakeTensor)
        and is_plain(example)
        and example.dim() == DIMENSIONS
        and not example.requires_grad
        and (example.dtype == torch.bool or example.dtype.is_floating_point)
    )


def _recipe(
    mask: fx.Node, functions: IndexFunctions, state: GraphState
) -> tuple[Recipe, list[fx.Node]]:
    """Return the recipe of a mask, and the nodes of its data.

    Raises:
        Unknown: the mask has no recipe, for the reason given.
    """
    data = data_of(visible_keys(functions.value(mask)))
    if dense_datum(data) is not None:
        raise Unknown("it reads a dense tensor")
    read = {datum.node for datum in data}
    data_nodes = [node for node in mask.graph.nodes if node in read]
    nodes = _between(data_nodes, mask)
    if state.ever_written([*nodes, *data_nodes]) or any(map(state.transformed, nodes)):
        raise Unknown("it is written in place")
    # Compiled, two outputs that share memory may count their writes apart.
    (output,) = mask.graph.find_nodes(op="output")
    results = list(output.args[0])
    if results.count(mask) > 1 or not set(results).isdisjoint(state.sharing(mask)):
        raise Unknown("it shares memory with another output")
    graph: fx.Graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for i, node in enumerate(data_nodes):
        copies[node] = graph.placeholder(f"data_{i}")
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        copies[node].meta.clear()
    graph.output(copies[mask])
    metadata = [(str(x.dtype), x.shape, x.device) for x in map(value, [*data_nodes, mask])]
    return Recipe(f"{graph.python_code('self').src}{metadata}", graph), data_nodes


def _between(data_nodes: Sequence[fx.Node], mask: fx.Node) -> list[fx.Node]:
    """Return the nodes that compute `mask` from `data_nodes`, in the order of the graph.

    Raises:
        Unknown: one of them has symbolic sizes, or is neither a call nor an input that is data.
    """
    needed = needed_by(mask, end=data_nodes.__contains__).difference(data_nodes)
    ordered = [node for node in mask.graph.nodes if node in needed]
    for node in (*ordered, *data_nodes):
        if is_symbolic(node):
            raise Unknown("its sizes are symbols")
        is_input = node in data_nodes and node.op == "placeholder"
        if not is_input and node.op not in ("call_function", "call_method"):
            raise Unknown(f"it is computed from {node.name}")
    return ordered
