"""Views, copies, concatenation and splitting."""

from __future__ import annotations

import itertools
import operator
from typing import Any

import torch
from torch import Tensor, fx

from .call import (
    IDENTITY,
    Call,
    as_tuple,
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

# A copy differs from its source only after one is written in place, which rewrites check.
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
declared("flatten", "input start_dim=0 end_dim=-1", torch.flatten, "flatten")
spelled("repeat")(
    lambda input, *sizes: Call("repeat", (input, as_tuple(sizes[0]) if len(sizes) == 1 else sizes))
)


@spelled(torch.reshape, "reshape", "view")
def _view(input: Any, *shape: Any, **named: Any) -> Call | None:
    shape = named.pop("shape", named.pop("size", shape))
    if named or (len(shape) == 1 and isinstance(value(shape[0]), torch.dtype)):
        return None
    if len(shape) == 1 and isinstance(value(shape[0]), (tuple, list)):
        return Call("view", (input, as_tuple(shape[0])))
    return Call("view", (input, tuple(shape)))


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
    dims = named.pop("dims", dims)
    if len(dims) == 1 and isinstance(dims[0], (tuple, list)):
        dims = tuple(dims[0])
    if named or not all(isinstance(dim, int) for dim in dims):
        return None
    places = [dim - len(dims) if dim >= 0 else dim for dim in dims]
    moved = [place for place, dim in enumerate(places, start=-len(dims)) if place != dim]
    if not moved:
        return Call(IDENTITY, (input,))
    return Call("transpose", (input, tuple(moved))) if len(moved) == 2 else None


@spelled(torch.unsqueeze, "unsqueeze")
def _unsqueeze(input: Any, dim: Any) -> Call:
    tensor = value(input)
    if isinstance(dim, int) and dim >= 0 and isinstance(tensor, Tensor):
        dim -= tensor.dim() + 1
    return Call("unsqueeze", (input, dim))


@spelled(torch.squeeze, "squeeze")
def _squeeze(input: Any, dim: Any = None) -> Call | None:
    return Call("squeeze", (input, dimension(input, dim))) if isinstance(dim, int) else None


@spelled("expand")
def _expand(input: Any, *sizes: Any) -> Call:
    if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)):
        sizes = tuple(sizes[0])
    return Call("expand", (input, tuple(sizes)))


@spelled(torch.cat, torch.concat, torch.concatenate)
def _cat(tensors: Any, dim: Any = 0) -> Call | None:
    if not isinstance(tensors, (tuple, list)) or not all(is_tensor(one) for one in tensors):
        return None
    # torch.cat accepts a tensor of shape (0,) among those of more dimensions, as in a new cache.
    whole = [one for one in tensors if not same(tuple(value(one).shape), (0,))]
    if not whole:
        return None
    dim = dimension(whole[0], dim)
    whole = [one for one in whole if not same(value(one).shape[dim], 0)]
    if len(whole) == 1 and all(_changes_nothing(one, whole[0]) for one in tensors):
        return Call("contiguous", (whole[0],))
    return Call("cat", (tuple(whole), dim)) if len(whole) == len(tensors) else None


def _changes_nothing(empty: Any, x: Any) -> bool:
    """Whether x keeps its dtype and device when concatenated with an empty tensor."""
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
    return Call("slice", (input, dimension(input, dim), start, start + length, 1))


@spelled(operator.getitem)
def _getitem(input: Any, index: Any) -> Call | None:
    tensor = value(input)
    if not isinstance(tensor, Tensor):
        return _part(input, index) or Call("item", (input, index))
    parts = list(index) if isinstance(index, tuple) else [index]
    if any(isinstance(value(part), (Tensor, list, tuple, bool)) for part in parts):
        return None
    taken = sum(part is not None and part is not Ellipsis for part in parts)
    position = parts.index(Ellipsis) if Ellipsis in parts else len(parts)
    parts[position : position + 1] = [slice(None)] * (tensor.dim() - taken)
    if all(isinstance(part, slice) for part in parts):
        moved = [
            (i - tensor.dim(), part)
            for i, part in enumerate(parts)
            if not _is_full(part, tensor.shape[i])
        ]
        if not moved:
            return Call(IDENTITY, (input,))
        if len(moved) == 1:
            dim, part = moved[0]
            start = 0 if part.start is None else _from_start(part.start, tensor.shape[dim])
            stop = tensor.shape[dim]
            if part.stop is not None:
                stop = _from_start(part.stop, stop)
            step = 1 if part.step is None else part.step
            return Call("slice", (input, dim, start, stop, step))
    if all(part is None or _is_every(part) for part in parts):
        # Each unsqueeze is in the result of those before it.
        added = [i for i, part in enumerate(parts) if part is None]
        for dim, rank in zip(added, itertools.count(tensor.dim() + 1), strict=False):
            input = Call("unsqueeze", (input, dim - rank))
        return input
    chosen = [i for i, part in enumerate(parts) if not _is_every(part)]
    if len(chosen) == 1 and tensor.dim() == len(parts):
        group = _of_groups(input, chosen[0] - tensor.dim(), parts[chosen[0]])
        if group is not None:
            return group
    return Call("getitem", (input, tuple(parts)))


def _is_every(part: Any) -> bool:
    return isinstance(part, slice) and part == slice(None)


def _part(parts: Any, index: Any) -> Call | None:
    """One piece of a split tensor, as a slice."""
    if (call := calls(parts, "unbind")) is not None:
        grouped, dim = call.args
        return _of_groups(grouped, dim, index, (parts,))
    call = calls(parts, "chunk") or calls(parts, "split")
    if call is None or not isinstance(index, int):
        return None
    input, _, dim = call.args
    sizes = [piece.shape[dim] for piece in value(parts)]
    index %= len(sizes)
    return Call("slice", (input, dim, sum(sizes[:index]), sum(sizes[: index + 1]), 1), (parts,))


def _of_groups(
    grouped: Any, dim: Any, index: Any, through: tuple[fx.Node, ...] = ()
) -> Call | None:
    """x.view(*, n, s)[..., index], which is every s-th element of x's rows, as a slice, and
    x.view(*, s, n)[..., index, :], which is the elements from index * n on."""
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
    if not isinstance(bound, int) or bound >= 0:
        return bound
    return max(size + bound, 0) if isinstance(size, int) else size + bound


def _is_full(part: slice, size: Any) -> bool:
    return (
        (part.start is None or same(_from_start(part.start, size), 0))
        and (part.stop is None or same(part.stop, size))
        and (part.step is None or same(part.step, 1))
    )
