"""What Inductor makes of an op: a call, where the op has a kernel, or else code for its definition.

The graphs of Dynamo and AOTAutograd hold every op whole. After the partition into forward and
backward, an op whose definition would run is replaced by the operators of that definition, which
Inductor compiles and fuses with their neighbours.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from . import library
from .record import Op
from .torch_private import after_import, has

# A loss in more chunks than 30, or an MLP in as many tiles, is left a call: Inductor takes a minute
# for this number of nodes, and the products take longer than what would be fused.
MOST_NODES = 1500

_STRIDES = {
    torch.Tag.needs_contiguous_strides,
    torch.Tag.needs_exact_strides,
    torch.Tag.needs_fixed_stride_order,
}


def register_with_inductor() -> None:
    """Register every op with Inductor, when it is imported."""
    after_import("torch._inductor.lowering", _declare_ops)
    after_import("torch._inductor.fx_passes.post_grad", _replace_definitions)


def _declare_ops() -> None:
    """Register every op as a fallback, with the stride constraint of its tag.

    Inductor does the same at the first call of an unknown op. Up to torch 2.12 it then also logs
    the call with the expressions of all its arguments, expanded once for every path: 2**32 paths
    through the residual sums of 16 layers.
    """
    from .torch_private import inductor_lowering

    if not has("inductor_lowering"):
        return
    for op in library.OPS.values():
        if op.overload not in inductor_lowering.lowerings:
            (tag,) = _STRIDES.intersection(op.overload.tags)
            constraint = inductor_lowering.tag_to_layout_constraint(tag)
            inductor_lowering.make_fallback(op.overload, layout_constraint=constraint)


def _replace_definitions() -> None:
    """Let Inductor replace each op that runs its definition."""
    from .torch_private import inductor_patterns, post_grad_patterns

    if not has("inductor_patterns", "post_grad_patterns"):
        return
    for op in library.OPS.values():
        inductor_patterns.register_graph_pattern(
            inductor_patterns.CallFunctionVarArgs(op.overload),
            extra_check=functools.partial(_runs_definition, op),
            pass_dict=post_grad_patterns[0],
        )(functools.partial(_replace, op))


def _runs_definition(op: Op, match: Any) -> bool:
    node = match.output_node()
    return library.runs_definition(op, [value.meta["val"] for value in node.all_input_nodes])


def _replace(op: Op, match: Any, *args: Any, **kwargs: Any) -> None:
    """Replace a call of `op` by the operators of its definition, if it can be traced."""
    from .torch_private import GuardOnDataDependentSymNode

    call = op.arguments(*args, **kwargs)
    nodes = [value for value in pytree.tree_leaves(tuple(call)) if isinstance(value, fx.Node)]
    device = nodes[0].meta["val"].device.type

    def definition(*values: Any) -> Any:
        given: Iterator[Any] = iter(values)
        return op.definition(*pytree.tree_map_only(fx.Node, lambda _: next(given), tuple(call)))

    try:
        # The graph has the casts of autocast, under which this may be called.
        with torch.no_grad(), torch.autocast(device, enabled=False):
            match.replace_by_example(definition, nodes, _traced)
    except (_TooManyNodes, GuardOnDataDependentSymNode):
        # The latter is of a definition that asks for a size that only the data gives.
        pass


class _TooManyNodes(Exception):
    pass


def _traced(definition: Callable[..., Any], values: Sequence[Any]) -> fx.GraphModule:
    from .torch_private import inductor_patterns

    module: fx.GraphModule = inductor_patterns.fwd_only(definition, values)
    if len(module.graph.nodes) > MOST_NODES:
        raise _TooManyNodes
    return module
