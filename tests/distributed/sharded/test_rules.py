"""The sharding rule of every op: any placement gives the results and gradients of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import ranks
from liger_ops import library
from op_table import OPS
from op_under_test import OpUnderTest

pytestmark = pytest.mark.device_kernels

SECONDS = 300
# Not a multiple of the devices, so that shards differ in size.
ROWS = 5
# One for each kind of rule: each dimension of a mesh follows the same rules by itself.
ON_TWO_DIMENSIONS = ("rms_norm", "dyt", "swiglu-packed", "cross_entropy_forward-none", "mhc_pre")


def test_every_op_has_a_rule() -> None:
    assert [name for name, op in library.OPS.items() if not library.declared(op).axes] == []


@pytest.mark.parametrize("mesh", [(2,), (2, 2)], ids=str)
def test_sharded_ops_give_what_one_process_gives(mesh: tuple[int, ...], tmp_path: Path) -> None:
    check = {(2,): on_two_devices, (2, 2): on_a_square}[mesh]
    assert not ranks.failures([check], torch.Size(mesh).numel(), tmp_path, SECONDS)


def on_two_devices() -> None:
    check_every_op((2,))


def on_a_square() -> None:
    check_every_op((2, 2))


def check_every_op(shape: tuple[int, ...]) -> None:
    mesh = ranks.mesh(*shape)
    failures = []
    ops = OPS.values() if len(shape) == 1 else [OPS[name] for name in ON_TWO_DIMENSIONS]
    for op in ops:
        if op.id == "rope-complex" and torch.__version__ < "2.13":
            continue  # DTensor of PyTorch 2.11 has no aten.complex, for the gradient of the table.
        case = op.sample(ranks.EXACT[0], rows=ROWS)
        # Their values are drawn on the CPU.
        with torch.device("cpu"):
            args = op.forward_args(case, op.tensors(case))
        # Of the tensors, the first alone is sharded: DTensor has to move the others.
        first = next(i for i, arg in enumerate(args) if isinstance(arg, Tensor) and arg.ndim)
        for placements in choices(args[first].ndim, len(shape)):
            try:
                check(op, args, first, mesh, placements)
            except Exception as error:
                failures.append(f"{op.id} {placements}: {type(error).__name__} {str(error)[:300]}")
    assert not failures, "\n".join(failures)


def choices(ndim: int, dimensions: int) -> list[tuple[Any, ...]]:
    if dimensions == 1:
        return [(Shard(dim),) for dim in range(ndim)]
    last = Shard(ndim - 1)
    return [(Shard(0), last), (Shard(0), Shard(0)), (last, Replicate())]


def check(op: OpUnderTest, args: Any, first: int, mesh: Any, placements: Any) -> None:
    expected = outcome(op, args, lambda i, tensor: tensor)
    found = outcome(
        op,
        args,
        lambda i, tensor: distribute_tensor(
            tensor, mesh, placements if i == first else [Replicate()] * mesh.ndim
        ),
    )
    bound = ranks.EXACT[1]
    for value, truth in zip(found, expected, strict=True):
        assert (value is None) == (truth is None)
        if truth is not None:
            assert isinstance(value, DTensor)
            torch.testing.assert_close(value.full_tensor(), truth, rtol=bound, atol=bound)


def outcome(op: OpUnderTest, args: Any, place: Any) -> list[Any]:
    """The results of a call and the gradients of its arguments."""
    args = tuple(
        place(i, arg.detach().clone()).requires_grad_(
            op.has_gradient(i) and (arg.is_floating_point() or arg.is_complex())
        )
        if isinstance(arg, Tensor)
        else arg
        for i, arg in enumerate(args)
    )
    outputs = op.overload()(*args)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    wanted = [arg for arg in args if isinstance(arg, Tensor) and arg.requires_grad]
    results = [y for y in op.results(outputs) if y is not None and y.requires_grad]
    loss = sum((y * weights_like(y)).sum() for y in results)
    return [*outputs, *torch.autograd.grad(loss, wanted, allow_unused=True)]


def weights_like(y: Tensor) -> Tensor:
    """Another factor for every element, so that a wrong order of elements shows."""
    values = torch.linspace(0.5, 2.0, y.numel(), dtype=y.dtype).reshape(y.shape)
    if isinstance(y, DTensor):
        return distribute_tensor(values, y.device_mesh, [Replicate()] * y.device_mesh.ndim)
    return values
