"""The ops of DTensors whose vocabulary is sharded: all results, and the gradients, of one process,
without the logits or the weight of another device. `sharded_heads` compares the public ones."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import liger_ops
import ranks
from liger_ops import distributed, library
from liger_ops.axes import lines
from op_table import OPS
from op_under_test import OpUnderTest
from ranks import recorded
from sharded_heads import case_of

pytestmark = pytest.mark.device_kernels

SECONDS = 240
WHOLE = Replicate()
# Words that a teacher lists of a token.
LISTED = 3


class Call(NamedTuple):
    """An op, its tensors and their axes, and its options."""

    op: OpUnderTest
    tensors: dict[str, Tensor]
    axes: dict[str, tuple[str, ...]]
    options: dict[str, Any]

    def words(self, name: str) -> int | None:
        """The dimension of words; every device has the weights of all classes."""
        axes, dims = self.axes[name], self.tensors[name].dim()
        is_whole = len(axes) == 1 and name.endswith("weight")
        found = (dims - len(axes) + i for i, axis in enumerate(axes) if axis in ("V", "W"))
        return None if is_whole else next(found, None)

    def rows_of_head(self) -> list[str]:
        """The rows of a head, which may be sharded over the devices that share its words."""
        return [name for name in self.tensors if name.endswith("x") and self.axes[name][0] == "*"]


@pytest.mark.parametrize("count", [2, 4])
def test_losses(count: int, tmp_path: Path) -> None:
    checks: dict[int, list[Callable[[], None]]] = {
        2: [every_loss, what_moves, redistributed, out_of_range, compiled],
        4: [rows_and_words],
    }
    assert not ranks.failures(checks[count], count, tmp_path, SECONDS)


OF_WORDS = [
    op
    for op in OPS.values()
    if op.name.endswith("_forward") and re.search(r"\bV\b", library.OPS[op.name].axes)
]


def calls(V: int) -> dict[str, Call]:
    """Every loss of a vocabulary with the options of its entry. All of the first row is ignored."""
    return {op.id: call_of(op, V) for op in OF_WORDS}


def call_of(op: OpUnderTest, V: int) -> Call:
    # A target "?" has the axes of the tokens, and for K words one more.
    forms = lines(library.OPS[op.name].axes.replace("?", "*"))
    axes = {name: entry.axes for line in forms for name, entry in line.arguments.items()}
    # Several chunks.
    of_head = {"chunk_bytes": 40 * V} if op.case_type else {}
    of_head |= {name: LISTED for name in ("K", "k") if name in op.sampled}
    case = case_of(op, V, torch.float32, **of_head)
    # Their values are drawn on the CPU.
    with torch.device("cpu"):
        args = op.forward_args(case, op.tensors(case))
    arguments = op.overload()._schema.arguments
    given = {a.name: value for a, value in zip(arguments, args, strict=True) if value is not None}
    tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    for name in {"target", "teacher_ids"} & tensors.keys():
        tensors[name][0] = -100
    # No device can predict words by itself.
    options = {name: value for name, value in given.items() if name not in tensors}
    options = {n: value for n, value in options.items() if not n.startswith("return_")}
    return Call(op, tensors, axes, options)


def leaves(call: Call, dtype: torch.dtype = ranks.EXACT[0]) -> dict[str, Tensor]:
    return {
        name: (tensor.to(dtype) if tensor.is_floating_point() else tensor)
        .clone()
        .requires_grad_(name in call.op.gradients_of)
        for name, tensor in call.tensors.items()
    }


def over(mesh: Any, call: Call, leaves: dict[str, Tensor], rows: Any = WHOLE) -> dict[str, Any]:
    """The tensors with their words over the last dimension of the mesh, and rows over the first of
    two, or those of x over the same."""
    found = {}
    for name, tensor in leaves.items():
        dim = call.words(name)
        placements = [WHOLE if dim is None else Shard(dim % tensor.dim())]
        if mesh.ndim == 2:
            placements = [Shard(0) if call.axes[name][:1] == ("*",) else WHOLE, *placements]
        elif name in call.rows_of_head():
            placements = [rows]
        sharded = distribute_tensor(tensor.detach(), mesh, placements)
        found[name] = sharded.requires_grad_(tensor.requires_grad)
    return found


def outcome(call: Call, tensors: dict[str, Any], loss_alone: bool) -> tuple[Any, Any]:
    """The results, and the gradients of a sum of the differentiable ones."""
    results = getattr(liger_ops, call.op.name)(**tensors, **call.options)
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
                assert has == had or (had == WHOLE and has.is_partial()), (call.op.id, had, has)
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
    for call in calls(29).values():
        compare(call, mesh, each=True)
    for call in calls(130).values():
        # Rows over the same devices: those of x are fewer bytes than the weight.
        compare(call, mesh, Shard(1))


def rows_and_words() -> None:
    """Data and tensor parallelism."""
    mesh = ranks.mesh(2, 2)
    for call in calls(13).values():
        compare(call, mesh)
    # The functions of plain results refuse such a mesh, and name those that take it.
    x, weight, target = torch.randn(4, 6), torch.randn(13, 6), torch.arange(4)
    placed = ((x, [WHOLE, WHOLE]), (weight, [WHOLE, Shard(0)]), (target, [WHOLE, WHOLE]))
    given = [distribute_tensor(tensor, mesh, placements) for tensor, placements in placed]
    with pytest.raises(ValueError, match="liger_ops.linear_cross_entropy takes DTensors"):
        distributed.linear_cross_entropy(*given)
    # Words over both dimensions are redistributed.
    logits = distribute_tensor(x @ weight.T, mesh, [Shard(1), Shard(1)])
    loss = liger_ops.cross_entropy(logits, given[2]).full_tensor()
    torch.testing.assert_close(loss, liger_ops.cross_entropy(x @ weight.T, target))


# Numbers of a token that the forward of each of `calls` gathers, or sums over two devices.
NUMBERS = {
    "cross_entropy_forward-mean": 4, "cross_entropy_forward-none": 4,
    "linear_cross_entropy_forward-mean": 4, "linear_cross_entropy_forward-none": 4,
    "log_prob_forward": 4, "linear_log_prob_forward": 4, "divergence_forward-jsd": 6,
    "log_prob_forward-words": 3 + LISTED, "linear_log_prob_forward-words": 3 + LISTED,
    "divergence_forward-forward-kl": 5, "linear_divergence_forward-mean": 9,
    "linear_divergence_forward-none": 8, "linear_top_k_divergence_forward": LISTED + 4,
    "linear_score_centering_forward-mean": 4 + LISTED,
    "linear_score_centering_forward-none": 4 + LISTED,
    "linear_top_k_forward": 2 + 3 * LISTED,
}  # fmt: skip


def what_moves() -> None:
    """A few numbers of each token; and the heads' rows and their gradients, if they are sharded."""
    mesh, V, M = ranks.mesh(), 130, 12
    gather, scatter, reduce = "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"
    for name, call in calls(V).items():
        op, tensors, _, options = call
        rows_of = {n: 4 * M * tensors[n].shape[-1] for n in call.rows_of_head()}
        for rows in (WHOLE, Shard(0)) if rows_of else (WHOLE,):
            given = over(mesh, call, leaves(call, torch.float32), rows)
            results, forward = recorded(lambda: getattr(liger_ops, op.name)(**given, **options))  # noqa: B023
            wanted = [tensor for tensor in given.values() if tensor.requires_grad]
            loss = results[0].sum()
            _, backward = recorded(lambda: torch.autograd.grad(loss, wanted))  # noqa: B023
            moved, back = [], []
            if rows != WHOLE:
                moved = [(gather, size // 2) for size in rows_of.values()]
                back = [(scatter, size) for n, size in rows_of.items() if given[n].requires_grad]
            # The backward reads the rows again, unless the forward has computed the gradients.
            again = [] if any(options.get("gradient_mask", ())) else moved
            of_tokens = (reduce if "teacher_ids" in tensors else gather, 4 * M * NUMBERS[name])
            assert total(forward) == total([*moved, of_tokens]), (name, rows, forward)
            assert total(backward) == total([*again, *back]), (name, rows, backward)


def total(moved: list[tuple[str, int]]) -> dict[str, int]:
    """The bytes of each collective, of all chunks together."""
    sums: Counter[str] = Counter()
    for name, size in moved:
        sums[name] += size
    return dict(sums)


def redistributed() -> None:
    """Redistribute arguments that no device can use by words, or that then move fewer bytes."""
    mesh = ranks.mesh()
    call = calls(130)["cross_entropy_forward-mean"]
    logits, target = (over(mesh, call, call.tensors)[name] for name in ("logits", "target"))
    results, moved = recorded(
        lambda: liger_ops.cross_entropy_forward(logits, target, return_predicted=True)
    )
    assert max(size for _, size in moved) >= call.tensors["logits"].nbytes // 4
    predicted = results[5].full_tensor()
    assert predicted.equal(call.tensors["logits"].argmax(-1))
    # The forward cannot compute gradients of words, and the backward does not take them for such.
    call = calls(13)["linear_cross_entropy_forward-mean"]
    predicting = call._replace(options={**call.options, "return_predicted": True})
    compare(predicting, mesh, over_words=False)
    # 5 words are fewer bytes than 12 rows of x.
    call = calls(5)["linear_cross_entropy_forward-mean"]
    compare(call, mesh, Shard(0), over_words=False)
    x, weight = torch.randn(12, 6), torch.randn(5, 6)
    given = [distribute_tensor(t, mesh, [Shard(0)]) for t in (x, weight, torch.arange(12) % 5)]
    _, moved = recorded(lambda: liger_ops.linear_cross_entropy(*given))
    # The words are padded to 3 a device; a mean has three numbers.
    assert sorted(moved) == [("all_gather_into_tensor", 3 * 6 * 4), ("all_reduce", 12)], moved


def out_of_range() -> None:
    mesh, head = ranks.mesh(), torch.randn(9, 6)
    x, target = torch.randn(3, 6), torch.tensor([1, 9, -100])
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
    for name in ("cross_entropy_forward-mean", "linear_cross_entropy_forward-mean"):
        call = calls(13)[name]
        whole = leaves(call, torch.float32)
        expected, gradients = outcome(call, whole, True)

        def loss_of(call: Call = call, **given: Any) -> Tensor:
            return getattr(liger_ops, call.op.name)(**given, **call.options)[0]

        for function in (loss_of, torch.compile(loss_of, backend="aot_eager", fullgraph=True)):
            given = over(mesh, call, whole)
            loss = function(**given)
            wanted = [tensor for tensor in given.values() if tensor.requires_grad]
            found = (loss, *torch.autograd.grad(loss, wanted))
            for value, truth in zip(found, (expected[0], *gradients), strict=True):
                torch.testing.assert_close(value.full_tensor(), truth, rtol=1e-5, atol=1e-5)
