"""Views, copies, concatenation and splitting."""

from __future__ import annotations

import itertools
import math
import operator
from typing import Any

import torch
from torch import Tensor, fx

from .call import (
    IDENTITY,
    Call,
    calls,
    declared,
    dimension,
    dimensions,
    is_real,
    is_tensor,
    same,
    spelled,
    value,
)

# A copy has the same canonical form as its source in other strides. It differs from the source only
# once one of them is written in place, which rewrites check.
declared("contiguous", "input memory_format?=None", torch.clone, "clone")
declared("contiguous", "input", "contiguous")
declared("view_as_complex", "input", torch.view_as_complex)
declared("view_as_real", "input", torch.view_as_real)
declared(
    "repeat_interleave", "input repeats dim=None", torch.repeat_interleave, "repeat_interleave"
)
declared("unbind", "input dim=0", torch.unbind, "unbind")
declared("chunk", "input chunks dim=0", torch.chunk, "chunk")
declared("split", "input split_size dim=0", torch.split, "split")
declared("detach", "input", torch.detach, "detach")


def _listed(items: tuple[Any, ...], named: dict[str, Any], *names: str) -> Any:
    """Return sizes or dimensions that are arguments one by one, or one sequence, also by name.

    Raises TypeError for another named argument.
    """
    if named:
        name, *others = named
        if others or name not in names:
            raise TypeError(f"unknown arguments {sorted(named)}")
        items = named[name]
    if len(items) == 1 and isinstance(value(items[0]), (tuple, list)):
        items = items[0]
    return tuple(items) if isinstance(items, list) else items


@spelled(torch.tile, "tile", "repeat")
def _repeat(input: Any, *counts: Any, **named: Any) -> Call:
    # Where `repeat` accepts fewer counts than dimensions, none, `tile` counts from the last.
    return Call("repeat", (input, _listed(counts, named, "repeats", "dims")))


@spelled(torch.reshape, "reshape", "view")
def _view(input: Any, *sizes: Any, **named: Any) -> Call | None:
    shape = _listed(sizes, named, "shape", "size")
    # x.view(dtype) reads the bytes anew.
    if shape == sizes and len(shape) == 1 and isinstance(value(shape[0]), torch.dtype):
        return None
    return Call("view", (input, shape))


@spelled(torch.flatten, "flatten")
def _flatten(input: Any, start_dim: Any = 0, end_dim: Any = -1) -> Call | None:
    tensor = value(input)
    if not isinstance(tensor, Tensor):
        return None
    shape = tuple(tensor.shape) or (1,)
    first, last = start_dim % len(shape), end_dim % len(shape)
    return Call(
        "view", (input, (*shape[:first], math.prod(shape[first : last + 1]), *shape[last + 1 :]))
    )


@spelled(torch.unflatten, "unflatten")
def _unflatten(input: Any, dim: Any, sizes: Any) -> Call | None:
    tensor = value(input)
    if not isinstance(dim, int) or not isinstance(tensor, Tensor):
        return None
    shape = list(tensor.shape)
    shape[dim : dim + 1 or None] = sizes
    return Call("view", (input, tuple(shape)))


@spelled(torch.transpose, torch.swapaxes, torch.swapdims, "transpose", "swapaxes", "swapdims")
def _transpose(input: Any, dim0: Any, dim1: Any) -> Call:
    return Call("transpose", (input, dimensions(input, (dim0, dim1))))


@spelled(torch.t, "t", "T")
def _t(input: Any) -> Call | None:
    return _matrix_transpose(input) if is_tensor(input, dim=2) else None


@spelled("mT")
def _matrix_transpose(input: Any) -> Call | None:
    return Call("transpose", (input, (-2, -1))) if is_tensor(input) else None


@spelled(torch.adjoint, "adjoint", "mH", "H")
def _adjoint(input: Any) -> Call | None:
    return _matrix_transpose(input) if is_real(input) else None


@spelled(torch.real, "real")
def _real(input: Any) -> Call | None:
    return Call(IDENTITY, (input,)) if is_real(input) else None


