"""The divergences over a sharded vocabulary, on 2 and 4 ranks, against one process."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend, EagerAndRecordGraphs
from torch.distributed.tensor.debug import CommDebugMode
from torch.fx import GraphModule, Node

import liger_ops
import ranks
from liger_ops import distributed
from sharded_heads import (
    FLOAT32,
    FLOAT64,
    D,
    check_gradients,
    compare,
    dims_of_call,
    group_of,
    here,
    leaf,
    loss_call,
    over_ranks,
    part,
    parts_of,
)

pytestmark = pytest.mark.device_kernels

KINDS: list[dict[str, Any]] = [
    {"kind": "forward_kl", "temperature": 0.7},
    {"kind": "reverse_kl", "teacher_temperature": 2.0},
    {"kind": "jsd", "beta": 0.3, "temperature": 0.7, "teacher_temperature": 2.0},
    {"kind": "jsd", "beta": 1.0},
    {"kind": "tvd", "temperature": 2.0},
    {"kind": "cosine"},
]
BOTH: dict[str, int | None] = {"student_logits": -1, "teacher_logits": -1}


def logits_of(V: int, dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: leaf(3 * torch.randn(4, 3, V, dtype=dtype)) for name in BOTH}


def targets() -> Tensor:
    """All tokens of the first row are ignored."""
    target = torch.zeros(4, 3, dtype=torch.int64)
    target[0] = target[2, 1] = -100
    return target


# A sum over chunks of tokens, with labels and a LoRA of each head.
SUMMED = {"reduction": "sum", "num_items": False, "kind": "reverse_kl"}


def two_heads(
    V: int, dtype: torch.dtype, dim: int | None = None, **fields: Any
) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, int | None]]:
    """The student's tensors, the other arguments, and the dimensions that are sharded."""
    student, given = loss_call("linear_divergence_forward-mean", V, dtype, **fields)
    return student, given, dims_of_call(student, given, dim)


def taught(given: dict[str, Any], dims: dict[str, int | None]) -> dict[str, Any]:
    return {n: here(x, dims[n]).detach() if n in dims else x for n, x in given.items()}


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


def collectives() -> None:
    for options, count in (({"kind": "reverse_kl"}, 1), ({"kind": "jsd"}, 2), ({"kind": "tvd"}, 2)):
        sharded = [over_ranks(x, 2).requires_grad_() for x in logits_of(13, torch.float64).values()]
        with CommDebugMode() as counted:
            found = distributed.divergence(*sharded, target=targets(), **options)
            torch.autograd.grad(found.sum(), sharded)
        assert counted.get_total_counts() == count, counted.get_comm_counts()


