"""Norms of groups of columns, and packed gates, whose columns are sharded: what a device has whole
it computes by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import liger_ops
import ranks
from column_shards import backward, compare, forward, leaves, outcome, over_columns
from ranks import recorded

pytestmark = pytest.mark.device_kernels

SECONDS = 120
ROWS = 6
Moved = list[tuple[str, int]]


def test_two_devices(tmp_path: Path) -> None:
    checks = [
        whole_groups_need_nothing,
        of_groups_that_are_cut_statistics_move,
        channels_of_cut_groups_are_redistributed,
        halves_of_a_packed_gate,
        pairs_of_a_packed_gate,
        a_packed_projection,
    ]
    assert not ranks.failures(checks, 2, tmp_path, SECONDS)


def test_groups_on_four_devices(tmp_path: Path) -> None:
    assert not ranks.failures([on_four_devices], 4, tmp_path, SECONDS)


def norm(N: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(ROWS, N) + 2, torch.randn(ROWS, N), torch.randn(N)]


def image(channels: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(3, channels, 5) + 2, torch.randn(channels), torch.randn(channels)]


def over_channels(tensors: list[Tensor], placements: list[Any], weights: list[Any]) -> list[Tensor]:
    mesh = ranks.mesh(*[2] * len(placements))
    return [
        distribute_tensor(t, mesh, weights if t.dim() == 1 else placements).requires_grad_()
        for t in tensors
    ]


def moved(op: str, given: list[Tensor], **options: Any) -> tuple[list[Tensor], Moved, Moved]:
    """Results and gradients, and the collectives of the forward and of the backward."""
    results, of_forward = recorded(lambda: forward(op, given, options))
    gradients, of_backward = recorded(lambda: backward(results, given))
    return [*results, *gradients], of_forward, of_backward


def group_norm(x: Tensor, weight: Tensor, bias: Tensor, groups: int) -> Tensor:
    return liger_ops.group_norm(x, groups, weight, bias)


def whole_groups_need_nothing() -> None:
    mesh = ranks.mesh()
    for options in (
        {"group_size": 4}, {"group_size": 8, "norm_before_gate": False}, {"group_size": 1},
    ):  # fmt: skip
        given = over_columns(norm(16), mesh)
        found, *collectives = moved("gated_rms_norm", given, **options)
        assert collectives == [[], []], (options, collectives)
        assert [value.placements for value in found[1:]] == [t.placements for t in given]
        compare(found, outcome("gated_rms_norm", leaves(norm(16)), **options), 1e-4)
    given = over_channels(image(8), [Shard(1)], [Shard(0)])
    y, of_forward = recorded(lambda: group_norm(*given, groups=4))
    gradients, of_backward = recorded(lambda: backward((y,), given))
    assert of_forward == of_backward == []
    assert y.placements == (Shard(1),)
    own = leaves(image(8))
    expected = group_norm(*own, groups=4)
    compare([y, *gradients], [expected, *backward((expected,), own)], 1e-4)


def of_groups_that_are_cut_statistics_move() -> None:
    mesh = ranks.mesh()
    for N, size in ((24, 8), (10, 2), (3, 1)):
        for options in ({}, {"norm_before_gate": False, "activation": "sigmoid"}):
            given = over_columns(norm(N), mesh)
            found, *collectives = moved("gated_rms_norm", given, group_size=size, **options)
            statistic = ("all_reduce", ROWS * N // size * 4)
            assert collectives == [[statistic], [statistic] * 2], (N, size, collectives)
            expected = outcome("gated_rms_norm", leaves(norm(N)), group_size=size, **options)
            compare(found, expected, 1e-4)


def channels_of_cut_groups_are_redistributed() -> None:
    for channels, groups in ((6, 3), (6, 1), (5, 5)):
        given = over_channels(image(channels), [Shard(1)], [Replicate()])
        y, own = group_norm(*given, groups=groups), leaves(image(channels))
        expected = group_norm(*own, groups=groups)
        compare([y, *backward((y,), given)], [expected, *backward((expected,), own)], 1e-4)


def halves(tensor: Tensor, dim: int) -> Tensor:
    """The device's part of both halves."""
    mesh = ranks.mesh()
    parts = [half.chunk(mesh.size(), dim)[mesh.get_local_rank()] for half in tensor.chunk(2, dim)]
    return torch.cat(parts, dim)


