"""The one-device losses of DTensors whose vocabulary is sharded: the values and gradients of one
process, without the logits or the weight of another device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

import liger_ops
import ranks
from collectives import recorded

SECONDS = 240
# 13 words are 7 and 6 on two devices; of 5 words, four have 2, 2, 1 and 0.
SIZES = (13, 5)
D = 6
WHOLE = Replicate()
# The dimension of words of each tensor.
WORDS = {"logits": 2, "weight": 0, "bias": 0, "lora_b": 0, "student_weight": 0,
         "student_logits": 2, "teacher_logits": 2, "teacher_weight": 0, "student_bias": 0}  # fmt: skip
# What has rows: sharded over the other dimension of a square.
ROWS = ("x", "logits", "target", "token_weight", "lora_x", "student_x", "teacher_x",
        "student_logits", "teacher_logits")  # fmt: skip
NO_GRADIENT = ("class_weight", "token_weight", "teacher_x", "teacher_weight")
TERMS = {"label_smoothing": 0.1, "lse_square_scale": 0.01, "softcap": 2.0, "logit_scale": 0.7}
Call = tuple[str, dict[str, Tensor], dict[str, Any]]


@pytest.mark.parametrize("count", [2, 4])
def test_losses(count: int, tmp_path: Path) -> None:
    checks: dict[int, list[Callable[[], None]]] = {
        2: [every_loss, what_moves, compiled],
        4: [a_device_without_words, rows_and_words],
    }
    assert not ranks.failures(checks[count], count, tmp_path, SECONDS)


def calls(V: int) -> list[Call]:
    """The op, its tensors and its options. All of the first row is ignored."""
    shape = (4, 3)
    target = torch.randint(0, V, shape)
    target[0], target[2, 1] = -100, -100
    x, weight = torch.randn(*shape, D), torch.randn(V, D)
    logits = {"logits": 3 * torch.randn(*shape, V), "target": target}
    weights = {"token_weight": torch.rand(shape)}
    head = {"x": x, "weight": weight, "target": target}
    lora = {"lora_x": torch.randn(*shape, 2), "lora_b": torch.randn(V, 2)}
    all_of_head = {**head, **weights, "class_weight": torch.rand(V), "bias": torch.randn(V), **lora}
    chunked = {**TERMS, "chunk_bytes": 64}
    of_sum = {"reduction": "sum", "gradient_mask": [True] * 5}
    # A word is ignored.
    other = {**logits, "target": torch.where(target == -100, 2, target)}
    return [
        ("cross_entropy_forward", logits, {}),
        ("cross_entropy_forward", {**logits, **weights, "weight": torch.rand(V)}, TERMS),
        ("cross_entropy_forward", other, {"reduction": "none", "ignore_index": 2, **TERMS}),
        ("linear_cross_entropy_forward", head, {"gradient_mask": [True, True, False, False, False]}),
        ("linear_cross_entropy_forward", all_of_head, {**chunked, **of_sum}),
        ("linear_cross_entropy_forward", all_of_head, {**chunked, "reduction": "none"}),
    ]  # fmt: skip


def leaves(call: Call, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    op, tensors, _ = call
    without = NO_GRADIENT + (("weight",) if op.startswith("cross") else ())
    return {
        name: (tensor.to(dtype) if tensor.is_floating_point() else tensor)
        .clone()
        .requires_grad_(tensor.is_floating_point() and name not in without)
        for name, tensor in tensors.items()
    }


def over(mesh: Any, call: Call, leaves: dict[str, Tensor], rows: Any = WHOLE) -> dict[str, Any]:
    """The tensors with their words over the last dimension of the mesh, and rows over the first of
    two, or those of x over the same."""
    found = {}
    for name, tensor in leaves.items():
        dim = None if call[0].startswith("cross") and name == "weight" else WORDS.get(name)
        placements = [WHOLE if dim is None else Shard(dim)]
        if mesh.ndim == 2:
            placements = [Shard(0) if name in ROWS else WHOLE, *placements]
        elif name in ("x", "lora_x"):
            placements = [rows]
        sharded = distribute_tensor(tensor.detach(), mesh, placements)
        found[name] = sharded.requires_grad_(tensor.requires_grad)
    return found


def outcome(call: Call, tensors: dict[str, Any], loss_alone: bool) -> tuple[Any, Any]:
    """The results, and the gradients of a sum of the differentiable ones."""
    op, _, options = call
    results = getattr(liger_ops, op)(**tensors, **options)
    results = results if isinstance(results, tuple) else (results,)
    used = [y for y in results[: 1 if loss_alone else len(results)] if y is not None]
    # A mean of nothing else.
    total = sum(((i + 1) * y).sum() for i, y in enumerate(y for y in used if y.requires_grad))
    wanted = [tensor for tensor in tensors.values() if tensor.requires_grad]
    return results, torch.autograd.grad(total, wanted)


def compare(call: Call, mesh: Any, rows: Any = WHOLE) -> None:
    for loss_alone in (True, False):
        whole = leaves(call)
        expected, gradients = outcome(call, whole, loss_alone)
        given = over(mesh, call, whole, rows)
        found, found_gradients = outcome(call, given, loss_alone)
        wanted = [tensor for tensor in given.values() if tensor.requires_grad]
        for gradient, tensor in zip(found_gradients, wanted, strict=True):
            for had, has in zip(tensor.placements, gradient.placements, strict=True):
                assert has == had or (had == WHOLE and has.is_partial()), (call[0], had, has)
        for value, truth in zip((*found, *found_gradients), (*expected, *gradients), strict=True):
            assert (value is None) == (truth is None)
            if truth is not None:
                assert isinstance(value, DTensor)
                torch.testing.assert_close(value.full_tensor(), truth, rtol=1e-9, atol=1e-9)


def every_loss() -> None:
    mesh = init_device_mesh("cpu", (2,))
    for V in SIZES:
        for call in calls(V):
            compare(call, mesh)
    for call in calls(130):
        # Rows over the same devices: those of x are fewer bytes than the weight.
        compare(call, mesh, Shard(1))


def a_device_without_words() -> None:
    mesh = init_device_mesh("cpu", (4,))
    for call in calls(5):
        compare(call, mesh)


def rows_and_words() -> None:
    """Data and tensor parallelism."""
    mesh = init_device_mesh("cpu", (2, 2))
    for call in calls(13):
        compare(call, mesh)


def what_moves() -> None:
    """A few numbers of each token; and x's rows and their gradient, where they are sharded."""
    mesh, V, M = init_device_mesh("cpu", (2,)), 130, 12
    gather, scatter = "all_gather_into_tensor", "reduce_scatter_tensor"
    for call in calls(V):
        op, tensors, options = call
        numbers = (gather, 4 * M * (3 if "label_smoothing" in options else 2))
        rows_of = [4 * M * tensors[name].shape[-1] for name in ("x", "lora_x") if name in tensors]
        for rows in (WHOLE, Shard(0)):
            given = over(mesh, call, leaves(call, torch.float32), rows)
            results, forward = recorded(lambda: getattr(liger_ops, op)(**given, **options))  # noqa: B023
            wanted = [tensor for tensor in given.values() if tensor.requires_grad]
            loss = results[0].sum()
            _, backward = recorded(lambda: torch.autograd.grad(loss, wanted))  # noqa: B023
            moved = [] if rows == WHOLE else [(gather, size // 2) for size in rows_of]
            again = moved if options.get("reduction") == "none" else []
            back = [] if rows == WHOLE else [(scatter, size) for size in rows_of]
            assert total(forward) == total([*moved, numbers]), (op, rows, forward)
            assert total(backward) == total([*again, *back]), (op, rows, backward)


def total(moved: list[tuple[str, int]]) -> dict[str, int]:
    """The bytes of each collective, of all chunks together."""
    sums: Counter[str] = Counter()
    for name, size in moved:
        sums[name] += size
    return dict(sums)


def compiled() -> None:
    mesh = init_device_mesh("cpu", (2,))
    for i in (1, 4):
        call = calls(13)[i]
        op, _, options = call
        whole = leaves(call, torch.float32)
        expected, gradients = outcome(call, whole, True)
        given = over(mesh, call, whole)
        function = torch.compile(
            lambda op=op, options=options, **given: getattr(liger_ops, op)(**given, **options)[0],
            backend="aot_eager", fullgraph=True,
        )  # fmt: skip
        loss = function(**given)
        wanted = [tensor for tensor in given.values() if tensor.requires_grad]
        found = (loss, *torch.autograd.grad(loss, wanted))
        for value, truth in zip(found, (expected[0], *gradients), strict=True):
            torch.testing.assert_close(value.full_tensor(), truth, rtol=1e-5, atol=1e-5)
