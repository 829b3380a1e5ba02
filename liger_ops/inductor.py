"""Lowering of ops in Inductor: a call of an op that has a kernel, generated code for any other.

The graphs of Dynamo and AOTAutograd hold every op as one node. After the partition into forward and
backward, an op whose definition would run is replaced by the operators of that definition, which
Inductor compiles and fuses with their neighbours.

A package of AOTInductor runs where liger_ops is not imported. In it, an op with a kernel is
replaced by the operations of its host code: allocations, PyTorch's operators, and launches of
Triton kernels, which Inductor embeds into the package.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from . import library
from .record import Op
from .torch_private import after_import, has

# An op whose definition has more nodes, such as a loss in more than about 20 chunks, remains a
# call: Inductor would take minutes to compile it, and its matrix products take longer than all that
# could be fused.
MOST_NODES = 1500

_STRIDES = {
    torch.Tag.needs_contiguous_strides,
    torch.Tag.needs_exact_strides,
    torch.Tag.needs_fixed_stride_order,
}


def register_with_inductor() -> None:
    """Register every op with Inductor, now or when Inductor is imported."""
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
    """Register a pattern with Inductor for each op: a call of it that is to be replaced."""
    if not has("inductor_patterns"):
        return
    from .torch_private import inductor_patterns

    for op in library.OPS.values():
        inductor_patterns.register_graph_pattern(
            inductor_patterns.CallFunctionVarArgs(op.overload),
            extra_check=functools.partial(_is_replaced, op),
            pass_dict=post_grad.pass_patterns[0],
        )(functools.partial(_replace, op))


def _is_replaced(op: Op, match: Any) -> bool:
    """Return whether a call is to be replaced: in a package every call, and elsewhere a call that
    runs the definition, unless a size depends on data. A definition may compare a size with that
    of a chunk, which a trace cannot answer for such a size."""
    from .torch_private import inductor_state

    nodes = match.output_node().all_input_nodes
    values = [node.meta["val"] for node in nodes]
    return inductor_state.aot_compilation or not (
        _has_data_dependent_sizes(nodes) or _has_kernel(op, values)
    )


def _has_data_dependent_sizes(nodes: Iterable[fx.Node]) -> bool:
    """Return whether the value of a node is, or has, a size that depends on data."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return any(free_unbacked_symbols(node.meta.get("val")) for node in nodes)


def _has_kernel(op: Op, values: Sequence[Any]) -> bool:
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    in_double = any(x.dtype in library.DOUBLES for x in tensors)
    return not in_double and tensors[0].device.type in op.kernels


def _replace(op: Op, match: Any, *args: Any, **kwargs: Any) -> None:
    """Replace a call of `op` by the operators of its definition, or in a package by those of its
    kernel's host code, if it has a kernel that can be traced."""
    from .torch_private import inductor_state

    call = tuple(op.arguments(*args, **kwargs))
    nodes = [value for value in pytree.tree_leaves(call) if isinstance(value, fx.Node)]
    values = [node.meta["val"] for node in nodes]
    device = values[0].device.type

    def replace(function: Callable[..., Any], trace: Callable[..., fx.GraphModule]) -> None:
        def run(*values: Any) -> Any:
            inputs = iter(values)
            return function(*pytree.tree_map_only(fx.Node, lambda _: next(inputs), call))

        # The graph already has the casts of autocast, which may be on while Inductor compiles.
        with torch.no_grad(), torch.autocast(device, enabled=False):
            match.replace_by_example(run, nodes, trace)

    if not inductor_state.aot_compilation:
        with contextlib.suppress(_NotReplaced):
            replace(op.definition, _traced_if_short)
        return
    if _has_kernel(op, values):
        try:
            replace(op.kernels[device], functools.partial(_traced_launches, device))
            return
        except Exception as error:
            # For example a grid that depends on a dynamic size: the package is correct without.
            _warn(f"the definition of {op.name} instead of its kernel", error)
    try:
        replace(op.definition, _traced)
    except Exception as error:
        _warn(f"a call of {op.name}, for which the package needs liger_ops", error)


def _warn(content: str, error: Exception) -> None:
    reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    warnings.warn(f"liger_ops: AOTInductor's package has {content}: {reason}", stacklevel=2)


class _NotReplaced(Exception):
    """Raised by a trace for an op that is to remain a call."""


def _traced(function: Callable[..., Any], values: Sequence[Any]) -> fx.GraphModule:
    from .torch_private import inductor_patterns

    module: fx.GraphModule = inductor_patterns.fwd_only(function, values)
    return module


def _traced_if_short(definition: Callable[..., Any], values: Sequence[Any]) -> fx.GraphModule:
    """Trace the definition; raise _NotReplaced if its graph is long or reads data, as that of
    experts does: reading data is not allowed in every graph, and Inductor fails at gradients whose
    sizes were read (torch 2.13)."""
    from .torch_private import DataDependentOutputException

    try:
        module = _traced(definition, values)
    except DataDependentOutputException:
        raise _NotReplaced from None
    nodes = module.graph.nodes
    if len(nodes) > MOST_NODES or _has_data_dependent_sizes(nodes):
        raise _NotReplaced
    return module


def _traced_launches(
    device: str, host_code: Callable[..., Any], values: Sequence[Any]
) -> fx.GraphModule:
    library.load(device)
    embedded = importlib.import_module(f"{__package__}.lowering.{device}.embedded")
    with embedded.traced_launches(), _no_new_guards(values[0].fake_mode.shape_env):
        module = _traced(torch.func.functionalize(host_code), values)
    for node in module.graph.nodes:
        if node.target is torch.ops.higher_order.triton_kernel_wrapper_functional:
            # Inductor then gives the kernel the strides that its launch was traced with.
            node.meta["eager_input_vals"] = fx.map_arg(
                (node.args, node.kwargs), lambda argument: argument.meta["val"]
            )
    return module


@contextlib.contextmanager
def _no_new_guards(shape_env: Any) -> Iterator[None]:
    """Make `shape_env` raise if host code branches on a dynamic size: a package would take the
    branch of the example's size for every size."""

    from .torch_private import check_frozen

    def refuse(question: Any, answer: Any) -> None:
        raise ValueError(f"the host code depends on a dynamic size: {question} is {answer}")

    if shape_env is None:
        yield
        return
    setattr(shape_env, check_frozen.__name__, refuse)
    try:
        yield
    finally:
        delattr(shape_env, check_frozen.__name__)
