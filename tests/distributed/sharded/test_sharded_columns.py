"""Norms and softmax whose columns are sharded: the numbers of one process, by moving statistics."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta

import liger_ops
import ranks
from column_shards import backward, compare, forward, leaves, outcome, over_columns
from liger_ops.distributed.dtensor.columns import SHARDED_COLUMNS
from ranks import recorded

pytestmark = pytest.mark.device_kernels

SECONDS = 180
ROWS = 6
# The all-reduces of the forward and of the backward, each of a number in float32 for every row.
STATISTICS = {
    "rms_norm": (1, 2),
    "fused_add_rms_norm": (1, 2),
    "gated_rms_norm": (1, 2),
    "layer_norm": (2, 4),
    "modulated_rms_norm": (1, 2),
    "modulated_layer_norm": (2, 4),
    # Three powers of x.
    "poly_norm": (3, 6),
    "softmax": (2, 1),
    "log_softmax": (2, 1),
    # The scores and the rows' squares, and the gradient of each.
    "attn_res": (2, 4),
}


def test_two_devices(tmp_path: Path) -> None:
    checks = [
        only_statistics_move,
        half_precision_rounds_as_on_one_device,
        columns_may_be_uneven_or_none,
        infinities_are_those_of_the_whole_row,
        compiled,
    ]
    assert not ranks.failures(checks, 2, tmp_path, SECONDS)


def test_columns_on_two_dimensions_of_a_mesh(tmp_path: Path) -> None:
    assert not ranks.failures([on_a_square, sharded_from_right_to_left], 4, tmp_path, SECONDS)


def tensors_of(op: str, N: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Tensors to call an op with, each of which ends with the columns; poly_norm has weights of
    powers, which do not."""
    torch.manual_seed(0)
    shapes: dict[str, list[tuple[int, ...]]] = {
        "fused_add_rms_norm": [(ROWS, N), (ROWS, N), (N,)],
        "gated_rms_norm": [(ROWS, N), (ROWS, N), (N,)],
        "layer_norm": [(ROWS, N), (N,), (N,)],
        "modulated_rms_norm": [(2, 3, N), (2, N), (2, N), (N,)],
        "modulated_layer_norm": [(2, 3, N), (2, N), (2, N), (N,), (N,)],
        "poly_norm": [(ROWS, N), (3,)],
        "softmax": [(ROWS, N)],
        "log_softmax": [(ROWS, N)],
        "attn_res": [(2, 3, N), (N,), (N,)],
    }
    # A mean that is far from 0, as the statistics of two devices' columns are combined.
    return [torch.randn(s, dtype=dtype) + 3 for s in shapes.get(op, [(ROWS, N), (N,)])]


def only_statistics_move() -> None:
    assert set(STATISTICS) == set(SHARDED_COLUMNS)
    mesh = ranks.mesh()
    for op, counts in STATISTICS.items():
        tensors = tensors_of(op, 33)
        given = over_columns(tensors, mesh)
        results, of_forward = recorded(lambda: forward(op, given, {}))  # noqa: B023
        gradients, of_backward = recorded(lambda: backward(results, given))  # noqa: B023
        statistic = [("all_reduce", ROWS * 4)]
        assert of_forward == statistic * counts[0], (op, of_forward)
        assert of_backward == statistic * counts[1], (op, of_backward)
        for result in results:
            assert result.placements == (Shard(result.dim() - 1),), op
        for one, gradient in zip(given, gradients, strict=True):
            if op != "poly_norm":
                assert gradient.placements == one.placements, op
        compare([*results, *gradients], outcome(op, leaves(tensors)), 1e-4)
        with torch.inference_mode():
            inferred, moved = recorded(lambda: forward(op, given, {}))  # noqa: B023
            assert moved == of_forward, (op, moved)
        for result, value in zip(results, inferred, strict=True):
            assert value.is_inference() and value.placements == result.placements
            assert value.to_local().equal(result.to_local())


def half_precision_rounds_as_on_one_device() -> None:
    mesh = ranks.mesh()
    for mode in ("llama", "gemma", "none"):
        options = {"casting_mode": mode, "offset": 1.0}
        tensors = tensors_of("rms_norm", 33, torch.bfloat16)
        found = forward("rms_norm", over_columns(tensors, mesh), options)
        expected = forward("rms_norm", leaves(tensors), options)
        # The sum over two devices has another order: a result at a tie may round the other way.
        compare(list(found), list(expected), 2**-7)
        assert (found[0].full_tensor() == expected[0]).float().mean() > 0.9
        found, expected = (
            outcome("rms_norm", one, **options)
            for one in (over_columns(tensors, mesh), leaves(tensors))
        )
        compare(found, expected, 2**-6)


