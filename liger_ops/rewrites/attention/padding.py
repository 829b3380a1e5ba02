"""A padding mask that hides nothing costs nothing: the compiled callable looks at it.

Every collator passes an attention_mask, and in most batches it is 1 everywhere. Eager transformers
looks at the data and drops such a mask; a traced graph cannot. `Looking` is a callable that looks
at the mask on the host and runs one of two compilations: one of the graph in which the mask is
ones, so that attention is proved causal, and one of the graph as it is. Each is compiled when first
needed.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ...torch_private import FakeTensor, TracingContext, assert_async, tracing
from ..engine.canonical import value
from ..engine.failure import failed, is_strict
from ..engine.graph_state import GraphState
from ..engine.memory import is_plain
from ..engine.report import Report
from ..engine.rewrite import derive
from .attention import attentions
from .mask.algebra import Condition, Unknown, comparisons, data_of
from .mask.evaluate import IndexFunctions
from .mask.proof import visible_keys
from .mask.scopes import scopes
from .mask_outputs import is_ones
from .sdpa import visible
from .unfused_attention import written_attentions

Compile = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]

PROMISE = (
    'backend liger: options["padding"] is False, a promise that no token is padding, but the'
    " attention mask is not 1 everywhere"
)


# Held by a call that compiles: Dynamo, which is not running then, holds its own.
COMPILING = threading.RLock()


def found_padding(module: fx.GraphModule, strict: bool | None = None) -> list[int] | None:
    """`padding_masks`, or None with a warning if that raises an exception, unless it is strict."""
    try:
        return padding_masks(module)
    except Exception as error:
        if is_strict(strict):
            raise
        failed(Report(at=("padding", None)), error)
        return None


def padding_masks(module: fx.GraphModule) -> list[int]:
    """The positions of the inputs that are padding masks, among the inputs of the graph.

    An input is one if attention masks read it only to ask whether a token is padding, and if these
    masks are functions of indices alone where it is 1 everywhere.
    """
    # Nodes that were looked at are marked: the graph itself is not looked at.
    looked_at = duplicate(module)
    inputs = _inputs(looked_at)
    masks = list(_conditions(looked_at))
    state, found = GraphState(looked_at.graph), []
    for place, node in enumerate(inputs):
        if not _may_be_padding(node) or not any(_asks(mask, node) for mask in masks):
            continue
        if state.ever_written([node]):
            continue
        assumed = duplicate(module)
        assume_ones(assumed, [place])
        pairs = zip(masks, _conditions(assumed), strict=True)
        if all(not data_of(after) for before, after in pairs if _depends(before, node)):
            found.append(place)
    return found


def assume_what_is_seen(module: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Let the graph be the variant that the backend would run for these inputs."""
    places = found_padding(module)
    if places and is_full(inputs, places):
        assume_ones(module, places)


def assume_ones(module: fx.GraphModule, places: Sequence[int], *, check: bool = False) -> None:
    """Let the graph use ones in the place of inputs; with `check`, assert that they are ones.

    On a GPU the assertion runs on the device, and fails when the host next waits for it.
    """
    inputs = _inputs(module)
    *_, last = inputs
    for node in [inputs[place] for place in places]:
        ones = derive(last.next, torch.ones_like, node)
        for user in list(node.users):
            if user is not ones and user.op != "output":
                user.replace_input_with(node, ones)
        if check:
            equal = derive(last.next, torch.eq, node, 1)
            every = derive(equal.next, torch.all, equal)
            derive(every.next, assert_async, every, PROMISE)
    module.recompile()


def duplicate(module: fx.GraphModule) -> fx.GraphModule:
    """A copy with graphs of its own, down to the subgraphs; tensors are shared."""
    copied = fx.GraphModule(module, copy.deepcopy(module.graph))
    copied.meta.update(module.meta)
    for name, part in module.named_children():
        if isinstance(part, fx.GraphModule) and hasattr(copied, name):
            setattr(copied, name, duplicate(part))
    return copied


