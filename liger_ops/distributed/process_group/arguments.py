"""Read the arguments of a loss over a process group's vocabulary, plain tensors or DTensors, and
bring them to what one rank computes with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ...ops.heads.head import Head, cast_as_linear
from ...ops.heads.lora import lora_input, narrowed
from ..vocab_parallel import ShardedLoss
from ..vocab_parallel.collectives import Gathered, Replicated
from ..vocab_parallel.shard import VocabShard


class RankArguments(NamedTuple):
    """A call's tensors on one rank: `sharded` and `bias` have the rank's words, x and the `others`
    are whole."""

    # The function's name, for messages.
    op: str
    shard: VocabShard
    # None for plain tensors.
    mesh: DeviceMesh | None
    sharded: Tensor
    bias: Tensor | None = None
    x: Tensor | None = None
    others: Mapping[str, Tensor | None] = {}

    def of_words(self, name: str, tensor: Tensor, dim: int = 0) -> Tensor:
        """Return the rank's words of a tensor that is sharded over words."""
        if isinstance(tensor, DTensor):
            self._check_mesh(name, tensor)
            _check_placement(self.op, name, tensor, dim)
            tensor = tensor.to_local()
        self.check_size(name, tensor, dim)
        return tensor

    def whole(self, name: str, tensor: Tensor) -> Tensor:
        """Return a whole tensor, of a DTensor gathered. Every rank computes its whole gradient."""
        if not isinstance(tensor, DTensor):
            return tensor
        self._check_mesh(name, tensor)
        whole = tensor.redistribute(placements=[Replicate()])
        return whole.to_local(grad_placements=[Replicate()])

    def constant(self, name: str, tensor: Tensor | None) -> Tensor | None:
        """Return a whole tensor that has no gradient; raise if it requires one."""
        if tensor is not None and tensor.requires_grad:
            raise ValueError(
                f"{self.op}: {name} must not require a gradient, which the result does not give"
            )
        return None if tensor is None else self.whole(name, tensor)

    def rows(self, name: str, x: Tensor, sequence_dim: int | None = None) -> tuple[Tensor, bool]:
        """Return the whole x, and whether the ranks' gradients of it are still to be summed."""
        if isinstance(x, DTensor):
            self._check_mesh(name, x)
            placement = x.placements[0]
            if placement.is_shard(x.dim() - 1):
                raise ValueError(
                    f"{self.op}: {name} must be replicated, or sharded over its rows, got"
                    f" {placement}"
                )
            if placement.is_replicate():
                return x.to_local(), True
            # Each rank's gradient is a term of a sum, which DTensor computes, as Partial says.
            whole = x.redistribute(placements=[Replicate()])
            return whole.to_local(grad_placements=[Partial()]), False
        if sequence_dim is None:
            return x, True
        if not -x.dim() <= sequence_dim < x.dim() or sequence_dim % x.dim() == x.dim() - 1:
            raise ValueError(
                f"{self.op}: sequence_dim must be a dimension of {name} but its last, got"
                f" {sequence_dim} for shape {tuple(x.shape)}"
            )
        return Gathered.apply(x, sequence_dim % x.dim(), self.shard.group), False

    def head(self, call: Any, prefix: str = "") -> Head:
        """Return the head of a call, cast as autocast casts it. `prefix` starts the names of the
        head's arguments. A call may have lora_x = x @ lora_a.T in place of lora_a."""
        assert self.x is not None
        x, weight, bias = cast_as_linear(self.x, self.sharded, self.bias)
        lora_b: Tensor | None = getattr(call, f"{prefix}lora_b")
        if hasattr(call, "lora_x"):
            if call.lora_x is None or lora_b is None:
                return Head(x, weight, bias)
            lora_x, lora_b = self.rows("lora_x", call.lora_x)[0], self.of_words("lora_b", lora_b)
            return Head(x, weight, bias, *narrowed(lora_x, lora_b, x.dtype))
        lora_a: Tensor | None = getattr(call, f"{prefix}lora_a")
        if lora_b is not None:
            lora_b = self.of_words(f"{prefix}lora_b", lora_b)
        if isinstance(lora_a, DTensor):
            if lora_a.device_mesh != self.mesh or tuple(lora_a.placements) != (Replicate(),):
                raise ValueError(
                    f"{self.op}: {prefix}lora_a must be replicated on the mesh of the sharded"
                    f" argument, {self.mesh}, or a plain tensor, got {lora_a.placements} on"
                    f" {lora_a.device_mesh}"
                )
            lora_a = lora_a.to_local()
        if lora_a is not None and not self.shard.sums_x:
            # x's ranks each keep a term of the gradient, and so does lora_x: sum that of lora_a.
            lora_a = Replicated.apply(lora_a, self.shard.group)
        scale = getattr(call, f"{prefix}lora_scale")
        return Head(x, weight, bias, *lora_input(self.op, x, weight, lora_a, lora_b, scale, prefix))

    def check_target(self, x: Tensor, target: Tensor | None) -> None:
        """Check the target, for a rank without words too, which calls no op that would check it."""
        if target is None:
            return
        if target.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"{self.op}: target must be int64 or int32, got {target.dtype}")
        if target.shape != x.shape[:-1]:
            raise ValueError(
                f"{self.op}: target must have the shape of the whole input but for its last"
                f" dimension, {tuple(x.shape[:-1])}, got {tuple(target.shape)}"
            )

    def check_size(self, name: str, local: Tensor, dim: int) -> None:
        shard = self.shard
        if local.dim() == 0 or local.shape[dim] != shard.held:
            raise ValueError(
                f"{self.op}: {name} must have {shard.held} words on rank {shard.rank} of"
                f" {shard.ranks}, as torch.chunk splits {shard.V}, got shape {tuple(local.shape)}"
            )

    def _check_mesh(self, name: str, tensor: DTensor) -> None:
        if tensor.device_mesh != self.mesh:
            raise ValueError(
                f"{self.op}: {name} must be on the mesh of the sharded argument, {self.mesh}, or a"
                f" plain tensor, got {tensor.device_mesh}"
            )


