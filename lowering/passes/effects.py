"""The memory that nodes write to, and the memory that holds their values.

Unknown cases are treated as the worst case: an unknown operation writes everywhere, and a tensor of
unknown layout may be in any memory.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from ...torch_private import (
    FakeTensor,
    HigherOrderOperator,
    OpOverload,
    OpOverloadPacket,
    get_unwrapped,
    is_functorch_wrapped_tensor,
)
from .canonical import value

_OPERATORS = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"),
    *("and", "or", "xor", "lshift", "rshift"),
)
_IN_PLACE = {operator.setitem, *(getattr(operator, f"i{name}") for name in _OPERATORS)}
# The position of `inplace` among the arguments of functions of torch.nn.functional.
_INPLACE_POSITION = {"dropout": 3, "silu": 1, "relu": 1, "leaky_relu": 2, "hardtanh": 3, "elu": 2}
# Modules whose functions show by name and arguments what they write to. C++ functions have none.
_KNOWN_MODULES = {"None", "_operator", "builtins", "einops", "functorch", "math", "torch"}
_KERNELS_OF_USERS = "triton_kernel_wrapper"

# Stands for unknown memory.
ANYWHERE = -1


def is_plain(tensor: Any) -> bool:
    """Whether `tensor` is an ordinary dense tensor, not a DTensor, a vmap wrapper or the like."""
    return (
        type(tensor) in (Tensor, torch.nn.Parameter, FakeTensor)
        and not is_functorch_wrapped_tensor(tensor)
        and tensor.layout is torch.strided
        and not tensor.is_nested
    )


def writes(node: fx.Node) -> bool:
    """Whether `node` writes to a tensor that it did not create."""
    return bool(written(node))


def written(node: fx.Node) -> set[int]:
    """The memory that `node` writes to: see `memory`."""
    if isinstance(node.target, HigherOrderOperator):
        return _written_in_subgraphs(node)
    if _is_unknown(node):
        return {ANYWHERE}
    return memory(_targets(node))


def memory(nodes: Iterable[Any]) -> set[int]:
    """Keys of the storages of `nodes`, which are nodes or tensors; other values are skipped."""
    return {key for node in pytree.tree_leaves(list(nodes)) for key in _storages(value(node), node)}


def _storages(known: Any, node: Any) -> set[int]:
    if isinstance(known, (tuple, list)):
        return {key for part in known for key in _storages(part, part)}
    if isinstance(known, Tensor):
        while is_functorch_wrapped_tensor(known):
            known = get_unwrapped(known)
        return {known.untyped_storage()._cdata} if is_plain(known) else {ANYWHERE}
    # A node without an example value may be a tensor.
    return {ANYWHERE} if known is None and isinstance(node, fx.Node) else set()


def _written_in_subgraphs(node: fx.Node) -> set[int]:
    """No memory, or ANYWHERE: a subgraph that is called twice shows the inputs of one call only."""
    if _KERNELS_OF_USERS in node.target.name():  # type: ignore[union-attr]
        return {ANYWHERE}
    for part in subgraphs(node):
        inputs = memory(inner for inner in part.graph.nodes if inner.op == "placeholder")
        if any(written(inner) & {*inputs, ANYWHERE} for inner in part.graph.nodes):
            return {ANYWHERE}
    return set()


def subgraphs(node: fx.Node) -> list[fx.GraphModule]:
    """The graphs among the arguments of a higher-order operator's node."""
    owner = node.graph.owning_module
    given = [getattr(owner, str(one.target), None) for one in node.all_input_nodes if _is_attr(one)]
    return [one for one in given if isinstance(one, fx.GraphModule)]


def _is_attr(node: fx.Node) -> bool:
    return node.op == "get_attr"


def _is_unknown(node: fx.Node) -> bool:
    if node.op == "call_module":
        return True
    if node.op != "call_function" or isinstance(node.target, OpOverload):
        return False
    if isinstance(node.target, OpOverloadPacket):
        return any(
            getattr(node.target, name)._schema.is_mutable for name in node.target.overloads()
        )
    module = str(getattr(node.target, "__module__", None)).partition(".")[0]
    return module not in _KNOWN_MODULES and not module.startswith("pybind11")


def _targets(node: fx.Node) -> list[Any]:
    """The arguments that `node` writes to."""
    if node.op not in ("call_function", "call_method"):
        return []
    if isinstance(node.target, OpOverload):
        written_to = [
            (i, argument.name)
            for i, argument in enumerate(node.target._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        given = [node.args[i] for i, _ in written_to if i < len(node.args)]
        return given + [node.kwargs[name] for _, name in written_to if name in node.kwargs]
    targets = [] if node.kwargs.get("out") is None else [node.kwargs["out"]]
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    in_place = node.target in _IN_PLACE or (
        # `operator.and_` has its underscore for another reason.
        name.endswith("_") and not name.endswith("__") and not hasattr(operator, name)
    )
    position = _INPLACE_POSITION.get(name, len(node.args))
    if in_place or node.kwargs.get("inplace") or any(node.args[position : position + 1]):
        targets += node.args[:1]
    return targets