def halves_of_a_packed_gate() -> None:
    mesh = ranks.mesh()
    packed = torch.randn(ROWS, 12)
    placement = _StridedShard(1, split_factor=2)
    for op in ("swiglu", "geglu", "clamped_swiglu"):
        given = DTensor.from_local(halves(packed, 1), mesh, [placement]).requires_grad_()
        (y, gradient), *collectives = moved(op, [given])
        assert collectives == [[], []], (op, collectives)
        truth, expected = outcome(op, leaves([packed]))
        compare([y], [truth])
        # PyTorch 2.11 cannot gather such a tensor.
        assert gradient.placements == (placement,) and gradient.shape == packed.shape
        torch.testing.assert_close(gradient.to_local(), halves(expected, 1))
        # A device's neighbours are not its part of both halves.
        given = distribute_tensor(packed, mesh, [Shard(1)]).requires_grad_()
        compare(outcome(op, [given]), [truth, expected])


def pairs_of_a_packed_gate() -> None:
    mesh = ranks.mesh()
    # 3 pairs are not whole on two devices.
    for columns, alone in ((12, True), (6, False)):
        packed = torch.randn(ROWS, columns)
        given = distribute_tensor(packed, mesh, [Shard(1)]).requires_grad_()
        found, *collectives = moved("clamped_swiglu", [given], interleaved=True)
        assert (collectives == [[], []]) == alone, collectives
        compare(found, outcome("clamped_swiglu", leaves([packed]), interleaved=True))


def a_packed_projection() -> None:
    """A gate and an up projection in one weight, as transformers shards it: each device has its
    rows of both."""
    if torch.__version__ < "2.13":
        return  # PyTorch 2.11 multiplies no such weight: "unable to be interpreted".
    mesh = ranks.mesh()
    x, weight, down = torch.randn(ROWS, 5), torch.randn(12, 5), torch.randn(5, 6)
    placement = _StridedShard(0, split_factor=2)
    given = [
        distribute_tensor(x, mesh, [Replicate()]).requires_grad_(),
        DTensor.from_local(halves(weight, 0), mesh, [placement]).requires_grad_(),
        distribute_tensor(down, mesh, [Shard(1)]).requires_grad_(),
    ]

    def mlp(x: Tensor, weight: Tensor, down: Tensor) -> Tensor:
        return F.linear(liger_ops.swiglu(F.linear(x, weight)), down)

    y, collectives = recorded(lambda: mlp(*given))
    assert collectives == [] and y.placements[0].is_partial()
    own = leaves([x, weight, down])
    expected = mlp(*own)
    torch.testing.assert_close(y.full_tensor(), expected)
    y.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(given[1].grad.to_local(), halves(own[1].grad, 0))
    torch.testing.assert_close(given[0].grad.full_tensor(), own[0].grad)


def on_four_devices() -> None:
    """Groups that are whole on one dimension of a mesh, and whole or cut on both; and a device
    without columns."""
    for columns, size in ((16, 4), (16, 8)):
        for placements in ([Shard(1), Shard(1)], [Shard(0), Shard(1)]):
            mesh = ranks.mesh(2, 2)
            weights = [Shard(0) if p == Shard(1) else Replicate() for p in placements]
            given = over_columns(
                norm(columns), mesh,
                lambda t, p=placements, w=weights: w if t.dim() == 1 else p,
            )  # fmt: skip
            found = outcome("gated_rms_norm", given, group_size=size)
            compare(found, outcome("gated_rms_norm", leaves(norm(columns)), group_size=size), 1e-4)
            channels, groups = columns, columns // size
            given = over_channels(image(channels), placements, [Replicate()] * 2)
            y, own = group_norm(*given, groups=groups), leaves(image(channels))
            expected = group_norm(*own, groups=groups)
            compare([y, *backward((y,), given)], [expected, *backward((expected,), own)], 1e-4)
    # Shards of 2, 2, 2 and 0 columns.
    given = over_columns(norm(6), ranks.mesh())
    found = outcome("gated_rms_norm", given, group_size=3)
    compare(found, outcome("gated_rms_norm", leaves(norm(6)), group_size=3), 1e-4)
