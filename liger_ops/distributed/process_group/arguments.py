"""Read the arguments of a loss over a process group's vocabulary, plain tensors or DTensors, and
bring them to what one rank computes with."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ...axes import lines
from ...library import OPS
from ...ops.heads.head import HEAD, cast_as_linear, needed_gradients
from ...ops.heads.lora import lora_input, narrowed
from ..vocab_parallel import CLASS_WEIGHTS, SHARDED_LOSSES, ShardedLoss
from ..vocab_parallel.shard import Gathered, Replicated, VocabShard


def _dims_of_words(name: str) -> dict[str, int]:
    """Return the arguments of a loss that are sharded over words, with their dimension of words.
    The teacher's words are the axis W."""
    return {
        argument: 0 if spec.axes[0] in "VW" else -1
        for line in lines(OPS[f"{name}_forward"].axes)
        for argument, spec in line.arguments.items()
        if {"V", "W"}.intersection(spec.axes) and argument != CLASS_WEIGHTS.get(name)
    }


WORDS = {name: _dims_of_words(name) for name in SHARDED_LOSSES}


def read(name: str, call: Any) -> tuple[VocabShard, dict[str, Any]]:
    """Read a call of the function `name`: return the rank's shard, and the arguments on this rank,
    whose words are the rank's and whose other dimensions are whole. Beside the call's there are the
    arguments of the op `<name>_forward` that follow from them."""
    loss, op, title = SHARDED_LOSSES[name], OPS[f"{name}_forward"], f"distributed.{name}"
    reader, sums_x = RankReader.of_call(title, loss, call), False
    side = loss.rows.removesuffix("x")
    learned = (*loss.differentiated, f"{side}lora_a", "teacher_log_prob")
    arguments: dict[str, Any] = call._asdict()
    for argument, tensor in call._asdict().items():
        if not isinstance(tensor, Tensor):
            continue
        if tensor.requires_grad and argument not in learned:
            reason = "which the result does not give"
            if argument.startswith("teacher_"):
                reason = f"as the teacher is a constant; pass {argument}.detach()"
            raise ValueError(f"{title}: {argument} must not require a gradient, {reason}")
        if argument in WORDS[name]:
            arguments[argument] = reader.words(argument, tensor, WORDS[name][argument])
        elif argument.endswith("lora_a"):
            arguments[argument] = reader.lora_a(argument, tensor, sums_x)
        elif argument.endswith("x"):
            sequence_dim = getattr(call, "sequence_dim", None)
            arguments[argument], to_sum = reader.rows(argument, tensor, sequence_dim)
            sums_x = to_sum if argument == loss.rows else sums_x
        else:
            arguments[argument] = reader.whole(argument, tensor)
    if hasattr(call, "chunk_bytes"):
        if arguments.get("teacher_weight") is not None:
            arguments |= _head(title, arguments, "teacher_")
        head = _head(title, arguments, side)
        arguments |= head
        if "gradient_mask" in op.arguments._fields:
            arguments["gradient_mask"] = needed_gradients([*head.values()], call.reduction)
    if "target" in op.arguments._fields and call.target is not None:
        _check_target(title, arguments[loss.rows], arguments["target"])
    return reader.shard._replace(sums_x=sums_x), arguments


