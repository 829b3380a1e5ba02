"""Memory that nodes write to, for every function of torch.nn.functional and method of a tensor.

The truth is what a real call changes: the data, sizes, strides or version of an argument. The
arguments of calls are found by trying every combination of a few values, and every option with
another value than its default, by its name and by its position.
"""

from __future__ import annotations

import inspect
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from liger_ops.rewrites.engine.effects import ANYWHERE, memory, written

Call = tuple[tuple[Any, ...], dict[str, Any]]


VALUES = {
    "matrix": torch.linspace(-0.5, 0.5, 9).reshape(3, 3),
    "vector": torch.tensor([1.5, 0.5, 1.0]),
    "batch": torch.linspace(-0.5, 0.5, 96).reshape(2, 3, 4, 4),
    "index": torch.tensor([[0, 2, 1]]),
    "mask": torch.eye(3, dtype=torch.bool),
    "number": 0.25,
    "integer": 0,
    "sizes": (3, 3),
}
FIRST = ("matrix", "batch", "index", "vector", "mask")


def accepted(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    try:
        with torch.no_grad():
            return function(*args, **kwargs) is not NotImplemented
    except Exception:
        return False


def copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def chosen(names: Sequence[str]) -> tuple[Any, ...]:
    return tuple(copied(VALUES[name]) for name in names)


def calls(function: Callable[..., Any], most: int) -> Iterator[Call]:
    """Calls that `function` accepts: the first with each number of arguments, and its options."""
    for count in range(most):
        for names in itertools.product(FIRST, *[VALUES] * count):
            if accepted(function, chosen(names), {}):
                yield chosen(names), {}
                yield from with_options(function, names)
                break


def with_options(function: Callable[..., Any], names: Sequence[str]) -> Iterator[Call]:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:
        parameters = []
    for place, one in enumerate(parameters[len(names) :], start=len(names)):
        if one.default is inspect.Parameter.empty:
            continue
        other: Any = not one.default if isinstance(one.default, bool) else 0.25
        if one.name == "out":
            other = torch.zeros(3, 3)
        defaults = [before.default for before in parameters[len(names) : place]]
        for more, kwargs in (([], {one.name: other}), ([*defaults, other], {})):
            if accepted(function, (*chosen(names), *more), kwargs):
                yield (*chosen(names), *more), kwargs


def truly_written(function: Callable[..., Any], call: Call) -> list[int] | None:
    """The places of tensors that a call changes, among those of its arguments."""
    tensors = [one for one in pytree.tree_leaves(call) if isinstance(one, Tensor)]
    before = [(one.clone(), one._version, one.stride()) for one in tensors]
    if not accepted(function, *call):
        return None
    return [
        place
        for place, (one, (data, version, stride)) in enumerate(zip(tensors, before, strict=True))
        if one._version != version
        or (one.shape, one.stride()) != (data.shape, stride)
        or not torch.equal(one.nan_to_num(), data.nan_to_num())
    ]


def found_written(target: Any, call: Call) -> list[int] | None:
    """The places of tensors that `written` names; None if it may be any memory."""
    graph = fx.Graph()
    shapes = ShapeEnv(allow_dynamic_output_shape_ops=True, allow_scalar_outputs=True)
    nodes = []
    with FakeTensorMode(shape_env=shapes) as mode:

        def as_node(one: Any) -> Any:
            if not isinstance(one, Tensor):
                return one
            nodes.append(graph.placeholder(f"x{len(nodes)}"))
            nodes[-1].meta["example_value"] = mode.from_tensor(one, static_shapes=True)
            return nodes[-1]

        args, kwargs = pytree.tree_map(as_node, call)
    kind = "call_method" if isinstance(target, str) else "call_function"
    keys = written(graph.create_node(kind, target, args, kwargs))
    return None if ANYWHERE in keys else [i for i, one in enumerate(nodes) if memory([one]) & keys]


# What the search does not find: calls with more than three arguments, and of other kinds.
MATRIX, PLACES, CUBE = VALUES["matrix"], torch.tensor([0, 2, 1]), torch.zeros(3, 3, 3)
INDEX, VECTOR, BATCH = (VALUES[name] for name in ("index", "vector", "batch"))
FURTHER: dict[str, tuple[Any, ...]] = {
    "__setitem__": (MATRIX, 0, 0.25),
    "addbmm_": (MATRIX, CUBE, CUBE),
    "alpha_dropout_": (MATRIX, 0.5, True),
    "baddbmm_": (CUBE, CUBE, CUBE),
    "dropout_": (MATRIX, 0.5, True),
    "feature_alpha_dropout_": (BATCH, 0.5, True),
    "feature_dropout_": (BATCH, 0.5, True),
    "float_power_": (VECTOR.double(), 2),
    "index_add_": (MATRIX, 0, PLACES, MATRIX + 1),
    "index_copy_": (MATRIX, 0, PLACES, MATRIX + 1),
    "index_fill_": (MATRIX, 0, PLACES, 0.25),
    "index_put_": (MATRIX, (PLACES,), VECTOR),
    "index_reduce_": (MATRIX, 0, PLACES, MATRIX, "mean"),
    "map_": (MATRIX, MATRIX + 1, lambda a, b: b),
    "mvlgamma_": (VECTOR, 1),
    "embedding_renorm_": (MATRIX, PLACES, 0.1, 2.0),
    "renorm_": (MATRIX, 2, 0, 0.1),
    "resize_as_": (MATRIX, VECTOR),
    "scatter_": (MATRIX, 0, INDEX, MATRIX + 1),
    "scatter_add_": (MATRIX, 0, INDEX, MATRIX + 1),
    "scatter_reduce_": (MATRIX, 0, INDEX, MATRIX, "sum"),
}

# These change an argument that they cannot name: sparse tensors, and where data is. The last is
# for scaled float8 tensors (torch 2.15).
NEVER_IN_A_GRAPH = {
    *("apply_", "map2_", "resize_as_sparse_", "share_memory_"),
    *("rename_", "sparse_resize_", "sparse_resize_and_clear_", "scaled_addmm_"),
}
# Their results depend on data, so that Dynamo ends the graph.
BY_DATA = {"__array__", "__contains__", "allclose", "contains", "equal", "numpy", "slice_inverse"}
BY_DATA |= {"nanquantile", "quantile"}  # in torch 2.11
BY_DATA |= {"corrcoef", "cov", "gaussian_nll_loss", "map_", "one_hot", "to_mkldnn", "share_memory_"}
# Schemas say that they may write where these calls do not, and `detach_` changes no data.
MAY_WRITE = {"detach_", "resize_as_", "set_"}


def public(owner: Any) -> list[str]:
    return [one for one in dir(owner) if one[0] != "_" and inspect.isroutine(getattr(owner, one))]


def method(name: str) -> Callable[..., Any]:
    return lambda x, *args: getattr(x, name)(*args)


DUNDER = [one for one in dir(Tensor) if one[:3] == "__i" and one[-2:] == "__"]
FUNCTIONS: dict[str, dict[str, tuple[Callable[..., Any], Any]]] = {
    "functional": {name: (getattr(F, name), getattr(F, name)) for name in public(F)},
    "methods": {name: (method(name), name) for name in (*public(Tensor), *DUNDER, "__setitem__")},
    "torch": {
        name: (getattr(torch, name), getattr(torch, name))
        for name in public(torch)
        if name[-1] == "_"
    },
    "operators": {
        name: (getattr(operator, name), getattr(operator, name)) for name in public(operator)
    },
}


@pytest.mark.parametrize("of", FUNCTIONS)
def test_no_write_is_missed_and_none_is_made_up(of):
    missed, made_up, unknown, writers = [], [], set(), set()
    for name, (function, target) in FUNCTIONS[of].items():
        # Only methods in place are looked for with several arguments: the others do not write.
        most = 2 if of == "methods" and name[-1] != "_" else 3
        further = [(FURTHER[name], {})] if name in FURTHER else []
        for call in itertools.chain(calls(function, most), further):
            given = pytree.tree_map(copied, call)
            found = found_written(target, given)
            truth = truly_written(function, given)
            if found is None:
                unknown.add(name)
                continue
            if truth:
                writers.add(name)
            if not set(truth or ()) <= set(found):
                missed.append((name, call))
            elif set(found) - set(truth or ()):
                made_up.append(name)
    assert missed == []
    assert set(made_up) <= MAY_WRITE
    assert unknown <= BY_DATA | {"resize_", "resize_as_"}
    in_place = {one for one in FUNCTIONS[of] if one[-1] == "_" != one[0]} - {*dir(operator)}
    assert in_place - writers - unknown <= NEVER_IN_A_GRAPH | MAY_WRITE | {"requires_grad_"}
    assert len(writers) >= 12


def out_of(function: Callable[..., Any], *args: Any) -> list[int] | None:
    return found_written(function, (args, {"out": torch.zeros(3, 3)}))


def test_out_is_written():
    for function in (torch.add, torch.matmul, torch.mul):
        assert out_of(function, MATRIX, MATRIX) == [2]
    for function in (F.normalize, torch.exp, torch.triu):
        assert out_of(function, MATRIX) == [1]


def test_calls_of_other_dtypes_are_known_apart():
    """`detach_` takes the gradients of a tensor that may have some."""
    for dtype, places in ((torch.int64, []), (torch.float32, [0]), (torch.int64, [])):
        assert found_written("detach_", ((torch.ones(7, dtype=dtype),), {})) == places
