"""Means of losses over sharded rows: the value and the gradients of one process, and what moves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication

import liger_ops
import ranks
from cross_entropy_cases import TERMS
from ranks import recorded

pytestmark = pytest.mark.device_kernels

SECONDS = 240
V, D = 7, 4
# Of the tensors with rows, the dimensions are (rows, tokens of a row) and others that are whole.
PER_ROW = ("logits", "target", "token_weight", "x", "input", "p", "q", "shift_labels",
           "student_x", "teacher_x", "teacher_logits")  # fmt: skip


@pytest.mark.parametrize("count", [2, 4])
def test_means(count: int, tmp_path: Path) -> None:
    checks: dict[int, list[Callable[[], None]]] = {
        2: [rows_of_two_devices, nothing_counts, compiled],
        4: [a_device_without_rows, on_a_square],
    }
    assert not ranks.failures(checks[count], count, tmp_path, SECONDS)


def calls(rows: int) -> dict[str, tuple[dict[str, Tensor], dict[str, Any]]]:
    """The tensors by their names, and the options, of a call of each loss."""
    shape = (rows, 3)
    target = torch.randint(0, V, shape)
    target[rows // 2], target[0, 1] = -100, -100
    weights = {"weight": torch.rand(V), "token_weight": torch.rand(shape)}
    logits, x, teacher = torch.randn(*shape, V), torch.randn(*shape, D), torch.randn(*shape, V)
    head = {"x": x, "weight": torch.randn(V, D), "target": target}
    student = {"student_x": x, "student_weight": torch.randn(V, D), "teacher_logits": teacher}
    log_q, log_p = logits.log_softmax(-1), teacher.log_softmax(-1)
    labels = {"shift_labels": target}
    return {
        "cross_entropy": ({"logits": logits, "target": target}, {}),
        "cross_entropy-all": ({"logits": logits, "target": target, **weights}, TERMS),
        "linear_cross_entropy": (head, {}),
        "linear_cross_entropy-all": (
            {**head, "class_weight": weights["weight"], "token_weight": weights["token_weight"],
             "bias": torch.randn(V)}, {**TERMS, "chunk_bytes": 64},
        ),
        "linear_divergence": ({**student, "target": target}, {"hard_weight": 0.5}),
        "linear_divergence-all": ({**student, "token_weight": weights["token_weight"]}, {}),
        "linear_divergence-each": (student, {"kind": "reverse_kl"}),
        "jsd": ({"input": log_q, "target": log_p, **labels}, {}),
        "jsd-each": ({"input": log_q, "target": log_p}, {}),
        "kl_div": ({"input": log_q, "target": log_p.exp()}, {"reduction": "mean"}),
        "kl_div-batch": ({"input": log_q, "target": log_p.exp()}, {}),
        "tvd": ({"p": log_q.exp(), "q": log_p.exp(), **labels}, {"reduction": "mean"}),
        "tvd-batch": ({"p": log_q.exp(), "q": log_p.exp(), **labels}, {}),
    }  # fmt: skip


# Numbers in the all-reduces of forward and backward.
MOVED: dict[str, tuple[list[int], list[int]]] = {
    "cross_entropy": ([3], []),
    "linear_cross_entropy": ([3], []),
    "linear_divergence": ([4], [1]),
    "linear_divergence-all": ([3], [1]),
    # The number of tokens is known.
    "linear_divergence-each": ([2], []),
    "jsd": ([1, 1], [1]),
    "tvd": ([1, 1], [1]),
    "jsd-each": ([1], []),
    "kl_div": ([1], []),
}
TEACHER = ("teacher_logits", "teacher_x", "teacher_weight", "class_weight", "token_weight")


def leaves(tensors: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    without = TEACHER + (("weight",) if name.startswith("cross") else ())
    return {
        key: tensor.detach()
        .clone()
        .requires_grad_(tensor.is_floating_point() and key not in without)
        for key, tensor in tensors.items()
    }


def run(name: str, tensors: dict[str, Tensor], options: dict[str, Any]) -> tuple[Any, ...]:
    """The results of a call, the gradients of its tensors, and the collectives of both passes."""
    function = getattr(liger_ops, name.split("-")[0])
    results, forward = recorded(lambda: function(**tensors, **options))
    results = results if isinstance(results, tuple) else (results,)
    wanted = [tensor for tensor in tensors.values() if tensor.requires_grad]
    given = [1.5 * torch.ones_like(results[0])]
    gradients, backward = recorded(
        lambda: torch.autograd.grad(results[0], wanted, given, retain_graph=True)
    )
    return results, gradients, forward, backward


def over(mesh: Any, tensors: dict[str, Tensor], place: Callable[[Tensor], list[Any]]) -> Any:
    """The tensors with those that have rows sharded."""
    found = {}
    for key, tensor in tensors.items():
        rows = key in PER_ROW and tensor.dim() > 1
        placements = place(tensor) if rows else [Replicate()] * mesh.ndim
        sharded = distribute_tensor(tensor.detach(), mesh, placements)
        found[key] = sharded.requires_grad_(tensor.requires_grad)
    return found


def compare(mesh: Any, name: str, place: Callable[[Tensor], list[Any]], call: Any) -> Any:
    tensors, options = call
    tensors = {
        key: tensor.to(ranks.EXACT[0]) if tensor.is_floating_point() else tensor
        for key, tensor in tensors.items()
    }
    results, gradients, _, _ = run(name, leaves(tensors, name), options)
    sharded = over(mesh, leaves(tensors, name), place)
    found, found_gradients, forward, backward = run(name, sharded, options)
    for value, truth in zip((*found, *found_gradients), (*results, *gradients), strict=True):
        assert (value is None) == (truth is None)
        if truth is not None:
            assert isinstance(value, DTensor)
            torch.testing.assert_close(
                value.full_tensor(), truth, rtol=ranks.EXACT[1], atol=ranks.EXACT[1], equal_nan=True
            )
            if not truth.dim():
                # What a user prints is the mean.
                assert value.placements == (Replicate(),) * mesh.ndim
    return forward, backward, found_gradients


def rows_of_two_devices() -> None:
    mesh = ranks.mesh()
    for name, call in calls(5).items():
        for dim in (0, 1):
            forward, backward, gradients = compare(
                mesh, name, lambda _, dim=dim: [Shard(dim)], call
            )
            assert gradients[0].placements == (Shard(dim),)
            if name in MOVED and ranks.EXACT[0] is torch.float64:
                assert [size for _, size in forward] == [8 * n for n in MOVED[name][0]], name
                assert [size for _, size in backward] == [8 * n for n in MOVED[name][1]], name
        if "target" in call[0] and name in ("jsd", "kl_div"):
            # The terms are of one class each.
            compare(mesh, name, lambda t: [Shard(2)] if t.dim() == 3 else [Replicate()], call)


def nothing_counts() -> None:
    """The mean is NaN or 0, as on one device, and the gradients are 0."""
    mesh = ranks.mesh()
    for name, (tensors, options) in calls(5).items():
        label = "shift_labels" if "shift_labels" in tensors else "target"
        if label in tensors and not tensors[label].is_floating_point():
            ignored = {**tensors, label: torch.full_like(tensors[label], -100)}
            *_, gradients = compare(mesh, name, lambda _: [Shard(0)], (ignored, options))
            assert not any(gradient.full_tensor().any() for gradient in gradients)
    tensors, _ = calls(5)["cross_entropy"]
    logits, target = (distribute_tensor(t, mesh, [Shard(0)]) for t in tensors.values())
    # Plain tensors are replicated where PyTorch is told so.
    student, options = calls(5)["linear_divergence"]
    x = distribute_tensor(student["student_x"], mesh, [Shard(0)])
    with implicit_replication():
        loss = liger_ops.linear_divergence(**{**student, "student_x": x}, **options)[0]
    expected = liger_ops.linear_divergence(**student, **options)[0]
    torch.testing.assert_close(loss.full_tensor(), expected)
    total = liger_ops.cross_entropy_forward(logits, target)[4]
    assert total.item() == (tensors["target"] != -100).sum().item()


def compiled() -> None:
    mesh = ranks.mesh()
    for name in ("linear_cross_entropy-all", "linear_divergence", "jsd"):
        tensors, options = calls(5)[name]
        op = getattr(liger_ops, name.split("-")[0])

        def loss_of(op: Any = op, **given: Any) -> Tensor:
            # PyTorch's compiler needs a gradient of every DTensor that a graph returns.
            found = op(**given)
            return found[0] if isinstance(found, tuple) else found

        function = torch.compile(loss_of, backend="aot_eager", fullgraph=True)
        sharded = over(mesh, leaves(tensors, name), lambda _: [Shard(0)])
        whole = leaves(tensors, name)
        results, gradients, *_ = run(name, whole, options)
        loss = function(**sharded, **options)
        wanted = [tensor for tensor in sharded.values() if tensor.requires_grad]
        found_gradients = torch.autograd.grad(loss, wanted, 1.5 * torch.ones_like(loss))
        for value, truth in zip((loss, *found_gradients), (results[0], *gradients), strict=True):
            torch.testing.assert_close(value.full_tensor(), truth, rtol=1e-5, atol=1e-5)


def a_device_without_rows() -> None:
    """Shards of 2, 2, 1 and no rows; and of one row and none."""
    mesh = ranks.mesh()
    for rows in (5, 1):
        for name, call in calls(rows).items():
            compare(mesh, name, lambda _: [Shard(0)], call)


def on_a_square() -> None:
    mesh = ranks.mesh(2, 2)
    ways = ([Shard(0), Shard(1)], [Shard(0), Shard(0)], [Replicate(), Shard(0)])
    for name in ("cross_entropy-all", "linear_cross_entropy-all", "linear_divergence", "jsd"):
        call = calls(5)[name]
        for way in ways:
            compare(mesh, name, lambda _, way=way: way, call)