def collectives_of_heads() -> None:
    """The collectives are those of the two chunks of tokens, and of the rows' gradient."""
    most = -(-13 // dist.get_world_size())
    student, given, dims = two_heads(13, torch.float64, 0, **SUMMED, chunk_bytes=6 * 16 * most)
    placed = {
        name: over_ranks(value, dims.get(name)).requires_grad_(name in student)
        if isinstance(value, Tensor)
        else value
        for name, value in (student | given).items()
    }
    with CommDebugMode() as counted:
        got = distributed.linear_divergence(**placed)
        forward = counted.get_total_counts()
        torch.autograd.grad(got[0], [placed[name] for name in student])
    # The rows of both x are gathered, and the gradients of x and lora_a summed.
    assert (forward, counted.get_total_counts() - forward) == (2 + 2, 2), counted.get_comm_counts()


def no_token_counts() -> None:
    student, given, dims = two_heads(5, torch.float32, num_items=False)
    given["target"] = torch.full_like(given["target"], -100)
    parts = parts_of(student, dims)
    loss, *_ = distributed.linear_divergence(**parts, **taught(given, dims), **group_of(5))
    assert loss == 0
    for grad in torch.autograd.grad(loss, list(parts.values())):
        assert not grad.count_nonzero()


def compiled() -> None:
    for options, backend in ((KINDS[0], "aot_eager"), (KINDS[2], "eager")):
        counter = CompileCounterWithBackend(backend)
        f = functools.partial(distributed.divergence, **options, **group_of(13))
        f = torch.compile(f, backend=counter, fullgraph=True)
        logits, target = logits_of(13, torch.float64), targets()
        parts = {name: here(x, -1) for name, x in logits.items()}
        got = f(*parts.values(), target=target)
        expected = liger_ops.divergence(**logits, target=target, **options)
        check_gradients(expected, got, logits, parts, BOTH, **FLOAT64)
        assert counter.frame_count == 1
    student, given, dims = two_heads(13, torch.float64, **SUMMED, chunk_bytes=6 * 16 * 7)
    parts, whole = parts_of(student, dims), taught(given, dims)
    f = functools.partial(distributed.linear_divergence, **group_of(13))
    counter = CompileCounterWithBackend("aot_eager")
    # A mode of functions, which Dynamo traces too.
    with torch.device(ranks.DEVICE):
        got = torch.compile(f, backend=counter, fullgraph=True)(**parts, **whole)
    expected = liger_ops.linear_divergence(**student, **given)
    check_gradients(expected, got, student, parts, dims, **FLOAT64)
    assert counter.frame_count == 1
    counted_without_a_sum()


def counted_without_a_sum() -> None:
    """Without labels and weights, the graph of a mean has no sum of constants: Triton 3.6 fails to
    compile Inductor's kernel of one."""
    student, given, dims = two_heads(
        13, torch.float64, num_items=False, has_target=False, hard_weight=0.0, token_weight=False
    )
    parts, whole = parts_of(student, dims), taught(given, dims)
    recorder = EagerAndRecordGraphs()
    f = functools.partial(distributed.linear_divergence, **group_of(13))
    # A symbolic size would be an input of the ones.
    got = torch.compile(f, backend=recorder, fullgraph=True, dynamic=False)(**parts, **whole)
    expected = liger_ops.linear_divergence(**student, **given)
    check_gradients(expected, got, student, parts, dims, **FLOAT64)
    (traced,) = recorder.graphs
    sums = 0
    # The gradient's function is a graph within.
    for graph in (module.graph for module in traced.modules() if isinstance(module, GraphModule)):
        inputs: set[Node] = set()
        for node in graph.nodes:
            if node.op == "placeholder" or inputs.intersection(node.all_input_nodes):
                inputs.add(node)
            if node.target == "sum":
                sums += 1
                assert node in inputs, node.format_node()
    # That of the tokens' divergences.
    assert sums


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
    x, weight, target = torch.zeros(4, 3, D), part(torch.zeros(8, D)).detach(), targets()
    f, both = distributed.linear_divergence, (x, weight, x, weight)
    for message, call in (
        ("teacher_x must not require", lambda: f(x, weight, leaf(x), weight, **given)),
        ("the teacher must be", lambda: f(x, weight, x, **given)),
        ("the teacher must be", lambda: f(*both, teacher_logits=student.detach(), **given)),
        ("teacher_weight must have .* words", lambda: f(x, weight, x, weight[:1], **given)),
        ("teacher_x must have the tokens", lambda: f(x, weight, x[:1], weight, **given)),
        (
            "teacher_logits must have the tok",
            lambda: f(x, weight, teacher_logits=student[:1].detach(), **given),
        ),
        ("hard_weight must be", lambda: f(*both, hard_weight=1.0, **given)),
        ("kind must be one of", lambda: f(*both, kind="kl", **given)),
        ("student_softcap must be", lambda: f(*both, student_softcap=0.0, **given)),
        ("reduction must be", lambda: f(*both, reduction="all", **given)),
        ("target must have the shape", lambda: f(*both, target=target[0], **given)),
    ):
        with pytest.raises(ValueError, match=f"distributed.linear_divergence: {message}"):
            call()
    f = distributed.divergence
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        torch.autograd.grad(f(*logits.values(), **given).sum(), student, create_graph=True)


CHECKS = (
    words_of_probability_0, ignored_and_undefined,
    collectives, collectives_of_heads, no_token_counts, refused,
)  # fmt: skip

test_sharded_divergence = ranks.tests({2: (*CHECKS, compiled), 4: CHECKS}, 300)
