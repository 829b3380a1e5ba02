"""Every op with its rows sharded, compiled too: nothing moves but sums."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import ranks
from op_table import OPS
from op_under_test import OpUnderTest
from ranks import recorded

pytestmark = pytest.mark.device_kernels

SECONDS = 240
# Shards of 2, 2, 1 and no rows.
ROWS = 5
# A row on four devices: DTensor replicates what has fewer elements than devices.
WITH_ONE_ROW = ("rms_norm", "swiglu", "rope", "cross_entropy_forward-none", "mhc_pre")


def test_four_devices(tmp_path: Path) -> None:
    checks = [every_op_without_collectives, one_row]
    assert not ranks.failures(checks, 4, tmp_path, SECONDS)


def test_two_devices_compiled(tmp_path: Path) -> None:
    assert not ranks.failures([every_op_compiled], 2, tmp_path, SECONDS)


def a_form_of_each() -> list[OpUnderTest]:
    """test_rules has all forms."""
    return list({op.name: op for op in OPS.values()}.values())


def every_op_compiled() -> None:
    failures = []
    for op in a_form_of_each():
        torch.compiler.reset()
        try:
            own, sharded = arguments(op, ROWS)
            compiled = torch.compile(op.overload(), backend="aot_eager", fullgraph=True)
            found, gradients = outcome(op, sharded, compiled)
            compare([*found, *gradients], op, own)
        except Exception as error:
            failures.append(f"{op.id}: {type(error).__name__} {str(error)[:300]}")
    assert not failures, "\n".join(failures)


def every_op_without_collectives() -> None:
    failures = []
    for op in a_form_of_each():
        try:
            moved, gradients = run(op, ROWS)
            if op.per_row:
                # The divisor of a mean, for each pass, and the mean itself.
                assert len(moved) <= 3, moved
                assert all(name == "all_reduce" and size <= 8 for name, size in moved), moved
                for gradient in gradients:
                    # A weight's gradient is each device's part of a sum, which nobody has asked
                    # for yet.
                    (placement,) = gradient.placements
                    assert placement.is_partial("sum") or placement.is_shard(), placement
        except Exception as error:
            failures.append(f"{op.id}: {type(error).__name__} {str(error)[:300]}")
    assert not failures, "\n".join(failures)


def one_row() -> None:
    for name in WITH_ONE_ROW:
        run(OPS[name], 1)


def run(op: OpUnderTest, rows: int) -> tuple[list[tuple[str, int]], list[DTensor]]:
    """Compare a call with one process; return its collectives and the gradients."""
    own, sharded = arguments(op, rows)
    (found, gradients), moved = recorded(lambda: outcome(op, sharded, op.overload()))
    compare([*found, *gradients], op, own)
    return moved, [gradient for gradient in gradients if gradient is not None]


def compare(found: list[Any], op: OpUnderTest, own: list[Any]) -> None:
    results, gradients = outcome(op, own, op.overload())
    bound = ranks.EXACT[1]
    for value, truth in zip(found, [*results, *gradients], strict=True):
        assert (value is None) == (truth is None)
        if truth is not None:
            assert isinstance(value, DTensor)
            torch.testing.assert_close(value.full_tensor(), truth, rtol=bound, atol=bound)


def arguments(op: OpUnderTest, rows: int) -> tuple[list[Any], list[Any]]:
    """The arguments of a call in one process, and with their rows sharded."""
    mesh = ranks.mesh()
    case = op.sample(ranks.EXACT[0], rows=rows)
    # Their values are drawn on the CPU.
    with torch.device("cpu"):
        args = op.forward_args(case, op.tensors(case))
    names = [argument.name for argument in op.overload()._schema.arguments]
    own = [
        value.detach().clone().requires_grad_(op.has_gradient(i) and differentiable(value))
        if isinstance(value, Tensor) else value
        for i, value in enumerate(args)
    ]  # fmt: skip
    sharded = [
        distribute_tensor(
            value.detach(), mesh, [Shard(0) if name in op.per_row else Replicate()]
        ).requires_grad_(value.requires_grad)
        if isinstance(value, Tensor) else value
        for name, value in zip(names, own, strict=False)
    ]  # fmt: skip
    return own, sharded


def differentiable(value: Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def outcome(
    op: OpUnderTest, args: list[Any], call: Callable[..., Any]
) -> tuple[list[Any], list[Any]]:
    outputs = call(*args)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    wanted = [arg for arg in args if isinstance(arg, Tensor) and arg.requires_grad]
    results = [y for y in op.results(outputs) if y is not None and y.requires_grad]
    dys = [incoming(y) for y in results]
    return list(outputs), list(torch.autograd.grad(results, wanted, dys, allow_unused=True))


def incoming(y: Tensor) -> Tensor:
    """A gradient of y, in y's placement; each element has another value."""
    values = torch.linspace(0.5, 2.0, y.numel(), dtype=y.dtype).reshape(y.shape)
    if not isinstance(y, DTensor):
        return values
    placements = [p if p.is_shard() else Replicate() for p in y.placements]
    return distribute_tensor(values, y.device_mesh, placements, src_data_rank=None)