def read_arguments(
    op: str, loss: ShardedLoss, call: Any, others: dict[str, Tensor | None], prefix: str | None
) -> RankArguments:
    """Read the arguments of a call of the function named `op`. `others` are arguments that every
    rank has whole. `prefix` starts the names of x and bias, and is None for a loss of logits.
    """
    name, dim, sharded = loss.sharded, loss.dim, getattr(call, loss.sharded)
    options = (getattr(call, key, None) for key in ("group", "vocab_size", "sequence_dim"))
    group, vocab_size, sequence_dim = options
    bias = x = None
    if prefix is not None:
        bias, x = getattr(call, f"{prefix}bias"), getattr(call, f"{prefix}x")
    if not isinstance(sharded, Tensor):
        raise TypeError(f"{op}: {name} must be a tensor, got {type(sharded).__name__}")
    if isinstance(sharded, DTensor):
        if group is not None or vocab_size is not None or sequence_dim is not None:
            raise ValueError(
                f"{op}: group, vocab_size and sequence_dim must be None for a DTensor {name}, whose"
                " mesh and shape determine them"
            )
        mesh = sharded.device_mesh
        _check_placement(op, name, sharded, dim)
        V, ranks, rank = sharded.shape[dim], mesh.size(), mesh.get_local_rank()
        group_name = mesh.get_group().group_name
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
        group_name = group.group_name
    shard = VocabShard.of_rank(group_name, rank, ranks, V)
    local = sharded.to_local() if isinstance(sharded, DTensor) else sharded
    reader = RankArguments(op, shard, mesh, local)
    reader.check_size(name, local, dim)
    if bias is not None:
        bias = reader.of_words(f"{prefix}bias", bias)
    if x is not None:
        x, sums_x = reader.rows(f"{prefix}x", x, sequence_dim)
        shard = shard._replace(sums_x=sums_x)
    wholes = {key: reader.constant(key, value) for key, value in others.items()}
    return RankArguments(op, shard, mesh, local, bias, x, wholes)


def _check_placement(op: str, name: str, tensor: DTensor, dim: int) -> None:
    accepted = Shard(dim % tensor.dim())
    placements = tuple(tensor.placements)
    if len(placements) != 1 or type(placements[0]) is not Shard or placements[0] != accepted:
        raise ValueError(
            f"{op}: {name} must be sharded over words on a mesh of one dimension, ({accepted},),"
            f" such as a submesh, got {placements} on {tensor.device_mesh};"
            f" liger_ops.{op.removeprefix('distributed.')} takes DTensors of any placement"
        )