@spelled(torch.permute, "permute")
def _permute(input: Any, *dims: Any, **named: Any) -> Call | None:
    dims = _listed(dims, named, "dims")
    if not all(isinstance(dim, int) for dim in dims):
        return None
    from_end = tuple(dim - len(dims) if dim >= 0 else dim for dim in dims)
    moved = [new for new, old in enumerate(from_end, start=-len(dims)) if new != old]
    if not moved:
        return Call(IDENTITY, (input,))
    if len(moved) == 2:
        return Call("transpose", (input, tuple(moved)))
    return Call("permute", (input, from_end))


@spelled(torch.unsqueeze, "unsqueeze")
def _unsqueeze(input: Any, dim: Any) -> Call:
    tensor = value(input)
    if isinstance(dim, int) and dim >= 0 and isinstance(tensor, Tensor):
        dim -= tensor.dim() + 1
    return Call("unsqueeze", (input, dim))


@spelled(torch.squeeze, "squeeze")
def _squeeze(input: Any, dim: Any = None) -> Call | None:
    if isinstance(dim, int):
        return Call("squeeze", (input, dimension(input, dim)))
    if not is_tensor(input):
        return None
    shape = value(input).shape
    among = range(-len(shape), 0) if dim is None else dimensions(input, dim)
    kept = [axis for axis in range(-len(shape), 0) if axis not in among or not same(shape[axis], 1)]
    return Call("view", (input, tuple(shape[axis] for axis in kept)))


@spelled(torch.broadcast_to, "expand", "broadcast_to")
def _expand(input: Any, *sizes: Any, **named: Any) -> Call:
    return Call("expand", (input, _listed(sizes, named, "size")))


@spelled("expand_as")
def _expand_as(input: Any, other: Any) -> Call:
    return Call("expand", (input, tuple(value(other).shape)))


@spelled(torch.cat, torch.concat, torch.concatenate)
def _cat(tensors: Any, dim: Any = 0) -> Call | None:
    if not isinstance(tensors, (tuple, list)) or not all(is_tensor(x) for x in tensors):
        return None
    # torch.cat accepts a tensor of shape (0,) among those of more dimensions, as in a new cache.
    filled = [x for x in tensors if not same(tuple(value(x).shape), (0,))]
    if not filled:
        return None
    dim = dimension(filled[0], dim)
    filled = [x for x in filled if not same(value(x).shape[dim], 0)]
    if len(filled) == 1 and all(_keeps_dtype_and_device(x, filled[0]) for x in tensors):
        return Call("contiguous", (filled[0],))
    return Call("cat", (tuple(filled), dim)) if len(filled) == len(tensors) else None


def _keeps_dtype_and_device(empty: Any, x: Any) -> bool:
    """Return whether x keeps its dtype and device when concatenated with an empty tensor."""
    a, b = value(empty), value(x)
    return bool(a.device == b.device and torch.promote_types(a.dtype, b.dtype) == b.dtype)


@spelled(torch.stack)
def _stack(tensors: Any, dim: Any = 0) -> Call:
    tensor = value(tensors[0])
    if isinstance(dim, int) and dim >= 0 and isinstance(tensor, Tensor):
        dim -= tensor.dim() + 1
    return Call("stack", (tuple(tensors), dim))


@spelled(torch.narrow, "narrow")
def _narrow(input: Any, dim: Any, start: Any, length: Any) -> Call | None:
    if isinstance(value(start), Tensor):
        return None
    dim = dimension(input, dim)
    start = _from_start(start, value(input).shape[dim])
    return Call("slice", (input, dim, start, start + length, 1))


