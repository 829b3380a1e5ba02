"""What Inductor makes of an op: a call, where the op has a kernel, or else code for its definition.

The graphs of Dynamo and AOTAutograd hold every op whole. After the partition into forward and
backward, an op whose definition would run is replaced by the operators of that definition, which
Inductor compiles and fuses with their neighbours.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from . import library
from .record import Op
from .torch_private import after_import, has

# A definition of more nodes, such as a loss in more than about 20 chunks, is left a call: Inductor
# would take minutes, and the products take longer than what would be fused.
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


def _declare_ops(lowering: Any) -> None:
    """Register every op as a fallback, with the stride constraint of its tag.

    Inductor does the same at the first call of an unknown op. Up to torch 2.12 it then also logs
    the call with the expressions of all its arguments, expanded once for every path: 2**32 paths
    through the residual sums of 16 layers.
    """
    for op in library.OPS.values():
        if op.overload not in lowering.lowerings:
            (tag,) = _STRIDES.intersection(op.overload.tags)
            constraint = lowering.tag_to_layout_constraint(tag)
            lowering.make_fallback(op.overload, layout_constraint=constraint)


def _replace_definitions(post_grad: Any) -> None:
    """Let Inductor replace each op that runs its definition."""
    if not has("inductor_patterns"):
        return
    from .torch_private import inductor_patterns

    for op in library.OPS.values():
        inductor_patterns.register_graph_pattern(
            inductor_patterns.CallFunctionVarArgs(op.overload),
            extra_check=functools.partial(_runs_definition, op),
            pass_dict=post_grad.pass_patterns[0],
        )(functools.partial(_replace, op))


def _runs_definition(op: Op, match: Any) -> bool:
    """Whether the definition runs for the call, and can be traced: not for sizes that only the data
    gives, of which it may ask whether they fit a chunk."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    values = [node.meta["val"] for node in match.output_node().all_input_nodes]
    if any(map(free_unbacked_symbols, values)):
        return False
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    in_double = any(x.dtype in library.DOUBLES for x in tensors)
    return in_double or tensors[0].device.type not in op.kernels


def _replace(op: Op, match: Any, *args: Any, **kwargs: Any) -> None:
    """Replace a call of `op` by the operators of its definition."""
    call = tuple(op.arguments(*args, **kwargs))
    nodes = [value for value in pytree.tree_leaves(call) if isinstance(value, fx.Node)]

    def definition(*values: Any) -> Any:
        given = iter(values)
        return op.definition(*pytree.tree_map_only(fx.Node, lambda _: next(given), call))

    # The graph has the casts of autocast, under which this may be called.
    device = nodes[0].meta["val"].device.type
    with (
        contextlib.suppress(_TooManyNodes),
        torch.no_grad(),
        torch.autocast(device, enabled=False),
    ):
        match.replace_by_example(definition, nodes, _traced)


class _TooManyNodes(Exception):
    pass


def _traced(definition: Callable[..., Any], values: Sequence[Any]) -> fx.GraphModule:
    from .torch_private import inductor_patterns

    module: fx.GraphModule = inductor_patterns.fwd_only(definition, values)
    if len(module.graph.nodes) > MOST_NODES:
        raise _TooManyNodes
    return module