class PaddingVariants:
    """Runs the compilation for full batches if the padding masks are 1 everywhere, else the other.

    The one that the first batch needs is compiled at once. With symbolic sizes both are: a later
    compilation could specialise a size without a guard.
    """

    def __init__(
        self, module: fx.GraphModule, example_inputs: Sequence[Any],
        places: Sequence[int], compile_one: Compile,
    ) -> None:  # fmt: skip
        self._module, self._places, self._compile = module, list(places), compile_one
        self._fakes = without_data(module, example_inputs)
        self._context = TracingContext.try_get()
        first = self._is_full(example_inputs)
        both = any(map(_is_symbolic, self._fakes))
        self._made = {
            full: self._compiled(full, example_inputs)
            for full in ((first, not first) if both else (first,))
        }

    def __call__(self, *args: Any) -> Any:
        full = self._is_full(args)
        if full not in self._made:
            with COMPILING, tracing(self._context):
                if full not in self._made:
                    self._made[full] = self._compiled(full, self._fakes)
        return self._made[full](*args)

    def _is_full(self, inputs: Sequence[Any]) -> bool:
        return is_full(inputs, self._places)

    def _compiled(self, full: bool, inputs: Sequence[Any]) -> Callable[..., Any]:
        module = duplicate(self._module)
        if full:
            assume_ones(module, self._places)
        return self._compile(module, inputs)


def without_data(module: fx.GraphModule, inputs: Sequence[Any]) -> list[Any]:
    """The inputs as fake tensors, so that no batch stays in memory for a later compilation."""
    return [
        known if isinstance(known := value(node), FakeTensor) else given
        for node, given in zip(_inputs(module), inputs, strict=True)
    ]


def is_split(inputs: Sequence[Any]) -> bool:
    """Whether these are the inputs of a part of a graph that DDP's optimizer splits.

    It gives fake tensors, and AOTAutograd raises for a part that is compiled later.
    """
    return any(isinstance(one, FakeTensor) for one in inputs)


def is_full(inputs: Sequence[Any], places: Sequence[int]) -> bool:
    """Whether the inputs at `places` are 1 everywhere."""
    return all(is_ones(inputs[place]) for place in places)


def _inputs(module: fx.GraphModule) -> list[fx.Node]:
    return [node for node in module.graph.nodes if node.op == "placeholder"]


def _may_be_padding(node: fx.Node) -> bool:
    known = value(node)
    return (
        isinstance(known, Tensor)
        and is_plain(known)
        and known.dim() == 2
        and not known.dtype.is_floating_point
        and not known.dtype.is_complex
    )


def _conditions(module: fx.GraphModule) -> Iterator[Condition]:
    """The condition of each mask of attention, in the order of the graph.

    A mask that cannot be analysed is yielded as False, which depends on nothing.
    """
    for scope in scopes(module.graph, data=True):
        functions = scope.functions
        for _, arguments in attentions(scope.graph, "padding", Report()):
            mask = arguments["attn_mask"]
            if isinstance(mask, fx.Node):
                yield _known(_visible_keys, mask, functions)
        state = GraphState(scope.graph)
        for written in written_attentions(scope.graph, "padding", Report(), state):
            for part in written.masks:
                yield _known(visible, part, functions)


def _visible_keys(mask: fx.Node, functions: IndexFunctions) -> Condition:
    return visible_keys(functions.value(mask))


def _known(read: Callable[[Any, IndexFunctions], Condition], *arguments: Any) -> Condition:
    try:
        return read(*arguments)
    except Unknown:
        return False


def _asks(condition: Condition, node: fx.Node) -> bool:
    """Whether a condition reads `node`, and only to compare its elements with constants."""
    leaves = [
        leaf
        for leaf in comparisons(condition)
        if any(datum.node is node for datum in data_of(leaf))
    ]
    return bool(leaves) and all(
        len(leaf.value.terms) == 1 and not leaf.value.slopes for leaf in leaves
    )


def _depends(condition: Condition, node: fx.Node) -> bool:
    """Whether the data of a condition is computed from `node`."""
    waiting, seen = [datum.node for datum in data_of(condition)], set()
    while waiting:
        one = waiting.pop()
        if one is node:
            return True
        if one not in seen:
            seen.add(one)
            waiting += one.all_input_nodes
    return False


def _is_symbolic(one: Any) -> bool:
    sizes = one.shape if isinstance(one, Tensor) else [one]
    return any(isinstance(size, torch.SymInt) for size in sizes)