class RankReader(NamedTuple):
    """Brings the tensors of a call of the function named `op` to one rank."""

    op: str
    shard: VocabShard
    # None for plain tensors.
    mesh: DeviceMesh | None

    @staticmethod
    def of_call(op: str, loss: ShardedLoss, call: Any) -> RankReader:
        name, sharded = loss.sharded, getattr(call, loss.sharded)
        options = (getattr(call, key, None) for key in ("group", "vocab_size", "sequence_dim"))
        group, vocab_size, sequence_dim = options
        if not isinstance(sharded, Tensor):
            raise TypeError(f"{op}: {name} must be a tensor, got {type(sharded).__name__}")
        if isinstance(sharded, DTensor):
            if group is not None or vocab_size is not None or sequence_dim is not None:
                raise ValueError(
                    f"{op}: group, vocab_size and sequence_dim must be None for a DTensor {name},"
                    " whose mesh and shape determine them"
                )
            mesh = sharded.device_mesh
            _check_placement(op, name, sharded, loss.dim)
            group_name, V = mesh.get_group().group_name, sharded.shape[loss.dim]
            shard = VocabShard.of_rank(group_name, mesh.get_local_rank(), mesh.size(), V)
            return RankReader(op, shard, mesh)
        if group is None or vocab_size is None:
            missing = "group" if group is None else "vocab_size"
            raise ValueError(
                f"{op}: {name} must be a DTensor, or group and vocab_size be given; {missing} is"
                " None"
            )
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        if rank < 0:
            raise ValueError(f"{op}: group must have this process as a member")
        return RankReader(op, VocabShard.of_rank(group.group_name, rank, ranks, vocab_size), None)

    def words(self, name: str, tensor: Tensor, dim: int) -> Tensor:
        """Return the rank's words of a tensor that is sharded over words."""
        shard = self.shard
        if isinstance(tensor, DTensor):
            self._check_mesh(name, tensor)
            _check_placement(self.op, name, tensor, dim)
            tensor = tensor.to_local()
        if tensor.dim() == 0 or tensor.shape[dim] != shard.held:
            raise ValueError(
                f"{self.op}: {name} must have {shard.held} words on rank {shard.rank} of"
                f" {shard.ranks}, as torch.chunk splits {shard.V}, got shape {tuple(tensor.shape)}"
            )
        return tensor

    def whole(self, name: str, tensor: Tensor) -> Tensor:
        """Return a whole tensor, of a DTensor gathered. Every rank computes its whole gradient."""
        if not isinstance(tensor, DTensor):
            return tensor
        self._check_mesh(name, tensor)
        whole = tensor.redistribute(placements=[Replicate()])
        return whole.to_local(grad_placements=[Replicate()])

    def rows(self, name: str, x: Tensor, sequence_dim: int | None) -> tuple[Tensor, bool]:
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

    def lora_a(self, name: str, lora_a: Tensor, sums_x: bool) -> Tensor:
        """Return the whole lora_a. If each rank keeps its term of x's gradient, it has a term of
        lora_a's too, and these are summed here; otherwise that of lora_x is summed with x's."""
        if isinstance(lora_a, DTensor):
            if lora_a.device_mesh != self.mesh or tuple(lora_a.placements) != (Replicate(),):
                raise ValueError(
                    f"{self.op}: {name} must be replicated on the mesh of the sharded argument,"
                    f" {self.mesh}, or a plain tensor, got {lora_a.placements} on"
                    f" {lora_a.device_mesh}"
                )
            lora_a = lora_a.to_local()
        return lora_a if sums_x else Replicated.apply(lora_a, self.shard.group)

    def _check_mesh(self, name: str, tensor: DTensor) -> None:
        if tensor.device_mesh != self.mesh:
            raise ValueError(
                f"{self.op}: {name} must be on the mesh of the sharded argument, {self.mesh}, or a"
                f" plain tensor, got {tensor.device_mesh}"
            )


def _head(op: str, arguments: dict[str, Any], side: str) -> dict[str, Tensor | None]:
    """Return the tensors of a head by their names, cast as autocast casts them. `side` starts the
    names. The arguments may have lora_x = x @ lora_a.T in place of lora_a."""
    x, weight, bias = cast_as_linear(*(arguments[f"{side}{name}"] for name in HEAD[:3]))
    lora_x, lora_b = arguments.get(f"{side}lora_x"), arguments[f"{side}lora_b"]
    if f"{side}lora_a" in arguments:
        lora_a, scale = (arguments[f"{side}{name}"] for name in ("lora_a", "lora_scale"))
        lora_x, lora_b = lora_input(op, x, weight, lora_a, lora_b, scale, side)
    elif lora_x is not None and lora_b is not None:
        lora_x, lora_b = narrowed(lora_x, lora_b, x.dtype)
    head = (x, weight, bias, lora_x, lora_b)
    return {f"{side}{name}": tensor for name, tensor in zip(HEAD, head, strict=True)}


def _check_target(op: str, rows: Tensor, target: Tensor) -> None:
    """Check the target, for a rank without words too, which calls no op that would check it."""
    if target.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{op}: target must be int64 or int32, got {target.dtype}")
    given, of_words = target.shape, op.endswith("log_prob") and target.dim() == rows.dim()
    if (given[:-1] if of_words else given) != rows.shape[:-1] or (of_words and given[-1] < 1):
        raise ValueError(
            f"{op}: target must have the shape of the whole input but for its last dimension,"
            f" {tuple(rows.shape[:-1])}, got {tuple(target.shape)}"
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