@spelled(operator.getitem)
def _getitem(input: Any, index: Any) -> Call | None:
    tensor = value(input)
    if not isinstance(tensor, Tensor):
        return _piece(input, index) or Call("item", (input, index))
    indices = list(index) if isinstance(index, tuple) else [index]
    numbers = [value(i) for i in indices if not isinstance(i, slice)]
    if any(isinstance(i, (Tensor, list, tuple, bool)) for i in numbers):
        return None
    # Replace the ellipsis, written or implied at the end, by a full slice for each dimension.
    taken = len(indices) - indices.count(None) - indices.count(Ellipsis)
    position = indices.index(Ellipsis) if Ellipsis in indices else len(indices)
    indices[position : position + 1] = [slice(None)] * (tensor.dim() - taken)
    if all(isinstance(i, slice) for i in indices):
        narrowed = [
            (dim - tensor.dim(), i)
            for dim, i in enumerate(indices)
            if not _takes_all(i, tensor.shape[dim])
        ]
        if not narrowed:
            return Call(IDENTITY, (input,))
        if len(narrowed) == 1:
            dim, i = narrowed[0]
            start = 0 if i.start is None else _from_start(i.start, tensor.shape[dim])
            stop = tensor.shape[dim]
            if i.stop is not None:
                stop = _from_start(i.stop, stop)
            step = 1 if i.step is None else i.step
            return Call("slice", (input, dim, start, stop, step))
    if all(i is None or _is_whole_slice(i) for i in indices):
        # The n-th unsqueeze has a result of n dimensions more than x, from whose end its dimension
        # is counted.
        added = [dim for dim, i in enumerate(indices) if i is None]
        for dim, rank in zip(added, itertools.count(tensor.dim() + 1), strict=False):
            input = Call("unsqueeze", (input, dim - rank))
        return input
    indexed = [dim for dim, i in enumerate(indices) if not _is_whole_slice(i)]
    if len(indexed) == 1 and tensor.dim() == len(indices):
        group = _group(input, indexed[0] - tensor.dim(), indices[indexed[0]])
        if group is not None:
            return group
    return Call("getitem", (input, tuple(indices)))


def _is_whole_slice(index: Any) -> bool:
    return isinstance(index, slice) and index == slice(None)


def _piece(pieces: Any, index: Any) -> Call | None:
    """Return one piece of a split tensor as a slice of the tensor."""
    if (call := calls(pieces, "unbind")) is not None:
        grouped, dim = call.args
        return _group(grouped, dim, index, (pieces,))
    call = calls(pieces, "chunk") or calls(pieces, "split")
    if call is None or not isinstance(index, int):
        return None
    input, _, dim = call.args
    sizes = [piece.shape[dim] for piece in value(pieces)]
    index %= len(sizes)
    return Call("slice", (input, dim, sum(sizes[:index]), sum(sizes[: index + 1]), 1), (pieces,))


def _group(grouped: Any, dim: Any, index: Any, through: tuple[fx.Node, ...] = ()) -> Call | None:
    """Return one of the groups that a view splits the rows of x into, as a slice of x.

    x.view(*, n, s)[..., index] is every s-th element of a row, and x.view(*, s, n)[..., index, :]
    is n elements from index * n on. None for other views.
    """
    view = calls(grouped, "view")
    if view is None or dim not in (-1, -2) or not isinstance(index, int):
        return None
    *rows, groups, step = value(grouped).shape
    x = view.args[0]
    size = value(x).shape[-1]
    if not same((*rows, size), tuple(value(x).shape)):
        return None
    through = (*through, grouped)
    if dim == -1:
        return Call("slice", (x, -1, index % step, size, step), through)
    start = index % groups * step
    return Call("slice", (x, -1, start, start + step, 1), through)


@spelled(torch.select, "select")
def _select(input: Any, dim: Any, index: Any) -> Call | None:
    tensor = value(input)
    if not isinstance(dim, int) or not isinstance(tensor, Tensor):
        return None
    index = tuple(index if i == dim % tensor.dim() else slice(None) for i in range(tensor.dim()))
    return _getitem(input, index)


def _from_start(bound: Any, size: Any) -> Any:
    """Return a bound of a slice counted from the start; a symbolic one is taken as it is."""
    if not isinstance(bound, int) or bound >= 0:
        return bound
    return max(size + bound, 0) if isinstance(size, int) else size + bound


def _takes_all(index: slice, size: Any) -> bool:
    """Return whether a slice takes all elements of a dimension of this size."""
    return (
        (index.start is None or same(_from_start(index.start, size), 0))
        and (index.stop is None or same(index.stop, size))
        and (index.step is None or same(index.step, 1))
    )
