"""The arguments of a loss over a process group's vocabulary, plain tensors or DTensors, as one rank
has them."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ..vocab_parallel.collectives import Gathered
from ..vocab_parallel.shard import VocabShard


class Arguments(NamedTuple):
    """A call's tensors as one rank has them: sharded and bias are of its words, x and the others
    whole."""

    shard: VocabShard
    # None for plain tensors.
    mesh: DeviceMesh | None
    sharded: Tensor
    bias: Tensor | None
    x: Tensor | None
    others: list[Tensor | None]

    def also_sharded(self, op: str, name: str, tensor: Tensor, dim: int) -> Tensor:
        """The rank's words of another tensor that is sharded over words."""
        return _of_words(op, name, tensor, dim, self.shard, self.mesh)

    def also_whole(self, op: str, name: str, tensor: Tensor) -> Tensor:
        """The whole of another tensor, whose gradient every rank has whole."""
        return _whole(op, name, tensor, self.mesh)

    def also_rows(self, op: str, name: str, tensor: Tensor, sequence_dim: int | None) -> Tensor:
        """The whole of another tensor that has x's rows."""
        return _whole_x(op, name, tensor, self.mesh, self.shard, sequence_dim)[0]


def arguments(
    op: str, name: str, sharded: Tensor, dim: int, others: dict[str, Tensor | None],
    group: dist.ProcessGroup | None, vocab_size: int | None,
    bias: Tensor | None = None, x: Tensor | None = None, sequence_dim: int | None = None,
    prefix: str = "",
) -> Arguments:  # fmt: skip
    """Read the arguments of the op of this name. `sharded`, the argument `name`, is sharded over
    words along `dim`. `others` are arguments of which every rank has the whole. `prefix` is that of
    the names of x and bias."""
    if not isinstance(sharded, Tensor):
        raise TypeError(f"{op}: {name} must be a tensor, got {type(sharded).__name__}")
    if isinstance(sharded, DTensor):
        if group is not None or vocab_size is not None or sequence_dim is not None:
            raise ValueError(
                f"{op}: group, vocab_size and sequence_dim must be None for a DTensor {name}, whose"
                " mesh and shape say them"
            )
        mesh = sharded.device_mesh
        _check_placement(op, name, sharded, dim)
        V, ranks, rank = sharded.shape[dim], mesh.size(), mesh.get_local_rank()
        name_of_group = mesh.get_group().group_name
    else:
        mesh = None
        if group is None or vocab_size is None:
            missing = "group" if group is None else "vocab_size"
            raise ValueError(
                f"{op}: {name} must be a DTensor, or group and vocab_size be given; {missing} is"
                " None"
            )
        V, ranks, rank = vocab_size, dist.get_world_size(group), dist.get_rank(group)
        if rank < 0:
            raise ValueError(f"{op}: group must have this process as a member")
        name_of_group = group.group_name
    shard = VocabShard.of_rank(name_of_group, rank, ranks, V)
    local = sharded.to_local() if isinstance(sharded, DTensor) else sharded
    _check_size(op, name, local, dim, shard)
    if bias is not None:
        bias = _of_words(op, f"{prefix}bias", bias, 0, shard, mesh)
    if x is not None:
        x, sums_x = _whole_x(op, f"{prefix}x", x, mesh, shard, sequence_dim)
        shard = shard._replace(sums_x=sums_x)
    wholes = [_constant(op, key, value, mesh) for key, value in others.items()]
    return Arguments(shard, mesh, local, bias, x, wholes)


def _of_words(
    op: str, name: str, tensor: Tensor, dim: int, shard: VocabShard, mesh: DeviceMesh | None
) -> Tensor:
    if isinstance(tensor, DTensor):
        _check_mesh(op, name, tensor, mesh)
        _check_placement(op, name, tensor, dim)
        tensor = tensor.to_local()
    _check_size(op, name, tensor, dim, shard)
    return tensor


def _whole_x(
    op: str,
    name: str,
    x: Tensor,
    mesh: DeviceMesh | None,
    shard: VocabShard,
    sequence_dim: int | None,
) -> tuple[Tensor, bool]:
    """The whole x, and whether its gradient is still to be summed over the ranks."""
    if isinstance(x, DTensor):
        _check_mesh(op, name, x, mesh)
        placement = x.placements[0]
        if placement.is_shard(x.dim() - 1):
            raise ValueError(
                f"{op}: {name} must be replicated, or sharded over its rows, got {placement}"
            )
        if placement.is_replicate():
            return x.to_local(), True
        # Each rank's gradient is a part of the sum, which the mesh's collectives compute.
        whole = x.redistribute(placements=[Replicate()])
        return whole.to_local(grad_placements=[Partial()]), False
    if sequence_dim is None:
        return x, True
    if not -x.dim() <= sequence_dim < x.dim() or sequence_dim % x.dim() == x.dim() - 1:
        raise ValueError(
            f"{op}: sequence_dim must be a dimension of {name} but its last, got {sequence_dim} for"
            f" shape {tuple(x.shape)}"
        )
    return Gathered.apply(x, sequence_dim % x.dim(), shard.group), False


def _constant(op: str, name: str, tensor: Tensor | None, mesh: DeviceMesh | None) -> Tensor | None:
    """The whole of an argument without a gradient."""
    if tensor is None:
        return None
    if tensor.requires_grad:
        raise ValueError(
            f"{op}: {name} must not require a gradient, which the result does not give"
        )
    return _whole(op, name, tensor, mesh)


def _whole(op: str, name: str, tensor: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """The whole of an argument, whose gradient every rank has whole."""
    if not isinstance(tensor, DTensor):
        return tensor
    _check_mesh(op, name, tensor, mesh)
    whole = tensor.redistribute(placements=[Replicate()])
    return whole.to_local(grad_placements=[Replicate()])


def check_target(op: str, target: Tensor | None, x: Tensor) -> None:
    """Check what the op of a rank without words would not: it is not called."""
    assert target is not None
    if target.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{op}: target must be int64 or int32, got {target.dtype}")
    if target.shape != x.shape[:-1]:
        raise ValueError(
            f"{op}: target must have the shape of the whole input but for its last dimension,"
            f" {tuple(x.shape[:-1])}, got {tuple(target.shape)}"
        )


def _check_mesh(op: str, name: str, tensor: DTensor, mesh: DeviceMesh | None) -> None:
    if tensor.device_mesh != mesh:
        raise ValueError(
            f"{op}: {name} must be on the mesh of the sharded argument, {mesh}, or a plain tensor,"
            f" got {tensor.device_mesh}"
        )


def _check_placement(op: str, name: str, tensor: DTensor, dim: int) -> None:
    accepted = Shard(dim % tensor.dim())
    placements = tuple(tensor.placements)
    if len(placements) != 1 or type(placements[0]) is not Shard or placements[0] != accepted:
        raise ValueError(
            f"{op}: {name} must be sharded over words on a mesh of one dimension, ({accepted},),"
            f" such as a submesh, got {placements} on {tensor.device_mesh};"
            f" liger_ops.{op.removeprefix('distributed.')} takes DTensors of any placement"
        )


def _check_size(op: str, name: str, local: Tensor, dim: int, shard: VocabShard) -> None:
    if local.dim() == 0 or local.shape[dim] != shard.held:
        raise ValueError(
            f"{op}: {name} must have {shard.held} words on rank {shard.rank} of {shard.ranks}, as"
            f" torch.chunk splits {shard.V}, got shape {tuple(local.shape)}"
        )
