"""A head of the rank's words with its LoRA, whose lora_b is sharded over words."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from ...ops.heads.head import Head, cast_as_linear
from ...ops.heads.lora import lora_input
from ..vocab_parallel.collectives import Replicated
from .arguments import Arguments


def head_of(
    op: str, given: Arguments, lora_a: Tensor | None, lora_b: Tensor | None, lora_scale: float,
    prefix: str = "",
) -> Head:  # fmt: skip
    """The head of a call, cast as autocast casts it. `prefix` is that of the arguments' names."""
    assert given.x is not None
    x, weight, bias = cast_as_linear(given.x, given.sharded, given.bias)
    if lora_b is not None:
        lora_b = given.also_sharded(op, f"{prefix}lora_b", lora_b, 0)
    lora_a = _whole(op, f"{prefix}lora_a", lora_a, given)
    if lora_a is not None and not given.shard.sums_x:
        # Each rank's gradient of lora_x is then a part of the sum.
        lora_a = Replicated.apply(lora_a, given.shard.group)
    lora = lora_input(op, x, weight, lora_a, lora_b, lora_scale, prefix)
    return Head(x, weight, bias, *lora)


def head_of_input(op: str, given: Arguments, lora_x: Tensor | None, lora_b: Tensor | None) -> Head:
    """The head of a call that is given lora_x, which has the rows of x, in place of lora_a."""
    assert given.x is not None
    x, weight, bias = cast_as_linear(given.x, given.sharded, given.bias)
    if lora_x is None or lora_b is None:
        return Head(x, weight, bias, None, None)
    lora_x = given.also_rows(op, "lora_x", lora_x, None)
    lora_b = given.also_sharded(op, "lora_b", lora_b, 0)
    return Head(x, weight, bias, lora_x.to(x.dtype), lora_b.to(x.dtype))


def _whole(op: str, name: str, tensor: Tensor | None, given: Arguments) -> Tensor | None:
    if not isinstance(tensor, DTensor):
        return tensor
    if tensor.device_mesh != given.mesh or tuple(tensor.placements) != (Replicate(),):
        raise ValueError(
            f"{op}: {name} must be replicated on the mesh of the sharded argument, {given.mesh}, or"
            f" a plain tensor, got {tensor.placements} on {tensor.device_mesh}"
        )
    return tensor.to_local()
