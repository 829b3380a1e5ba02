"""The divergences over a sharded vocabulary, on 2 and 4 ranks, against one process."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import liger_ops
from liger_ops import distributed
from ranks import failures
from sharded_heads import check_gradients, compare, here, leaf, part

FLOAT64 = {"rtol": 1e-11, "atol": 1e-12}
FLOAT32 = {"rtol": 1e-5, "atol": 1e-5}
KINDS: list[dict[str, Any]] = [
    {"kind": "forward_kl", "temperature": 0.7},
    {"kind": "reverse_kl", "teacher_temperature": 2.0},
    {"kind": "jsd", "beta": 0.3, "temperature": 0.7, "teacher_temperature": 2.0},
    {"kind": "jsd", "beta": 1.0},
    {"kind": "tvd", "temperature": 2.0},
    {"kind": "cosine"},
]
BOTH: dict[str, int | None] = {"student_logits": -1, "teacher_logits": -1}


def group_of(V: int) -> dict[str, Any]:
    return {"group": dist.group.WORLD, "vocab_size": V}


def logits_of(V: int, dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: leaf(3 * torch.randn(4, 3, V, dtype=dtype)) for name in BOTH}


def targets() -> Tensor:
    """All tokens of the first row are ignored."""
    target = torch.zeros(4, 3, dtype=torch.int64)
    target[0] = target[2, 1] = -100
    return target


def of_logits() -> None:
    for i, options in enumerate(KINDS):
        # 13 divides by no number of ranks; of 5 words, four ranks have 2, 2, 1 and 0.
        for V, dtype, tolerance in ((13, torch.float64, FLOAT64), (5, torch.float32, FLOAT32)):
            given = {**options, "target": targets() if i % 2 else None}
            compare("divergence", logits_of(V, dtype), BOTH, given, group_of(V), **tolerance)


def words_of_probability_0() -> None:
    """The words of the last rank have none of the student, the teacher, or both; of infinite
    results, the gradients are not compared."""
    own = slice(8 - 8 // dist.get_world_size(), None)
    for options in KINDS:
        for sides in (("student_logits",), ("teacher_logits",), tuple(BOTH)):
            logits = {name: x.detach() for name, x in logits_of(8, torch.float64).items()}
            for side in sides:
                logits[side][..., own] = 0.0 if options["kind"] == "cosine" else float("-inf")
            whole = liger_ops.divergence(**logits, **options)
            if whole.isfinite().all():
                leaves = {name: leaf(x) for name, x in logits.items()}
                compare("divergence", leaves, BOTH, options, group_of(8), **FLOAT64)
            else:
                parts = {name: part(x, -1) for name, x in logits.items()}
                found = distributed.divergence(**parts, **options, **group_of(8))
                torch.testing.assert_close(found, whole, **FLOAT64)


def ignored_and_undefined() -> None:
    """A token of NaN or of no probability gives NaN, and an ignored one 0."""
    for options in KINDS:
        logits = {name: x.detach() for name, x in logits_of(8, torch.float32).items()}
        logits["student_logits"][0, 0, 7] = logits["teacher_logits"][1, 0, 0] = float("nan")
        logits["student_logits"][2, 1] = float("nan")
        if options["kind"] != "cosine":
            logits["teacher_logits"][3] = float("-inf")
        parts = {name: part(x, -1) for name, x in logits.items()}
        given = {**options, "target": targets()}
        found = distributed.divergence(**parts, **given, **group_of(8))
        whole = liger_ops.divergence(**logits, **given)
        torch.testing.assert_close(found, whole, equal_nan=True, **FLOAT32)
        assert whole.isnan().sum() == (1 if options["kind"] == "cosine" else 4)
        grads = torch.autograd.grad(found.sum(), list(parts.values()))
        assert all(bool((grad[2, 1] == 0).all()) for grad in grads)


def dtensors_and_collectives() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for options, count in (({"kind": "reverse_kl"}, 1), ({"kind": "jsd"}, 2), ({"kind": "tvd"}, 2)):
        logits = logits_of(13, torch.float64)
        sharded = [
            distribute_tensor(x.detach(), mesh, [Shard(2)]).requires_grad_()
            for x in logits.values()
        ]
        target = targets()
        with CommDebugMode() as counted:
            found = distributed.divergence(*sharded, target=target, **options)
            grads = torch.autograd.grad(found.sum(), sharded)
        assert counted.get_total_counts() == count
        whole = liger_ops.divergence(**logits, target=target, **options)
        torch.testing.assert_close(found, whole, **FLOAT64)
        expected = torch.autograd.grad(whole.sum(), list(logits.values()))
        for grad, truth in zip(grads, expected, strict=True):
            assert grad.placements == (Shard(2),)
            torch.testing.assert_close(grad.full_tensor(), truth, **FLOAT64)


def compiled() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    for options in (KINDS[0], KINDS[2]):
        f = functools.partial(distributed.divergence, **options, **group_of(13))
        f = torch.compile(f, backend=counter, fullgraph=True)
        logits, target = logits_of(13, torch.float64), targets()
        parts = {name: here(x, -1) for name, x in logits.items()}
        got = f(*parts.values(), target=target)
        expected = liger_ops.divergence(**logits, target=target, **options)
        check_gradients(expected, got, logits, parts, BOTH, **FLOAT64)
    assert counter.frame_count == 2


def refused() -> None:
    logits = {name: part(x, -1) for name, x in logits_of(8, torch.float32).items()}
    student, teacher = logits.values()
    f, given = distributed.divergence, group_of(8)
    for message, call in (
        (
            "teacher_logits must have .* words on rank",
            lambda: f(student, teacher[..., :1], **given),
        ),
        ("teacher_logits must have the shape", lambda: f(student, teacher[:1], **given)),
        ("target must have the shape", lambda: f(student, teacher, target=targets()[0], **given)),
        ("kind must be one of", lambda: f(student, teacher, "kl", **given)),
        ("temperature must be a number", lambda: f(student, teacher, temperature=0.0, **given)),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            call()
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        torch.autograd.grad(f(*logits.values(), **given).sum(), student, create_graph=True)


CHECKS = (
    of_logits, words_of_probability_0, ignored_and_undefined, dtensors_and_collectives, refused,
)  # fmt: skip
EVERY_CHECK = {2: (*CHECKS, compiled), 4: CHECKS}


@pytest.fixture(scope="module")
def failed(tmp_path_factory):
    """What the checks raised that failed, by the number of ranks."""
    return {
        ranks: failures(checks, ranks, tmp_path_factory.mktemp("ranks"), 300)
        for ranks, checks in EVERY_CHECK.items()
    }


@pytest.mark.parametrize(
    ("ranks", "check"),
    [(ranks, check.__name__) for ranks, checks in EVERY_CHECK.items() for check in checks],
)
def test_sharded_divergence(failed, check, ranks):
    assert check not in failed[ranks], failed[ranks][check]
