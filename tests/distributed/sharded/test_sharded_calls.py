"""Calls whose DTensors cannot be brought together are refused; unusual placements are not."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.placement_types import _StridedShard

import liger_ops
import ranks

pytestmark = pytest.mark.device_kernels

SECONDS = 180
Call = tuple[Callable[..., Any], tuple[Any, ...]]


def test_two_devices(tmp_path: Path) -> None:
    checks = [refused, what_is_replicated_is_taken, every_reduction_of_partial, shards_of_shards]
    assert not ranks.failures(checks, 2, tmp_path, SECONDS)


def test_the_first_call_is_in_inference_mode() -> None:
    """DTensor is imported after the ops, and no call has had its rules registered."""
    lines = [
        "import torch, torch.distributed as dist, liger_ops",
        "from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh",
        "dist.init_process_group('gloo', rank=0, world_size=1, store=dist.HashStore())",
        "mesh = init_device_mesh('cpu', (1,))",
        "x = distribute_tensor(torch.randn(2, 4), mesh, [Shard(1)])",
        "with torch.inference_mode(): y = liger_ops.rms_norm(x)",
        "assert y.placements == (Shard(1),), y.placements",
        "torch.testing.assert_close(y.full_tensor(), liger_ops.rms_norm(x.full_tensor()))",
    ]
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True, timeout=SECONDS)


def refused() -> None:
    mesh, named = ranks.mesh(), ranks.mesh(1, 2)
    x, weight, target = torch.randn(4, 6), torch.randn(6), torch.zeros(4, dtype=torch.long)
    head = torch.randn(9, 6)

    def rows(tensor: Tensor) -> DTensor:
        return distribute_tensor(tensor, mesh, [Shard(0)])

    def whole(tensor: Tensor, on: Any = mesh) -> DTensor:
        return distribute_tensor(tensor, on, [Replicate()] * on.ndim)

    ops = liger_ops
    # The call, the kind of error, and what it says beside the mesh: the op, the argument and the
    # placements.
    wrong: list[tuple[Callable[..., Any], tuple[Any, ...], type[Exception], list[str]]] = [
        (ops.rms_norm, (rows(x), weight), TypeError,
         ["rms_norm: weight must be a DTensor", "Shard(dim=0)", "plain tensor of shape (6,)"]),
        (ops.rms_norm, (x, whole(weight)), TypeError, ["rms_norm: x must be a DTensor"]),
        (ops.swiglu, (rows(x), x), TypeError, ["swiglu: up must be a DTensor", "Shard(dim=0)"]),
        (ops.cross_entropy, (rows(x), target), TypeError, ["cross_entropy: target must be"]),
        (ops.linear_cross_entropy, (rows(x), head, rows(target)), TypeError,
         ["linear_cross_entropy: weight must be a DTensor"]),
        (ops.rms_norm, (rows(x), whole(weight, named)), ValueError,
         ["rms_norm: weight must be a DTensor on the mesh", "(Shard(dim=0),)", str(named)]),
        # What the op refuses on one device too, of the whole shapes.
        (ops.rms_norm, (rows(x), whole(weight[:5])), ValueError,
         ["rms_norm: weight must have the shape", "f32[4, 6](S(0))", "f32[5](R)"]),
        (ops.rms_norm, (distribute_tensor(x, mesh, [Shard(1)]), whole(weight[:5])), ValueError,
         ["rms_norm: weight must have the shape", "f32[4, 6](S(1))"]),
        (ops.layer_norm, (rows(x), whole(target[:1].expand(6).contiguous())), TypeError,
         ["layer_norm: weight must be a floating point", "f32[4, 6](S(0))"]),
    ]  # fmt: skip
    for function, args, kind, said in wrong:
        for mode in (torch.enable_grad, torch.inference_mode):
            with mode(), pytest.raises(kind) as error:
                function(*args)
            assert type(error.value) is kind
            for text in (*said, str(mesh)):
                assert text in str(error.value), (mode, text, str(error.value))
    for function, args, kind, said in (wrong[0], wrong[5], wrong[6]):
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        with pytest.raises(Exception) as error:
            compiled(*args)
        for text in (said[0], str(mesh)):
            assert text in str(error.value), (kind, text, str(error.value))


def what_is_replicated_is_taken() -> None:
    mesh = ranks.mesh()
    x, weight = torch.randn(4, 6), torch.randn(6)
    sharded = distribute_tensor(x, mesh, [Shard(0)])
    for placement in (Shard(0), Shard(1)):
        with implicit_replication():
            y = liger_ops.rms_norm(distribute_tensor(x, mesh, [placement]), weight)
        torch.testing.assert_close(y.full_tensor(), liger_ops.rms_norm(x, weight))
    target, count = torch.tensor([1, 0, 2, 5]), torch.tensor(8.0)
    loss = liger_ops.cross_entropy(
        sharded, distribute_tensor(target, mesh, [Shard(0)]), num_items_in_batch=count
    )
    expected = liger_ops.cross_entropy(x, target, num_items_in_batch=count)
    torch.testing.assert_close(loss.full_tensor(), expected)


def every_reduction_of_partial() -> None:
    mesh = ranks.mesh()
    rank = mesh.get_local_rank()
    parts, weights = torch.randn(2, 4, 6), torch.randn(2, 6)
    for name in ("sum", "avg", "max", "min"):
        reduce = {"avg": "mean", "max": "amax", "min": "amin"}.get(name, name)
        x, weight = (getattr(torch, reduce)(t, 0) for t in (parts, weights))
        partial, partial_weight = (
            DTensor.from_local(t[rank], mesh, [Partial(name)]) for t in (parts, weights)
        )
        for placement in (Shard(0), Shard(1), Replicate()):
            # Each of the two is partial beside another that is not.
            given = distribute_tensor(x, mesh, [placement])
            expected = liger_ops.rms_norm(x, weight)
            for y in (
                liger_ops.rms_norm(given, partial_weight),
                liger_ops.rms_norm(partial, distribute_tensor(weight, mesh, [Replicate()])),
            ):
                torch.testing.assert_close(y.full_tensor(), expected)


def shards_of_shards() -> None:
    """The order that FSDP2 has for a weight that tensor parallelism has sharded before."""
    mesh = ranks.mesh(2, 1)
    x = torch.randn(8, 6)
    given = DTensor.from_local(
        x.chunk(2)[mesh.get_local_rank(0)], mesh, [_StridedShard(0, split_factor=1), Shard(0)]
    )
    assert given.full_tensor().equal(x)
    torch.testing.assert_close(liger_ops.softmax(given).full_tensor(), liger_ops.softmax(x))
