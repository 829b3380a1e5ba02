"""A graph that is given a mask computes attention by what the mask was computed from.

Another graph made the mask, which is a dense tensor here. If it is a mask that a graph of this
backend returned (`mask_outputs`), the graph is compiled with the mask's operations in the place of
the input, and the mask's data as further inputs; the rewrites of attention then see what they would
see if the model were one graph. Each call asks what its masks are, on the host, and runs the
compilation for that; it is compiled when first needed. A mask of which nothing is known, or that
was written since, runs the graph as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ...torch_private import FakeTensor, TracingContext, tracing
from ..engine.canonical import value
from ..engine.failure import failed, is_strict
from ..engine.graph_state import GraphState
from ..engine.memory import is_plain
from ..engine.replay import replay
from ..engine.report import Report
from ..engine.rewrite import ORIGIN
from .attention import attentions
from .mask.algebra import Unknown
from .mask.scopes import scopes
from .mask_outputs import DIMENSIONS, Known, Recipe, known
from .padding import COMPILING, Compile, duplicate, is_split, without_data
from .unfused_attention import written_attentions

# The position of the input that a node computes anew.
_INSTEAD_OF = "liger_ops.instead_of"


def given_masks(
    module: fx.GraphModule, inputs: Sequence[Any], strict: bool | None = None
) -> list[int]:
    """The positions, among the inputs, of those that may be masks of attention.

    There are none in a graph with symbolic sizes, nor in a part of a split graph. An exception is a
    warning unless it is strict.
    """
    if is_split(inputs):
        return []
    try:
        return _given_masks(module)
    except Exception as error:
        if is_strict(strict):
            raise
        failed(Report(at=("given_masks", None)), error)
        return []


def _given_masks(module: fx.GraphModule) -> list[int]:
    inputs = _inputs(module.graph)
    if not any(map(_may_be_mask, inputs)) or any(map(_is_symbolic, inputs)):
        return []
    # Nodes that were looked at are marked: the graph itself is not looked at.
    looked_at = duplicate(module)
    read: set[fx.Node] = set()
    for scope in scopes(looked_at.graph):
        masks = [
            arguments["attn_mask"] for _, arguments in attentions(scope.graph, "masks", Report())
        ]
        state = GraphState(scope.graph)
        for written in written_attentions(scope.graph, "masks", Report(), state):
            masks += written.masks
        for mask in masks:
            if isinstance(mask, fx.Node):
                try:
                    scope.functions.value(mask)
                except Unknown:
                    read.update(scope.functions.read(mask))
    state = GraphState(looked_at.graph)
    return [
        place
        for place, node in enumerate(_inputs(looked_at.graph))
        if node in read and _may_be_mask(node) and not state.ever_written([node])
    ]


class MaskVariants:
    """Runs the compilation of a graph for what its masks were computed from."""

    def __init__(
        self, module: fx.GraphModule, example_inputs: Sequence[Any],
        places: Sequence[int], compile_one: Compile,
    ) -> None:  # fmt: skip
        self._module, self._places, self._compile = module, tuple(places), compile_one
        self._fakes = without_data(module, example_inputs)
        self._context = TracingContext.try_get()
        self._made: dict[tuple[Recipe | None, ...], Callable[..., Any]] = {}
        self._variant(self._masks(example_inputs), list(example_inputs))

    def __call__(self, *args: Any) -> Any:
        masks = self._masks(args)
        recipes = _recipes(masks)
        if recipes not in self._made:
            with COMPILING, tracing(self._context):
                if recipes not in self._made:
                    self._variant(masks, self._fakes)
        return self._made[recipes](*args, *_data(masks))

    def _masks(self, inputs: Sequence[Any]) -> list[Known | None]:
        return [known(inputs[place]) for place in self._places]

    def _variant(self, masks: Sequence[Known | None], inputs: Sequence[Any]) -> None:
        module = duplicate(self._module)
        put(module, self._places, masks)
        # The data itself, because the compilation may look at it.
        given = [*inputs, *_data(masks)]
        self._made[_recipes(masks)] = self._compile(module, given)


def put_known(module: fx.GraphModule, inputs: Sequence[Any]) -> list[Tensor]:
    """Let the graph be the variant that the backend would compile for these inputs.

    Returns the data of the masks, which the graph is given too.
    """
    places = given_masks(module, inputs)
    masks = [known(inputs[place]) for place in places]
    put(module, places, masks)
    return _data(masks)


def put(module: fx.GraphModule, places: Sequence[int], masks: Sequence[Known | None]) -> None:
    """Compute masks in the graph from their data, which become its last inputs."""
    inputs = _inputs(module.graph)
    last, count = inputs[-1], 0
    made = []
    for place, mask in zip(places, masks, strict=True):
        if mask is None:
            continue
        data = []
        for one in mask.data:
            with module.graph.inserting_after(last):
                last = module.graph.placeholder(f"liger_mask_data_{count}")
            with value(inputs[place]).fake_mode:
                fake = torch.empty(one.shape, dtype=one.dtype, device=one.device)
            last.meta["example_value"] = fake
            count += 1
            data.append(last)
        made.append((inputs[place], mask.recipe, data))
    for node, recipe, data in made:
        _compute(node, recipe, data, last)
    module.recompile()


def _compute(node: fx.Node, recipe: Recipe, data: Sequence[fx.Node], last: fx.Node) -> None:
    """Compute the input `node` after the input `last`, and let the graph use that."""
    graph, copies, given = node.graph, {}, iter(data)
    user = next(iter(node.users), None)
    for one in recipe.graph.nodes:
        if one.op == "placeholder":
            copies[one] = next(given)
        elif one.op != "output":
            with graph.inserting_after(last):
                copies[one] = last = graph.node_copy(one, copies.__getitem__)
            with value(node).fake_mode:
                last.meta["example_value"] = replay(
                    last, *fx.map_arg((last.args, last.kwargs), value)
                )
            if user is not None:
                last.meta.update({key: user.meta[key] for key in ORIGIN if key in user.meta})
    example, traced = value(last), value(node)
    if (example.shape, example.dtype, example.device) != (
        traced.shape, traced.dtype, traced.device,
    ):  # fmt: skip
        raise AssertionError(f"a mask of {example.shape} in the place of one of {traced.shape}")
    place = _inputs(graph).index(node)
    node.replace_all_uses_with(last)
    last.meta[_INSTEAD_OF] = place


def put_back(module: fx.GraphModule) -> None:
    """Use a mask that was given where the rewrites left a use of it: it need not be made again."""
    for node in list(module.graph.nodes):
        if (place := node.meta.pop(_INSTEAD_OF, None)) is None:
            continue
        node.replace_all_uses_with(_inputs(module.graph)[place])
        waiting = [node]
        while waiting:
            one = waiting.pop()
            if one.op != "placeholder" and not one.users and not one._erased:
                waiting += one.all_input_nodes
                one.graph.erase_node(one)
    module.recompile()


def _recipes(masks: Sequence[Known | None]) -> tuple[Recipe | None, ...]:
    return tuple(None if mask is None else mask.recipe for mask in masks)


def _data(masks: Sequence[Known | None]) -> list[Tensor]:
    return [one for mask in masks if mask is not None for one in mask.data]


def _inputs(graph: fx.Graph) -> list[fx.Node]:
    return graph.find_nodes(op="placeholder")


def _may_be_mask(node: fx.Node) -> bool:
    traced = value(node)
    return (
        isinstance(traced, FakeTensor)
        and is_plain(traced)
        and traced.dim() == DIMENSIONS
        and not traced.requires_grad
        and (traced.dtype == torch.bool or traced.dtype.is_floating_point)
    )


def _is_symbolic(node: fx.Node) -> bool:
    traced = value(node)
    sizes = traced.shape if isinstance(traced, Tensor) else [traced]
    return any(isinstance(size, torch.SymInt) for size in sizes)
