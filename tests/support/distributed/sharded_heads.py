"""Calls of losses with whole tensors and with one rank's parts of them, and their comparison."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import liger_ops
import ranks
from liger_ops import distributed
from op_table import OPS
from op_under_test import OpUnderTest

D = 6
FLOAT64 = {"rtol": 1e-11, "atol": 1e-12}
FLOAT32 = {"rtol": 1e-5, "atol": 1e-5}


def group_of(V: int) -> dict[str, Any]:
    return {"group": dist.group.WORLD, "vocab_size": V}


def dims_of(names: Iterable[str], sequence_dim: int | None = None) -> dict[str, int | None]:
    """Return the dimension along which each argument is sharded, None for a whole one."""
    words = {"weight": 0, "bias": 0, "lora_b": 0, "logits": -1, "x": sequence_dim}
    return {
        name: words.get(name.removeprefix("student_").removeprefix("teacher_")) for name in names
    }


def parts_of(inputs: dict[str, Tensor], dims: dict[str, int | None]) -> dict[str, Tensor]:
    """Return the tensors as this rank has them."""
    return {name: here(tensor, dims[name]) for name, tensor in inputs.items()}


def here(tensor: Tensor, dim: int | None) -> Tensor:
    return leaf(tensor) if dim is None else part(tensor, dim)


def part(tensor: Tensor, dim: int = 0) -> Tensor:
    """Return this rank's part of a tensor, which may be empty, as a leaf."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    size = -(-tensor.shape[dim] // ranks)
    first = min(rank * size, tensor.shape[dim])
    count = min(size, tensor.shape[dim] - first)
    return leaf(tensor.narrow(dim, first, count))


def leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.is_floating_point())


def tokens(
    V: int, dtype: torch.dtype, ignored: int = -100, rows: int = 4
) -> tuple[dict[str, Tensor], Tensor]:
    """Draw x, weight and bias by name, and target.

    All tokens of the first row are ignored, so that a rank may have no others, and one more token.
    """
    x, weight, bias = torch.randn(rows, 3, D), torch.randn(V, D), torch.randn(V)
    target = torch.randint(0, V, (rows, 3))
    target[0] = ignored
    target[2, 1] = ignored
    head = {"x": x, "weight": weight, "bias": bias}
    return {name: leaf(tensor.to(dtype)) for name, tensor in head.items()}, target


def scalar(results: Tensor | tuple[Tensor, ...]) -> Tensor:
    """Reduce results to a number, so that each element has another gradient."""
    results = results if isinstance(results, tuple) else (results,)
    results = tuple(r for r in results if r is not None)
    factors = (torch.arange(1, r.numel() + 1, dtype=r.dtype).reshape(r.shape) for r in results)
    return sum((r * f / r.numel()).sum() for r, f in zip(results, factors, strict=True))


def case_of(op: OpUnderTest, V: int, dtype: torch.dtype, **fields: Any) -> Any:
    """Return the sample of an entry, with (4, 3) tokens and V words."""
    sizes = {"shape": (4, 3), "V": V, "W": V, **fields}
    # The case of a head has these fields; that of other losses has them in its shape.
    of_head = {n: size for n, size in sizes.items() if hasattr(op.case_type, n)}
    return op.sample(dtype, **(of_head or {"shape": (4, 3, V), **fields}))


