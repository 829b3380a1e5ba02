"""One form for the many spellings of an operation.

`canonical(node)` is a `Call` of a name and arguments, the same for a method, a function and an
operator, for a default that is written or not, for dimensions counted from either end. What it does
not know is None, and matches nothing.

A spelling is a Python function with the signature of what it stands for, so that Python binds the
arguments; a call that it cannot bind, or whose further arguments change the result, is unknown.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true


class Call(NamedTuple):
    """An operation: its arguments are nodes, other calls, constants, and tuples of those.

    Where one call stands for several nodes, `through` has those before the last.
    """

    op: str
    args: tuple[Any, ...]
    through: tuple[fx.Node, ...] = ()


COMMUTATIVE = {"add", "mul"}
# What gives its first argument again: the same elements, in the same dtype.
IDENTITY = "identity"

Spelling = Callable[..., "Call | None"]
FUNCTIONS: dict[Any, Spelling] = {}
METHODS: dict[str, Spelling] = {}


def value(argument: Any) -> Any:
    """What an argument was while the graph was traced: a tensor without data, or a number."""
    return argument.meta.get("example_value") if isinstance(argument, fx.Node) else argument


def canonical(node: Any) -> Call | None:
    if isinstance(node, Call):
        return node
    if not isinstance(node, fx.Node):
        return None
    if node.op == "call_function":
        spelling = FUNCTIONS.get(node.target)
    elif node.op == "call_method":
        spelling = METHODS.get(str(node.target))
    else:
        return None
    if spelling is None:
        return None
    try:
        return spelling(*node.args, **node.kwargs)
    except TypeError:
        return None


def same(a: Any, b: Any) -> bool:
    """Whether two constants, or two sizes, are known to be equal."""
    a, b = value(a), value(b)
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return a is b
    if isinstance(a, slice) and isinstance(b, slice):
        return same((a.start, a.stop, a.step), (b.start, b.stop, b.step))
    if isinstance(a, torch.SymFloat) or isinstance(b, torch.SymFloat):
        return _same_number(a, b)
    if isinstance(a, torch.SymInt) or isinstance(b, torch.SymInt):
        return a is b or (a is not None and b is not None and statically_known_true(a == b))
    return (
        type(a) in (int, float)
        and type(b) in (int, float)
        and a == b
        or a is b
        or (type(a) is type(b) and bool(a == b))
    )


def _same_number(a: Any, b: Any) -> bool:
    """Of numbers that Dynamo keeps symbolic with dynamic=True, math.pi among them. Where they are
    equal now, the compiled code is for equal ones, and compiled anew for others."""
    if not all(isinstance(one, (int, float, torch.SymFloat, torch.SymInt)) for one in (a, b)):
        return False
    hints = [one if isinstance(one, (int, float)) else one.node.hint for one in (a, b)]
    return None not in hints and hints[0] == hints[1] and bool(a == b)


def spelled(*targets: Any) -> Callable[[Spelling], Spelling]:
    """Declare what a spelling stands for: functions, and the names of methods."""

    def decorate(spelling: Spelling) -> Spelling:
        for target in targets:
            (METHODS if isinstance(target, str) else FUNCTIONS)[target] = spelling
        return spelling

    return decorate


def dimension(x: Any, dim: Any) -> Any:
    """A dimension of x counted from the end, so that -1 is always the last."""
    tensor = value(x)
    if isinstance(dim, int) and isinstance(tensor, Tensor):
        return dim - tensor.dim() if dim >= 0 else dim
    return dim


def _dimensions(x: Any, dim: Any) -> Any:
    if isinstance(dim, (tuple, list)):
        return tuple(sorted(dimension(x, d) for d in dim))
    return dim if dim is None else (dimension(x, dim),)


def _tuple(sizes: Any) -> Any:
    return tuple(sizes) if isinstance(sizes, (tuple, list)) else sizes


def _is_float32(x: Any) -> bool:
    tensor = value(x)
    return isinstance(tensor, Tensor) and tensor.dtype in (torch.float32, torch.float64)


def _calls(x: Any, op: str) -> Call | None:
    call = canonical(x)
    return call if call is not None and call.op == op else None


# Arithmetic


@spelled(operator.add, torch.add, "add", "__add__", "__radd__")
def _add(input: Any, other: Any, *, alpha: Any = 1) -> Call | None:
    return Call("add", (input, other)) if alpha == 1 else None


@spelled(operator.sub, torch.sub, torch.subtract, "sub", "subtract")
def _sub(input: Any, other: Any, *, alpha: Any = 1) -> Call | None:
    return Call("sub", (input, other)) if alpha == 1 else None


@spelled(operator.mul, torch.mul, torch.multiply, "mul", "multiply", "__mul__", "__rmul__")
def _mul(input: Any, other: Any) -> Call:
    if _alike(input, other):
        return Call("square", (input,))
    for a, b in ((input, other), (other, input)):
        # In a narrower dtype the sigmoid is rounded before the product, and silu's is not.
        if (gate := _calls(b, "sigmoid")) and _alike(gate.args[0], a) and _is_float32(a):
            return Call("silu", (a,), (b,))
    return Call("mul", (input, other))


def _alike(a: Any, b: Any) -> bool:
    """Whether two factors are one tensor, or the same cast of one."""
    a, b = _source(a), _source(b)
    if a is b:
        return isinstance(a, fx.Node)
    of, to = _calls(a, "cast"), _calls(b, "cast")
    if of is None or to is None or of.args[1] != to.args[1]:
        return False
    return _source(of.args[0]) is _source(to.args[0])


def _source(x: Any) -> Any:
    while identity := _calls(x, IDENTITY):
        x = identity.args[0]
    return x


@spelled(
    operator.truediv, torch.div, torch.divide, torch.true_divide, "div", "divide", "true_divide"
)
def _div(input: Any, other: Any, *, rounding_mode: Any = None) -> Call | None:
    if rounding_mode is not None:
        return None
    root = _calls(other, "sqrt")
    if root is not None and _is_float32(other):
        inverse = Call("rsqrt", root.args, (other,))
        return inverse if same(input, 1) else Call("mul", (input, inverse))
    return Call("div", (input, other))


@spelled(torch.reciprocal, "reciprocal")
def _reciprocal(input: Any) -> Call | None:
    return _div(1, input)


@spelled(operator.neg, torch.neg, torch.negative, "neg", "negative", "__neg__")
def _neg(input: Any) -> Call:
    return Call("neg", (input,))


@spelled(operator.pow, torch.pow, "pow", "__pow__")
def _pow(input: Any, exponent: Any) -> Call:
    if isinstance(exponent, (int, float)):
        if exponent == 2:
            return Call("square", (input,))
        if exponent == -0.5:
            return Call("rsqrt", (input,))
        if exponent == 0.5:
            return Call("sqrt", (input,))
    return Call("pow", (input, exponent))


@spelled(torch.square, "square")
def _square(input: Any) -> Call:
    return Call("square", (input,))


@spelled(torch.sqrt, "sqrt", math.sqrt)
def _sqrt(input: Any) -> Call:
    return Call("sqrt", (input,))


@spelled(torch.rsqrt, "rsqrt")
def _rsqrt(input: Any) -> Call:
    return Call("rsqrt", (input,))


@spelled(torch.tanh, F.tanh, "tanh")
def _tanh(input: Any) -> Call:
    return Call("tanh", (input,))


@spelled(torch.sigmoid, F.sigmoid, "sigmoid")
def _sigmoid(input: Any) -> Call:
    return Call("sigmoid", (input,))


@spelled(torch.clamp, torch.clip, "clamp", "clip")
def _clamp(input: Any, min: Any = None, max: Any = None) -> Call:
    return Call("clamp", (input, min, max))


@spelled(torch.mean, "mean")
def _mean(input: Any, dim: Any = None, keepdim: Any = False, *, dtype: Any = None) -> Call | None:
    if dtype is not None and not same(dtype, getattr(value(input), "dtype", None)):
        return None
    return Call("mean", (input, _dimensions(input, dim), bool(keepdim)))


@spelled(torch.var, "var")
def _var(
    input: Any,
    dim: Any = None,
    unbiased: Any = True,
    keepdim: Any = False,
    *,
    correction: Any = None,
) -> Call | None:
    correction = int(bool(unbiased)) if correction is None else correction
    return Call("var", (input, _dimensions(input, dim), correction, bool(keepdim)))


# Activations, norms, losses, matrix products: as torch.nn.functional has them


@spelled(F.silu)
def _silu(input: Any, inplace: Any = False) -> Call | None:
    return None if inplace else Call("silu", (input,))


@spelled(F.gelu, torch._C._nn.gelu)
def _gelu(input: Any, approximate: Any = "none") -> Call:
    return Call("gelu", (input, approximate))


@spelled(F.relu, torch.relu, "relu")
def _relu(input: Any, inplace: Any = False) -> Call | None:
    return None if inplace else Call("relu", (input,))


@spelled(F.dropout, torch.dropout)
def _dropout(input: Any, p: Any = 0.5, training: Any = True, inplace: Any = False) -> Call | None:
    return Call(IDENTITY, (input,)) if (p == 0 or not training) and not inplace else None


@spelled(F.rms_norm, torch.rms_norm)
def _rms_norm(input: Any, normalized_shape: Any, weight: Any = None, eps: Any = None) -> Call:
    return Call("rms_norm", (input, _tuple(normalized_shape), weight, eps))


@spelled(F.layer_norm, torch.layer_norm)
def _layer_norm(
    input: Any,
    normalized_shape: Any,
    weight: Any = None,
    bias: Any = None,
    eps: Any = 1e-5,
    cudnn_enable: Any = True,
) -> Call:
    return Call("layer_norm", (input, _tuple(normalized_shape), weight, bias, eps))


@spelled(F.group_norm, torch.group_norm)
def _group_norm(
    input: Any,
    num_groups: Any,
    weight: Any = None,
    bias: Any = None,
    eps: Any = 1e-5,
    cudnn_enabled: Any = True,
) -> Call:
    return Call("group_norm", (input, num_groups, weight, bias, eps))


@spelled(F.linear, torch._C._nn.linear)
def _linear(input: Any, weight: Any, bias: Any = None) -> Call:
    return Call("linear", (input, weight, bias))


@spelled(F.cross_entropy)
def _cross_entropy(
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: Any = -100,
    reduce: Any = None,
    reduction: Any = "mean",
    label_smoothing: Any = 0.0,
) -> Call | None:
    if size_average is not None or reduce is not None:
        return None
    return Call("cross_entropy", (input, target, weight, ignore_index, reduction, label_smoothing))


# Dtypes


def _cast(input: Any, dtype: Any) -> Call | None:
    dtype, tensor = value(dtype), value(input)
    if not isinstance(dtype, torch.dtype):
        return None
    if isinstance(tensor, Tensor) and tensor.dtype == dtype:
        return Call(IDENTITY, (input,))
    return Call("cast", (input, dtype))


@spelled("to")
def _to(input: Any, *args: Any, **kwargs: Any) -> Call | None:
    if kwargs.pop("memory_format", None) is not None:
        return None
    kwargs.pop("non_blocking", None)
    kwargs.pop("copy", None)
    dtype, device = kwargs.pop("dtype", None), kwargs.pop("device", None)
    if kwargs:
        return None
    for argument in args:
        known = value(argument)
        if isinstance(known, Tensor):
            dtype, device = known.dtype, known.device
        elif isinstance(known, torch.dtype):
            dtype = known
        elif isinstance(known, (str, torch.device)):
            device = known
    tensor = value(input)
    if device is not None:
        device = torch.device(value(device))
        if not isinstance(tensor, Tensor) or not _same_device(tensor.device, device):
            return None
    return Call(IDENTITY, (input,)) if dtype is None else _cast(input, dtype)


def _same_device(a: torch.device, b: torch.device) -> bool:
    # "cuda" names the current device, which the tensor was on while it was traced.
    return a.type == b.type and (a.index == b.index or b.index is None)


@spelled("type_as")
def _type_as(input: Any, other: Any) -> Call | None:
    tensor, like = value(input), value(other)
    if not isinstance(tensor, Tensor) or tensor.device != like.device:
        return None
    return _cast(input, like.dtype)


@spelled("type")
def _type(input: Any, dtype: Any) -> Call | None:
    return _cast(input, dtype)


for _name, _dtype in (
    ("float", torch.float32),
    ("double", torch.float64),
    ("half", torch.float16),
    ("bfloat16", torch.bfloat16),
):
    METHODS[_name] = lambda input, dtype=_dtype: _cast(input, dtype)


# Views


@spelled("contiguous")
def _contiguous(input: Any) -> Call:
    return Call("contiguous", (input,))


@spelled(torch.clone, "clone")
def _clone(input: Any, *, memory_format: Any = None) -> Call:
    # A copy, so that a write into it would not be one into its source: rewrites look for writes.
    return Call("contiguous", (input,))


@spelled(torch.reshape, "reshape", "view")
def _view(input: Any, *shape: Any, **named: Any) -> Call | None:
    shape = named.pop("shape", named.pop("size", shape))
    if named or (len(shape) == 1 and isinstance(value(shape[0]), torch.dtype)):
        return None
    if len(shape) == 1 and isinstance(value(shape[0]), (tuple, list)):
        return Call("view", (input, _tuple(shape[0])))
    return Call("view", (input, tuple(shape)))


@spelled(torch.flatten, "flatten")
def _flatten(input: Any, start_dim: Any = 0, end_dim: Any = -1) -> Call:
    return Call("flatten", (input, dimension(input, start_dim), dimension(input, end_dim)))


@spelled(torch.transpose, torch.swapaxes, torch.swapdims, "transpose", "swapaxes", "swapdims")
def _transpose(input: Any, dim0: Any, dim1: Any) -> Call:
    return Call("transpose", (input, _dimensions(input, (dim0, dim1))))


@spelled(torch.unsqueeze, "unsqueeze")
def _unsqueeze(input: Any, dim: Any) -> Call:
    tensor = value(input)
    if isinstance(dim, int) and dim >= 0 and isinstance(tensor, Tensor):
        dim -= tensor.dim() + 1
    return Call("unsqueeze", (input, dim))


@spelled("expand")
def _expand(input: Any, *sizes: Any) -> Call:
    if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)):
        sizes = tuple(sizes[0])
    return Call("expand", (input, tuple(sizes)))


@spelled(torch.repeat_interleave, "repeat_interleave")
def _repeat_interleave(input: Any, repeats: Any, dim: Any = None) -> Call:
    return Call("repeat_interleave", (input, repeats, dimension(input, dim)))


@spelled(torch.view_as_complex)
def _view_as_complex(input: Any) -> Call:
    return Call("view_as_complex", (input,))


@spelled(torch.view_as_real)
def _view_as_real(input: Any) -> Call:
    return Call("view_as_real", (input,))


@spelled(torch.cat, torch.concat, torch.concatenate)
def _cat(tensors: Any, dim: Any = 0) -> Call:
    dim = dimension(tensors[0], dim)
    whole = tuple(one for one in tensors if not _is_empty(one, dim))
    return Call(IDENTITY, whole) if len(whole) == 1 else Call("cat", (whole, dim))


def _is_empty(x: Any, dim: Any) -> bool:
    tensor = value(x)
    return isinstance(tensor, Tensor) and same(tensor.shape[dim], 0)


@spelled(torch.stack)
def _stack(tensors: Any, dim: Any = 0) -> Call:
    tensor = value(tensors[0])
    if isinstance(dim, int) and dim >= 0 and isinstance(tensor, Tensor):
        dim -= tensor.dim() + 1
    return Call("stack", (tuple(tensors), dim))


@spelled(torch.chunk, "chunk")
def _chunk(input: Any, chunks: Any, dim: Any = 0) -> Call:
    return Call("chunk", (input, chunks, dimension(input, dim)))


@spelled(torch.split, "split")
def _split(input: Any, split_size: Any, dim: Any = 0) -> Call:
    return Call("split", (input, split_size, dimension(input, dim)))


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
    if sum(part is None for part in parts) == 1 and all(
        part is None or (isinstance(part, slice) and part == slice(None)) for part in parts
    ):
        return Call("unsqueeze", (input, parts.index(None) - tensor.dim() - 1))
    return Call("getitem", (input, tuple(parts)))


def _part(parts: Any, index: Any) -> Call | None:
    """One of the pieces that a tensor is cut into, as a slice."""
    call = _calls(parts, "chunk") or _calls(parts, "split")
    if call is None or not isinstance(index, int):
        return None
    input, _, dim = call.args
    sizes = [piece.shape[dim] for piece in value(parts)]
    index %= len(sizes)
    return Call("slice", (input, dim, sum(sizes[:index]), sum(sizes[: index + 1]), 1), (parts,))


def _from_start(bound: Any, size: Any) -> Any:
    return size + bound if isinstance(bound, int) and bound < 0 else bound


def _is_full(part: slice, size: Any) -> bool:
    return (
        (part.start is None or same(part.start, 0))
        and (part.stop is None or same(part.stop, size))
        and (part.step is None or same(part.step, 1))
    )