def columns_may_be_uneven_or_none() -> None:
    mesh = ranks.mesh()
    for op in STATISTICS:
        for N in (1, 7):
            tensors = tensors_of(op, N, torch.float64)
            given = over_columns(tensors, mesh)
            compare(outcome(op, given), outcome(op, leaves(tensors)), 1e-9)
            # Parameters that every device has whole.
            whole = over_columns(
                tensors, mesh,
                lambda t, x=tensors[0]: [Shard(x.dim() - 1) if t.shape == x.shape else Replicate()],
            )  # fmt: skip
            compare(outcome(op, whole), outcome(op, leaves(tensors)), 1e-9)


def infinities_are_those_of_the_whole_row() -> None:
    mesh = ranks.mesh()
    x = torch.randn(4, 6)
    x[0, :3] = -torch.inf
    x[1] = -torch.inf
    x[2, 4] = torch.inf
    x[3, 1] = torch.nan
    for function in (liger_ops.softmax, liger_ops.log_softmax):
        compare([function(distribute_tensor(x, mesh, [Shard(1)]))], [function(x)])


def compiled() -> None:
    """A graph for all sizes, which has a device's columns, and collectives of statistics."""
    mesh = ranks.mesh()
    # The op, its options, the columns and the collectives.
    cases: list[tuple[str, dict[str, Any], int, tuple[int, int]]] = [
        ("softmax", {}, 33, STATISTICS["softmax"]),
        ("gated_rms_norm", {"group_size": 8}, 32, (0, 0)),
        ("gated_rms_norm", {"group_size": 8}, 24, STATISTICS["gated_rms_norm"]),
    ]
    for op, options, N, counts in cases:
        found = []

        def count(graph: Any, _: Any, found: list[int] = found) -> Any:
            collectives = [n for n in graph.graph.nodes if "_c10d_functional" in str(n.target)]
            # Statistics, not columns.
            assert all(n.meta["val"].shape[-1] == 1 for n in collectives)
            found.append(sum("all_reduce" in str(n.target) for n in collectives))
            return make_boxed_func(graph)

        torch.compiler.reset()
        function = torch.compile(
            partial(getattr(liger_ops, op), **options),
            backend=aot_autograd(fw_compiler=count), fullgraph=True, dynamic=True,
        )  # fmt: skip
        for rows in (ROWS, 11):
            tensors = [t if t.dim() == 1 else torch.randn(rows, N) for t in tensors_of(op, N)]
            given = over_columns(tensors, mesh)
            results = (function(*given),)
            # PyTorch 2.11 gives DTensors of graphs with symbolic sizes wrong strides, x.sin() too.
            compare(
                [*results, *backward(results, given)], outcome(op, leaves(tensors), **options),
                1e-4, strides=torch.__version__ >= "2.13",
            )  # fmt: skip
        assert tuple(found) == counts, (op, options)
        if op == "softmax":
            with torch.inference_mode():
                assert function(*given).to_local().equal(results[0].to_local())
            assert tuple(found) == (*counts, counts[0])


def on_a_square() -> None:
    mesh = ranks.mesh(2, 2)
    ways: list[Callable[[int], list[Any]]] = [
        lambda last: [Shard(0), Shard(last)],
        lambda last: [Shard(last), Shard(last)],
        lambda last: [Shard(last), Replicate()],
    ]
    for op in ("layer_norm", "softmax"):
        tensors = tensors_of(op, 9, torch.float64)
        expected = outcome(op, leaves(tensors))
        for way in ways:
            given = over_columns(
                tensors, mesh,
                lambda t, way=way: way(1) if t.dim() == 2 else [Replicate(), Shard(0)],
            )  # fmt: skip
            compare(outcome(op, given), expected, 1e-9)


def sharded_from_right_to_left() -> None:
    """Placements do not tell the order in which the dimensions of a mesh share columns."""
    mesh = ranks.mesh(2, 2)
    x, weight = torch.randn(ROWS, 8), torch.randn(8)
    first, second = mesh.get_coordinate()
    order = (ShardOrderEntry(tensor_dim=1, mesh_dims=(1, 0)),)
    meta = TensorMeta(x.shape, x.stride(), x.dtype)
    spec = DTensorSpec(mesh, (Shard(1), Shard(1)), meta, shard_order=order)
    given = DTensor(
        x.chunk(2, 1)[second].chunk(2, 1)[first].contiguous(), spec, requires_grad=False
    )
    weights = distribute_tensor(weight, mesh, [Shard(0), Shard(0)])
    compare([liger_ops.rms_norm(given, weights)], [liger_ops.rms_norm(x, weight)])