def loss_call(
    name: str, V: int, dtype: torch.dtype, **fields: Any
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors with gradients of an entry's loss, and its other arguments, by name.

    A head has its LoRA. All tokens of the first row are ignored, so that a rank may have no others.
    """
    op = OPS[name]
    case = case_of(op, V, dtype, **({"chunk_bytes": 64} if OPS[name].case_type else {}) | fields)
    # Values are drawn on the CPU.
    with torch.device("cpu"):
        arguments = op.public_arguments(case)
    if arguments.get("target") is not None:
        arguments["target"][0] = arguments["ignore_index"]
    for side, rank in (("", "rank"), ("student_", "rank"), ("teacher_", "teacher_rank")):
        if arguments.get(f"{side}x") is not None and getattr(case, rank):
            a, b = (
                torch.randn(n, dtype=dtype) for n in ((2, arguments[f"{side}x"].shape[-1]), (V, 2))
            )
            of_side = {f"{side}lora_a": a, f"{side}lora_b": b}
            arguments |= of_side if side == "teacher_" else {n: leaf(x) for n, x in of_side.items()}
            arguments[f"{side}lora_scale"] = 0.7
    inputs = {n: x for n, x in arguments.items() if isinstance(x, Tensor) and x.requires_grad}
    return inputs, {n: x for n, x in arguments.items() if n not in inputs and x is not None}


def dims_of_call(
    inputs: dict[str, Tensor], given: dict[str, Any], sequence_dim: int | None
) -> dict[str, int | None]:
    """Return the dimensions of the tensors with gradients and of a teacher's, as `dims_of` does."""
    taught = (n for n, x in given.items() if n.startswith("teacher") and isinstance(x, Tensor))
    return dims_of((*inputs, *taught), sequence_dim)


def compare(
    loss: str, inputs: dict[str, Tensor], dims: dict[str, int | None], options: dict[str, Any],
    sharding: dict[str, Any], **tolerance: float,
) -> None:  # fmt: skip
    """Compare the results and gradients of a loss of whole inputs with those of sharded ones.

    dims has the dimension along which each input is sharded, None for a whole one. Compared are the
    function of process groups, with a rank's parts and with DTensors, and the one-device function
    with DTensors.
    """
    parts = parts_of(inputs, dims)
    options = {
        name: value.to(ranks.DEVICE) if isinstance(value, Tensor) else value
        for name, value in options.items()
    }
    taught = {n: here(x, dims[n]).detach() for n, x in options.items() if n in dims}
    got = getattr(distributed, loss)(**parts, **options | taught, **sharding)
    check_gradients(
        getattr(liger_ops, loss)(**inputs, **options), got, inputs, parts, dims, **tolerance
    )
    compare_dtensors(loss, inputs, dims, options, **tolerance)


def compare_dtensors(
    loss: str, inputs: dict[str, Tensor], dims: dict[str, int | None], options: dict[str, Any],
    **tolerance: float,
) -> None:  # fmt: skip
    """Compare both functions of DTensors with the loss of whole inputs.

    The function of process groups gathers tensors without a gradient, and a teacher's
    log-probabilities: they are sharded along their rows.
    """
    expected = getattr(liger_ops, loss)(**inputs, **options)
    of_whole = torch.autograd.grad(scalar(expected), list(inputs.values()))
    for namespace in (distributed, liger_ops):
        rows = 0 if namespace is distributed else None
        tensors = {name: value for name, value in options.items() if isinstance(value, Tensor)}
        sharded = {name: rows if value.dim() else None for name, value in tensors.items()} | dims
        if "teacher_log_prob" in inputs:
            sharded["teacher_log_prob"] = rows
        constants = {name: over_ranks(value, sharded[name]) for name, value in tensors.items()}
        placed = {
            name: over_ranks(tensor, sharded[name]).requires_grad_()
            for name, tensor in inputs.items()
        }
        got = getattr(namespace, loss)(**placed, **{**options, **constants})
        results, wanted = (x if isinstance(x, tuple) else (x,) for x in (got, expected))
        values = tuple(map(full, results))
        torch.testing.assert_close(values, wanted, **tolerance)
        grads = torch.autograd.grad(scalar(values), list(placed.values()))
        for tensor, whole, grad in zip(placed.values(), of_whole, grads, strict=True):
            assert namespace is liger_ops or grad.placements == tensor.placements
            torch.testing.assert_close(full(grad), whole, **tolerance)


def over_ranks(tensor: Tensor, dim: int | None) -> Any:
    placement = Replicate() if dim is None else Shard(dim % tensor.dim())
    return distribute_tensor(tensor.detach(), ranks.mesh(), [placement])


def full(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def check_gradients(
    expected: Any, got: Any, inputs: dict[str, Tensor], parts: dict[str, Tensor],
    dims: dict[str, int | None], **tolerance: float,
) -> None:  # fmt: skip
    """Compare results, the gradients of the first result, and those of all results.

    The first result's are compared twice: only the first backward uses gradients that the forward
    has computed.
    """
    sides = [x if isinstance(x, tuple) else (x,) for x in (expected, got)]
    assert [x is None for x in sides[0]] == [x is None for x in sides[1]]
    sides = [tuple(x for x in side if x is not None) for side in sides]
    torch.testing.assert_close(sides[1], sides[0], **tolerance)
    # Words have no gradient.
    sides = [tuple(x for x in side if x.is_floating_point()) for side in sides]
    for count in (1, 1, len(sides[0])):
        of_whole, of_parts = (
            torch.autograd.grad(scalar(side[:count]), [*leaves.values()], retain_graph=True)
            for side, leaves in zip(sides, (inputs, parts), strict=True)
        )
        for name, whole, grad in zip(inputs, of_whole, of_parts, strict=True):
            assert type(grad) is Tensor
            torch.testing.assert_close(grad, here(whole, dims[name]).detach(), **tolerance)
