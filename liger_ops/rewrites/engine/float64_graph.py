"""Run a graph with all its floating-point arithmetic in a wider dtype.

A cast to a dtype in which a model computes or is stored rounds only because the model has this
dtype; in a wide run there is no such rounding. Any other cast to a narrower dtype, as in a
quantised model, belongs to what the model computes, and rounds in a wide run too.
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
    """Return a function that runs a graph in a wider dtype.

    Its results have the dtypes of the graph's own results.
    """
    (output,) = module.graph.find_nodes(op="output")
    examples = [value(x) for x in pytree.tree_leaves(output.args)]
    rounded = rounded_beside(dtypes_of(module, of_casts=False))

    def run(*inputs: Any) -> Any:
        cast = pytree.tree_map(lambda x: _to(x, dtype), inputs)
        with default_dtype(dtype), WiderArithmetic(dtype, rounded):
            results = pytree.tree_leaves(module(*cast))
        return tuple(
            _to(result, example.dtype) if isinstance(example, Tensor) else result
            for result, example in zip(results, examples, strict=True)
        )

    return run


def dtypes_of(module: fx.GraphModule, of_casts: bool = True) -> set[torch.dtype]:
    """Return the floating-point dtypes that a graph's inputs have or that it computes in.

    Without `of_casts`, only those that come from its inputs or from autocast, not from its casts: a
    node has a dtype that none of its inputs has.
    """
    nodes = [
        node
        for submodule in module.modules()
        if isinstance(submodule, fx.GraphModule)
        for node in submodule.graph.nodes
        if not calls(node, "cast")
    ]
    of_graph = set()
    for node in nodes:
        input_dtypes = set(map(dtype_of, node.all_input_nodes))
        dtypes = {dtype_of(x) for x in pytree.tree_leaves([value(node)])}
        of_graph |= dtypes if of_casts else dtypes - input_dtypes
    return {dtype for dtype in of_graph if dtype is not None and has_arithmetic(dtype)}


def rounded_beside(own: Collection[torch.dtype]) -> set[torch.dtype]:
    """Return the dtypes to which a model of the dtypes `own` rounds only where its code casts."""
    return {dtype for dtype in NARROW if not any(represents(dtype, source) for source in own)}


class WiderArithmetic(TorchFunctionMode):
    """Replace every floating-point dtype with arithmetic that code asks for by a wider one.

    A cast to a dtype in `rounded` rounds to that first.
    """

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
    """Multiply each group of rows by its own weight; rows after the last group are zeros.

    It stands in for torch._grouped_mm, which PyTorch lacks in float64.
    """
    if bias is not None:
        raise NotImplementedError("a bias of grouped_mm")
    ends = [0, *offs.tolist()]
    groups = [x[start:end] @ w for start, end, w in zip(ends, ends[1:], weights, strict=False)]
    return torch.cat([*groups, x.new_zeros(x.shape[0] - ends[-1], weights.shape[-1])])


def _to(x: Any, dtype: torch.dtype) -> Any:
    return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Set PyTorch's default dtype within the context."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
