"""Run a graph with all its floating-point arithmetic in a wider dtype."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from .canonical import value


def widened(dtype: torch.dtype, module: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
    """A graph that computes in a wider dtype and returns results in their original dtypes."""
    (output,) = module.graph.find_nodes(op="output")
    examples = [value(one) for one in pytree.tree_leaves(output.args)]

    def run(*inputs: Any) -> Any:
        cast = pytree.tree_map(lambda x: _to(x, dtype), inputs)
        with default_dtype(dtype), InWider(dtype):
            results = pytree.tree_leaves(module(*cast))
        return tuple(
            _to(result, example.dtype) if isinstance(example, Tensor) else result
            for result, example in zip(results, examples, strict=True)
        )

    return run


class InWider(TorchFunctionMode):
    """Replace every floating-point dtype that code asks for by a wider one."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def widen(value: Any) -> Any:
            is_float = isinstance(value, torch.dtype) and value.is_floating_point
            return self.dtype if is_float else value

        if func in (Tensor.float, Tensor.half, Tensor.bfloat16, Tensor.double):
            return args[0].to(self.dtype)
        args, kwargs = pytree.tree_map(widen, (tuple(args), kwargs or {}))
        if getattr(func, "__name__", "") == "_grouped_mm" and args[0].dim() < args[1].dim():
            return _grouped_mm(*args, **kwargs)
        return func(*args, **kwargs)


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
