"""Run a graph with all its floating-point arithmetic in a wider dtype.

A cast to a dtype that a model computes in, or is stored in, rounds because of that dtype: a wide
run is without it. Any other cast to a narrower dtype, as of a quantised model, is a part of what
the model computes, and rounds in a wide run too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from .canonical import calls, value
from .casts import dtype_of, has_arithmetic, represents

# The dtypes with arithmetic to which a float32 model may round values.
NARROW = (torch.bfloat16, torch.float16)


def widened(dtype: torch.dtype, module: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
    """A graph that computes in a wider dtype and returns results in their original dtypes."""
    (output,) = module.graph.find_nodes(op="output")
    examples = [value(one) for one in pytree.tree_leaves(output.args)]
    rounded = rounded_beside(dtypes_of(module, of_casts=False))

    def run(*inputs: Any) -> Any:
        cast = pytree.tree_map(lambda x: _to(x, dtype), inputs)
        with default_dtype(dtype), InWider(dtype, rounded):
            results = pytree.tree_leaves(module(*cast))
        return tuple(
            _to(result, example.dtype) if isinstance(example, Tensor) else result
            for result, example in zip(results, examples, strict=True)
        )

    return run


def dtypes_of(module: fx.GraphModule, of_casts: bool = True) -> set[torch.dtype]:
    """The floating-point dtypes that a graph is given, or computes in.

    Without `of_casts`, only those that it does not take from its own casts, but from its inputs or
    from autocast.
    """
    nodes = [
        node
        for part in module.modules()
        if isinstance(part, fx.GraphModule)
        for node in part.graph.nodes
        if not calls(node, "cast")
    ]
    found = set()
    for node in nodes:
        before = set(map(dtype_of, node.all_input_nodes))
        dtypes = {dtype_of(one) for one in pytree.tree_leaves([value(node)])}
        found |= dtypes if of_casts else dtypes - before
    return {dtype for dtype in found if dtype is not None and has_arithmetic(dtype)}


def rounded_beside(own: Collection[torch.dtype]) -> set[torch.dtype]:
    """The dtypes to which a model whose dtypes are `own` rounds by its own casts alone."""
    return {dtype for dtype in NARROW if not any(represents(dtype, one) for one in own)}


class InWider(TorchFunctionMode):
    """Replace every floating-point dtype with arithmetic that code asks for by a wider one. A cast
    to a dtype in `rounded` rounds to that first."""

    def __init__(self, dtype: torch.dtype, rounded: Collection[torch.dtype] = ()) -> None:
        super().__init__()
        self.dtype, self.rounded = dtype, rounded

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        asked: set[torch.dtype] = set()

        def widen(value: Any) -> Any:
            if not isinstance(value, torch.dtype) or not has_arithmetic(value):
                return value
            asked.add(value)
            return self.dtype

        if func in CASTS:
            args, func = (args[0], CASTS[func]), Tensor.to
        args, kwargs = pytree.tree_map(widen, (tuple(args), kwargs or {}))
        if func in (Tensor.to, Tensor.type) and (narrow := asked & {*self.rounded}):
            args = (args[0].to(*narrow), *args[1:])
        if getattr(func, "__name__", "") == "_grouped_mm" and args[0].dim() < args[1].dim():
            return _grouped_mm(*args, **kwargs)
        return func(*args, **kwargs)


CASTS = {
    Tensor.float: torch.float32, Tensor.double: torch.float64,
    Tensor.half: torch.float16, Tensor.bfloat16: torch.bfloat16,
}  # fmt: skip


def _grouped_mm(
    x: Tensor, weights: Tensor, offs: Tensor, bias: None = None, out_dtype: Any = None
) -> Tensor:
    """The product of each group of rows with a weight of its own, which PyTorch lacks in float64.

    Rows after the last group are zeros.
    """
    if bias is not None:
        raise NotImplementedError("a bias of grouped_mm")
    ends = [0, *offs.tolist()]
    groups = [x[start:end] @ one for start, end, one in zip(ends, ends[1:], weights, strict=False)]
    return torch.cat([*groups, x.new_zeros(x.shape[0] - ends[-1], weights.shape[-1])])


def _to(x: Any, dtype: torch.dtype) -> Any:
    return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Within it, tensors are made in this dtype by default."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
