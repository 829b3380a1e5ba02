"""The ops of DTensors whose vocabulary is sharded: all results, and the gradients, of one process,
without the logits or the weight of another device. `sharded_heads` compares the public ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import liger_ops
import ranks
from liger_ops import distributed
from ranks import recorded

pytestmark = pytest.mark.device_kernels

SECONDS = 240
D = 6
WHOLE = Replicate()
# The dimension of words of each tensor.
WORDS = {
    "logits": 2, "student_logits": 2, "teacher_logits": 2,
    "weight": 0, "bias": 0, "lora_b": 0, "student_weight": 0, "student_bias": 0,
    "student_lora_b": 0, "teacher_weight": 0,
}  # fmt: skip
# What has rows: sharded over the other dimension of a square.
ROWS = (
    "x", "logits", "target", "teacher_ids", "token_weight", "lora_x", "student_x",
    "student_lora_x", "teacher_x", "student_logits", "teacher_logits",
)  # fmt: skip
# The rows of a head, which may be sharded over the devices that share its words.
HEAD_ROWS = ("x", "lora_x", "student_x", "student_lora_x", "teacher_x")
NO_GRADIENT = ("class_weight", "token_weight", "teacher_x", "teacher_weight")
# Words that a teacher lists of a token.
LISTED = 3
TERMS = {"label_smoothing": 0.1, "lse_square_scale": 0.01, "softcap": 2.0, "logit_scale": 0.7}
Call = tuple[str, dict[str, Tensor], dict[str, Any]]


@pytest.mark.parametrize("count", [2, 4])
def test_losses(count: int, tmp_path: Path) -> None:
    checks: dict[int, list[Callable[[], None]]] = {
        2: [every_loss, what_moves, redistributed, out_of_range, compiled],
        4: [rows_and_words],
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
    # Words in no order, of which all or some of a token's may be on one device, or none given.
    ids = torch.rand(*shape, V).argsort(-1)[..., :LISTED]
    ids[0], ids[2, 1, 1:], ids[1, 0] = -1, -1, torch.arange(LISTED)
    two = {"gradient_mask": [True] * 2 + [False] * 3}
    both = {"student_logits": logits["logits"], "teacher_logits": 3 * torch.randn(*shape, V)}
    student = {"student_x": x, "student_weight": weight, "teacher_x": torch.randn(*shape, 4)}
    teacher = {"teacher_weight": torch.randn(V, 4)}
    of_student = {
        "student_x": x, "student_weight": weight, "teacher_logits": both["teacher_logits"],
        "target": target, **weights, "student_bias": all_of_head["bias"],
        "student_lora_x": lora["lora_x"], "student_lora_b": lora["lora_b"],
    }  # fmt: skip
    mixed = {"soft_weight": 0.3, "hard_weight": 0.7, "student_softcap": 2.0, "chunk_bytes": 128}
    return [
        ("cross_entropy_forward", logits, {}),
        ("cross_entropy_forward", {**logits, **weights, "weight": torch.rand(V)}, TERMS),
        ("cross_entropy_forward", other, {"reduction": "none", "ignore_index": 2, **TERMS}),
        ("linear_cross_entropy_forward", head, two),
        ("linear_cross_entropy_forward", all_of_head, {**chunked, **of_sum}),
        ("linear_cross_entropy_forward", all_of_head, {**chunked, "reduction": "none"}),
        ("log_prob_forward", logits, {"temperature": 0.7, "softcap": 2.0}),
        ("linear_log_prob_forward", {**head, **lora, "bias": all_of_head["bias"]}, {}),
        ("divergence_forward", {**both, "target": target}, {"kind": "jsd", "beta": 0.3}),
        ("divergence_forward", both, {"kind": "reverse_kl", "teacher_temperature": 2.0}),
        ("linear_divergence_forward", {**student, **teacher}, {"kind": "forward_kl", **two}),
        ("linear_divergence_forward", of_student, {**mixed, **of_sum}),
        ("linear_divergence_forward", of_student, {**mixed, "reduction": "none", "kind": "cosine"}),
        ("linear_top_k_divergence_forward", {"x": x, "weight": weight, "teacher_ids": ids}, {}),
        (
            "linear_top_k_divergence_forward",
            {"x": x, "weight": weight, "teacher_ids": ids, "bias": all_of_head["bias"], **lora},
            {"temperature": 0.7, "softcap": 2.0, "logit_scale": 0.7, "chunk_bytes": 64},
        ),
    ]  # fmt: skip


def leaves(call: Call, dtype: torch.dtype = ranks.EXACT[0]) -> dict[str, Tensor]:
    op, tensors, _ = call
    without = NO_GRADIENT + (("weight",) if op.startswith("cross") else ())
    without += ("teacher_logits",) if op.startswith("linear") else ()
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
        elif name in HEAD_ROWS:
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
    total = sum(((i + 1) * y).sum() for i, y in enumerate(y for y in used if y.requires_grad))
    wanted = [tensor for tensor in tensors.values() if tensor.requires_grad]
    return results, torch.autograd.grad(total, wanted)


def compare(
    call: Call, mesh: Any, rows: Any = WHOLE, over_words: bool = True, each: bool = False
) -> None:
    """Compare the results, and the gradients of the first and, for each, of a sum of all."""
    for loss_alone in (True, False)[: 1 + each]:
        whole = leaves(call)
        expected, gradients = outcome(call, whole, loss_alone)
        given = over(mesh, call, whole, rows)
        found, found_gradients = outcome(call, given, loss_alone)
        wanted = [tensor for tensor in given.values() if tensor.requires_grad]
        placed = wanted if over_words else ()
        for gradient, tensor in zip(found_gradients, placed, strict=over_words):
            for had, has in zip(tensor.placements, gradient.placements, strict=True):
                assert has == had or (had == WHOLE and has.is_partial()), (call[0], had, has)
        for value, truth in zip((*found, *found_gradients), (*expected, *gradients), strict=True):
            assert (value is None) == (truth is None)
            if truth is not None:
                assert isinstance(value, DTensor)
                torch.testing.assert_close(
                    value.full_tensor(), truth, rtol=ranks.EXACT[1], atol=ranks.EXACT[1]
                )


def every_loss() -> None:
    mesh = ranks.mesh()
    # Shards of 15 and 14 words: fewer would be fewer bytes in float32 than what is computed of each
    # token.
    for call in calls(29):
        compare(call, mesh, each=True)
    for call in calls(130):
        # Rows over the same devices: those of x are fewer bytes than the weight.
        compare(call, mesh, Shard(1))


def rows_and_words() -> None:
    """Data and tensor parallelism."""
    mesh = ranks.mesh(2, 2)
    for call in calls(13):
        compare(call, mesh)
    # The functions of plain results refuse such a mesh, and name those that take it.
    call = calls(13)[3]
    given = over(mesh, call, leaves(call))
    with pytest.raises(ValueError, match="liger_ops.linear_cross_entropy takes DTensors"):
        distributed.linear_cross_entropy(**given)
    # Words over both dimensions are redistributed.
    _, tensors, _ = calls(13)[0]
    logits = distribute_tensor(tensors["logits"], mesh, [Shard(2), Shard(2)])
    target = distribute_tensor(tensors["target"], mesh, [WHOLE, WHOLE])
    loss = liger_ops.cross_entropy(logits, target).full_tensor()
    torch.testing.assert_close(loss, liger_ops.cross_entropy(**tensors))


# Numbers of a token that the forward of each of `calls` gathers, or sums over two devices.
NUMBERS = (3, 4, 4, 3, 4, 4, 4, 4, 6, 5, 5, 9, 6, LISTED + 4, LISTED + 4)


def what_moves() -> None:
    """A few numbers of each token; and the heads' rows and their gradients, if they are sharded."""
    mesh, V, M = ranks.mesh(), 130, 12
    gather, scatter, reduce = "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"
    for call, numbers in zip(calls(V), NUMBERS, strict=True):
        op, tensors, options = call
        rows_of = {n: 4 * M * tensors[n].shape[-1] for n in HEAD_ROWS if n in tensors}
        for rows in (WHOLE, Shard(0)) if rows_of else (WHOLE,):
            given = over(mesh, call, leaves(call, torch.float32), rows)
            results, forward = recorded(lambda: getattr(liger_ops, op)(**given, **options))  # noqa: B023
            wanted = [tensor for tensor in given.values() if tensor.requires_grad]
            loss = results[0].sum()
            _, backward = recorded(lambda: torch.autograd.grad(loss, wanted))  # noqa: B023
            moved, back = [], []
            if rows != WHOLE:
                moved = [(gather, size // 2) for size in rows_of.values()]
                back = [(scatter, size) for n, size in rows_of.items() if n != "teacher_x"]
            # The backward reads the rows again, unless the forward has computed the gradients.
            again = [] if "gradient_mask" in options else moved
            of_tokens = (reduce if "teacher_ids" in tensors else gather, 4 * M * numbers)
            assert total(forward) == total([*moved, of_tokens]), (op, rows, forward)
            assert total(backward) == total([*again, *back]), (op, rows, backward)


def total(moved: list[tuple[str, int]]) -> dict[str, int]:
    """The bytes of each collective, of all chunks together."""
    sums: Counter[str] = Counter()
    for name, size in moved:
        sums[name] += size
    return dict(sums)


def redistributed() -> None:
    """What no device can compute of its words, and what is fewer bytes otherwise."""
    mesh = ranks.mesh()
    _, tensors, _ = calls(130)[0]
    logits, target = (distribute_tensor(tensors[n], mesh, [p])
                      for n, p in (("logits", Shard(2)), ("target", WHOLE)))  # fmt: skip
    results, moved = recorded(
        lambda: liger_ops.cross_entropy_forward(logits, target, return_predicted=True)
    )
    assert max(size for _, size in moved) >= tensors["logits"].nbytes // 4
    predicted = results[5].full_tensor()
    assert predicted.equal(tensors["logits"].argmax(-1))
    # The forward cannot compute gradients of words, and the backward does not take them for such.
    op, of_head, options = calls(13)[3]
    compare((op, of_head, {**options, "return_predicted": True}), mesh, over_words=False)
    # 5 words are fewer bytes than 12 rows of x.
    call = calls(5)[3]
    compare(call, mesh, Shard(0), over_words=False)
    given = over(mesh, call, leaves(call, torch.float32), Shard(0))
    _, moved = recorded(lambda: liger_ops.linear_cross_entropy(**given))
    # The words are padded to 3 a device; a mean has three numbers.
    assert sorted(moved) == [("all_gather_into_tensor", 3 * D * 4), ("all_reduce", 12)], moved


def out_of_range() -> None:
    mesh, head = ranks.mesh(), torch.randn(9, D)
    x, target = torch.randn(3, D), torch.tensor([1, 9, -100])
    weight = distribute_tensor(head, mesh, [Shard(0)])
    rows, targets = (distribute_tensor(tensor, mesh, [WHOLE]) for tensor in (x, target))
    for reduction, nan in (("none", [False, True, False]), ("sum", True)):
        loss = liger_ops.linear_cross_entropy(rows, weight, targets, reduction=reduction)
        assert loss.full_tensor().isnan().tolist() == nan
    assert liger_ops.linear_log_prob(rows, weight, targets)[0].to_local().isnan().any()
    # A mean over nothing is NaN, and its gradient 0.
    nothing = distribute_tensor(torch.full((3,), -100), mesh, [WHOLE])
    logits = distribute_tensor(torch.randn(3, 9), mesh, [Shard(1)]).requires_grad_()
    loss = liger_ops.cross_entropy(logits, nothing)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert loss.to_local().isnan() and not gradient.full_tensor().any()
    # A number that every device has need not be a DTensor.
    count, target = torch.tensor(8.0), torch.tensor([1, 8, -100])
    targets = distribute_tensor(target, mesh, [WHOLE])
    loss = liger_ops.linear_cross_entropy(rows, weight, targets, num_items_in_batch=count)
    expected = liger_ops.linear_cross_entropy(x, head, target, num_items_in_batch=count)
    torch.testing.assert_close(loss.full_tensor(), expected)
    for wrong, kind, said in (
        ((rows, weight, targets[:2]), ValueError, "linear_cross_entropy: target must have"),
        ((rows.double(), weight, targets), TypeError, "weight must have x's dtype"),
    ):
        with pytest.raises(kind, match=said) as error:
            liger_ops.linear_cross_entropy(*wrong)
        assert "(S(0))" in str(error.value)


def compiled() -> None:
    """And eagerly in float32, where the backward multiplies the weight's gradient itself."""
    mesh = ranks.mesh()
    for i in (1, 4):
        call = calls(13)[i]
        op, _, options = call
        whole = leaves(call, torch.float32)
        expected, gradients = outcome(call, whole, True)

        def loss_of(op: str = op, options: Any = options, **given: Any) -> Tensor:
            return getattr(liger_ops, op)(**given, **options)[0]

        for function in (loss_of, torch.compile(loss_of, backend="aot_eager", fullgraph=True)):
            given = over(mesh, call, whole)
            loss = function(**given)
            wanted = [tensor for tensor in given.values() if tensor.requires_grad]
            found = (loss, *torch.autograd.grad(loss, wanted))
            for value, truth in zip(found, (expected[0], *gradients), strict=True):
                torch.testing.assert_close(value.full_tensor(), truth, rtol=1e-5, atol=1e-5)
