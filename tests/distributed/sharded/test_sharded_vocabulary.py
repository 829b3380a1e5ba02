"""The losses over a sharded vocabulary, on 2 and 4 ranks, against one process with the whole."""

from __future__ import annotations

import functools
import inspect
import itertools
import re
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.graph import GraphLowering
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import loss_parallel

import extreme_logits as extreme
import liger_ops
import ranks
from cross_entropy_cases import TERM_CHOICES, TERMS, UNUSED
from launch_forms import Fields
from liger_ops import distributed
from liger_ops.distributed.vocab_parallel import head as head_of_words
from liger_ops.integrations import megatron
from log_prob_cases import NOTHING
from op_table import OPS
from sharded_heads import (
    FLOAT32,
    FLOAT64,
    D,
    check_gradients,
    compare,
    compare_dtensors,
    dims_of,
    dims_of_call,
    group_of,
    here,
    leaf,
    loss_call,
    over_ranks,
    part,
    parts_of,
    scalar,
    tokens,
)

pytestmark = pytest.mark.device_kernels

OF_KINDS = [
    {"kind": "forward_kl", "teacher_temperature": None}, {"kind": "reverse_kl", "ignored": None},
    {"beta": 0.3}, {"beta": 1.0, "ignored": None}, {"kind": "tvd"}, {"kind": "cosine"},
]  # fmt: skip
WITHOUT_CAPS = {"softcap": None, "teacher_softcap": None}
LARGEST = {name: values[-1] for name, values in TERM_CHOICES.items()}
# The entries of losses with the options of their samples, and with others.
CALLS: list[tuple[str, Fields]] = [
    *(("cross_entropy_forward-mean", fields) for fields in (
        {}, UNUSED, LARGEST, {"reduction": "sum", "has_items": False, "softcap": None},
    )),
    ("cross_entropy_forward-none", {"ignore_index": 2}),
    *(("linear_cross_entropy_forward-mean", fields) for fields in (
        {}, LARGEST | {"rank": None}, {"num_items": False, "softcap": None},
        {"reduction": "sum", "num_items": False, "bias": False},
    )),
    ("linear_cross_entropy_forward-none", {}),
    ("linear_cross_entropy_forward-none", {"rank": None}),
    *(("log_prob_forward", fields) for fields in (
        {}, {"softcap": None}, {**NOTHING, "ignore_index": 2},
    )),
    *(("linear_log_prob_forward", fields) for fields in (
        {}, {"softcap": None}, {**NOTHING, "rank": None},
    )),
    *(("log_prob_forward-words", fields) for fields in ({}, {**NOTHING, "ignore_index": 2})),
    *(("linear_log_prob_forward-words", fields) for fields in ({}, {**NOTHING, "rank": None})),
    *(("linear_top_k_forward", fields) for fields in (
        {"k": 4}, {"k": 5, "softcap": None, "rank": None},
    )),
    *(("divergence_forward-jsd", fields) for fields in OF_KINDS),
    *(("linear_divergence_forward-mean", fields) for fields in (
        {}, {"kind": "forward_kl", "rank": None, "num_items": False, **WITHOUT_CAPS},
        {"kind": "reverse_kl", "reduction": "sum", "num_items": False, "soft_weight": 0.0},
        {"kind": "cosine", "has_target": False, "hard_weight": 0.0, "token_weight": False},
    )),
    ("linear_divergence_forward-none", {}),
    ("linear_divergence_forward-none", {"kind": "tvd", "teacher_rank": 2, "by_logits": False}),
]  # fmt: skip
LOGITS: dict[str, int | None] = {"logits": -1}


def every_loss() -> None:
    for i, (name, fields) in enumerate(CALLS):
        # 13 divides by no number of ranks; of 5 words, four ranks have 2, 2, 1 and 0.
        for V, dtype, tolerance in ((13, torch.float64, FLOAT64), (5, torch.float32, FLOAT32)):
            inputs, given = loss_call(name, V, dtype, **fields)
            dim = (None, 0)[(i + (V == 5)) % 2]
            sharding = group_of(V) | ({"sequence_dim": dim} if name.startswith("linear") else {})
            dims = dims_of_call(inputs, given, dim)
            compare(OPS[name].base, inputs, dims, given, sharding, **tolerance)


def words_of_probability_0() -> None:
    """All of the last rank's words are -inf, as those that pad a vocabulary are."""
    logits = torch.randn(2, 8, dtype=torch.float64)
    logits[:, 8 - 8 // dist.get_world_size() :] = float("-inf")
    given = {"target": torch.tensor([1, 3])}
    for loss in ("cross_entropy", "log_prob"):
        compare(loss, {"logits": leaf(logits)}, LOGITS, given, group_of(8), **FLOAT64)


class Sharded:
    """The functions of liger_ops.distributed, of the rank's part of whole tensors."""

    def __getattr__(self, name: str) -> Any:
        function = getattr(distributed, name)
        words = {"logits": -1, "student_logits": -1, "teacher_logits": -1}
        if name.startswith("linear"):
            words |= {"weight": 0, "student_weight": 0, "bias": 0}

        def call(*args: Any, **options: Any) -> Any:
            given = inspect.signature(function).bind(*args, **options).arguments
            for argument, dim in words.items():
                if argument in given:
                    whole = given[argument]
                    V = whole.shape[dim]
                    given[argument] = whole.chunk(dist.get_world_size(), dim)[dist.get_rank()]
            return function(**given, **group_of(V))

        return call


def extreme_logits() -> None:
    """One rank has no class of a probability above 0 in some of the rows."""
    for loss, reference, infinite in extreme.LOSSES.values():
        x, y = extreme.rows(40, 0, infinite), extreme.rows(40, 1, infinite)
        values, part_of_gradient = extreme.values_and_gradient(
            functools.partial(loss, Sharded()), x, y
        )
        # A head of transposed logits has a transposed gradient, which NCCL does not take.
        part_of_gradient = part_of_gradient.contiguous()
        dist.all_reduce(part_of_gradient)
        found = [values, part_of_gradient]
        extreme.assert_as_near_as_pytorch(found, reference, x, y)


def a_target_that_no_rank_has() -> None:
    logits = part(torch.randn(3, 8), -1)
    for target in (8, -1):
        given = torch.tensor([1, target, -100])
        losses = distributed.cross_entropy(logits, given, reduction="none", **group_of(8))
        log_prob, _ = distributed.log_prob(logits, given, **group_of(8))
        assert losses.isnan().tolist() == log_prob.isnan().tolist() == [False, True, False]


def dtensors() -> None:
    """Rows that do not divide; and a plain x beside the DTensors of a head."""
    head, target = tokens(13, torch.float64, rows=3)
    given = {"target": target, "reduction": "sum", **TERMS}
    compare_dtensors("linear_cross_entropy", head, dims_of(head, 0), given, **FLOAT64)
    x, weight, bias = head.values()
    sharded, plain = [over_ranks(tensor, 0) for tensor in (weight, bias)], leaf(x)
    values = distributed.linear_log_prob(plain, sharded[0], over_ranks(target, 0), sharded[1])
    assert all(type(value) is Tensor for value in values)
    expected = liger_ops.linear_log_prob(x, weight, target, bias)
    torch.testing.assert_close(values, expected, **FLOAT64)
    ours, theirs = (torch.autograd.grad(v[0].sum(), t) for v, t in ((values, plain), (expected, x)))
    torch.testing.assert_close(ours, theirs, **FLOAT64)


def within_loss_parallel() -> None:
    mesh = ranks.mesh()
    whole, target = torch.randn(5, 8, dtype=torch.float64), torch.randint(0, 8, (5,))
    results = []
    for f in (torch.nn.functional.cross_entropy, distributed.cross_entropy):
        logits = distribute_tensor(whole, mesh, [Shard(-1)]).requires_grad_()
        with loss_parallel():
            loss = f(logits, target)
            loss.backward()
        loss = loss.full_tensor() if isinstance(loss, DTensor) else loss
        results.append((loss, logits.grad.full_tensor()))
    torch.testing.assert_close(*results, **FLOAT64)


def collectives_and_bytes() -> None:
    V, count = 16, dist.get_world_size()
    head, target = tokens(V, torch.float32)
    M, all_of_x = target.numel(), head["x"].nbytes
    for dim in (None, 0):
        gather = "all_gather_into_tensor"
        of_x = [] if dim is None else [(gather, all_of_x // count)]
        of_dx = [("all_reduce" if dim is None else "reduce_scatter_tensor", all_of_x)]
        for loss, numbers in (("linear_cross_entropy", 3), ("linear_log_prob", 4)):
            parts = parts_of(head, dims_of(head, dim))
            with CommDebugMode() as counted, ranks.Traffic() as forward:
                results = getattr(distributed, loss)(
                    **parts, target=target, **group_of(V), sequence_dim=dim
                )
            with ranks.Traffic() as backward:
                scalar(results).backward()
            # The mean's gradient of x is computed, and summed over the ranks, in the forward.
            early = dim is None and loss == "linear_cross_entropy"
            of_forward = [*of_x, (gather, numbers * M * 4), *(of_dx if early else [])]
            assert forward.seen == of_forward, forward.seen
            assert backward.seen == ([] if early else of_dx), backward.seen
            assert counted.get_total_counts() == len(forward.seen)
    with ranks.Traffic() as traffic:
        logits = part(torch.randn(4, 3, V), -1)
        distributed.cross_entropy(logits, target, **TERMS, **group_of(V)).backward()
    assert traffic.seen == [("all_gather_into_tensor", 4 * M * 4)], traffic.seen


def both_losses(x: Tensor, weight: Tensor, bias: Tensor, **given: Any) -> tuple[Tensor, ...]:
    namespace = distributed if "group" in given else liger_ops
    target = given.pop("target")
    loss = namespace.linear_cross_entropy(x, weight, target, bias, **TERMS, **given)
    return loss, *namespace.linear_log_prob(x, weight, target, bias, **given)


def checkpointed() -> None:
    head, target = tokens(13, torch.float64)
    parts = parts_of(head, dims_of(head))
    got = torch.utils.checkpoint.checkpoint(
        both_losses, *parts.values(), target=target, **group_of(13), use_reentrant=False
    )
    expected = both_losses(**head, target=target)
    check_gradients(expected, got, head, parts, dims_of(head), **FLOAT64)


# The gradients are taken several times.
@torch._functorch.config.patch(donated_buffer=False)
def compiled() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    losses = torch.compile(both_losses, backend=counter, fullgraph=True, dynamic=True)
    graphs = []
    for rows in (4, 8):
        head, target = tokens(13, torch.float64, rows=rows)
        parts = parts_of(head, dims_of(head, 0))
        got = losses(*parts.values(), target=target, **group_of(13), sequence_dim=0)
        expected = both_losses(**head, target=target)
        check_gradients(expected, got, head, parts, dims_of(head, 0), **FLOAT64)
        graphs.append(counter.frame_count)
    # Another number of tokens takes the same graph.
    assert graphs[0] == graphs[1], graphs
    head, target = tokens(13, torch.bfloat16)
    parts = parts_of(head, dims_of(head))
    loss = functools.partial(distributed.linear_cross_entropy, **group_of(13))
    results = []
    for f in (loss, torch.compile(loss, backend="eager", fullgraph=True)):
        # A mode of functions, which Dynamo traces too.
        with torch.device(ranks.DEVICE):
            value = f(**parts, target=target)
        results.append((value, *torch.autograd.grad(value, list(parts.values()))))
    torch.testing.assert_close(*results, rtol=1e-2, atol=1e-4)


def a_second_backward() -> None:
    """The first takes the gradient of weight that the forward computed."""
    head, target = tokens(13, torch.float32)
    parts = parts_of(head, dims_of(head))
    loss = distributed.linear_cross_entropy(**parts, target=target, **group_of(13), **TERMS)
    leaves = list(parts.values())
    # Copies, because a gradient that is given away twice would be equal to itself.
    first, second = (
        [grad.clone() for grad in torch.autograd.grad(3 * loss, leaves, retain_graph=True)]
        for _ in range(2)
    )
    torch.testing.assert_close(first, second, **FLOAT32)


def no_token_counts() -> None:
    head, target = tokens(13, torch.float32)
    parts = parts_of(head, dims_of(head))
    ignored = torch.full_like(target, -100)
    loss = distributed.linear_cross_entropy(**parts, target=ignored, **group_of(13))
    assert loss.isnan()
    for grad in torch.autograd.grad(loss, list(parts.values())):
        assert not grad.count_nonzero()
    empty = {"x": leaf(head["x"][:0]), "weight": parts["weight"], "target": target[:0]}
    loss = distributed.linear_cross_entropy(**empty, **group_of(13), reduction="sum")
    assert loss == 0
    assert not torch.autograd.grad(loss, parts["weight"])[0].count_nonzero()


def chunks_of_tokens() -> None:
    """Chunks in bfloat16 are summed in float32; every rank has as many of them."""
    V, count = 5, dist.get_world_size()
    head, target = tokens(V, torch.bfloat16)
    given = {"target": target, "chunk_bytes": 2 * 2 * -(-V // count)}
    with ranks.Traffic() as traffic:
        parts = parts_of(head, dims_of(head))
        loss = distributed.linear_cross_entropy(**parts, **given, **group_of(V))
        grads = torch.autograd.grad(loss, list(parts.values()))
    assert [name for name, _ in traffic.seen].count("all_reduce") == target.numel() // 2
    wide = {name: leaf(tensor.double()) for name, tensor in head.items()}
    whole = liger_ops.linear_cross_entropy(**wide, target=target)
    expected = torch.autograd.grad(whole, list(wide.values()))
    torch.testing.assert_close(loss.double(), whole, rtol=1e-2, atol=1e-2)
    for name, grad, of_whole in zip(head, grads, expected, strict=True):
        part_of_whole = here(of_whole, dims_of(head)[name]).detach()
        torch.testing.assert_close(grad.double(), part_of_whole, rtol=2e-2, atol=2e-3)


def chunks_by_default() -> None:
    """All tokens are one chunk as long as several would take as much memory."""
    V = 64
    words = V // dist.get_world_size()
    row_bytes, chunk_rows = 2 * words, 4
    chunk_bytes = chunk_rows * row_bytes
    seen = set()
    with patch.object(head_of_words, "BACKWARD_BYTES", chunk_bytes):
        for rows, frozen in itertools.product((3, 6, 12, 30, 60), (False, True)):
            x, weight = torch.randn(rows, D).bfloat16(), torch.randn(V, D).bfloat16()
            target = torch.arange(rows) % V
            own = leaf(here(weight, 0)).requires_grad_(not frozen)
            call = functools.partial(distributed.linear_cross_entropy, leaf(x), own, target)
            _, collectives = ranks.recorded(functools.partial(call, **group_of(V)))
            sum_bytes = 0 if frozen else 4 * words * D
            single = 2 * rows * row_bytes <= 3 * chunk_bytes + sum_bytes + 2 * rows * D
            chunks = 1 if single else -(-rows // chunk_rows)
            assert [name for name, _ in collectives].count("all_gather_into_tensor") == chunks
            seen.add((single, frozen))
    assert len(seen) == 4


def chunks_compiled_by_inductor() -> None:
    """Few gradients of weight are in memory at a time, whatever the number of chunks."""
    V, rows = 96, 10
    head = [torch.randn(rows, D).bfloat16(), torch.randn(V, D).bfloat16()]
    x, weight = (leaf(tensor) for tensor in head)
    call = functools.partial(distributed.linear_cross_entropy, chunk_bytes=2 * V * 2, **group_of(V))
    code = ""

    def keep_and_stop(text: str) -> None:
        nonlocal code
        code = text
        # Its C++ would take half a minute to compile.
        raise InterruptedError

    stopped = pytest.raises(Exception, match="InterruptedError")
    with stopped, patch.object(GraphLowering, "save_output_code", keep_and_stop):
        torch.compile(call, fullgraph=True)(x, weight, torch.arange(rows))
    alive: set[str] = set()
    counts = [0]
    for line in code.splitlines():
        if made := re.match(rf"\s+(buf\d+) = empty_strided_\w+\(\({V}, {D}\)", line):
            alive.add(made[1])
        if renamed := re.match(r"\s+(buf\d+) = (buf\d+); del", line):
            alive |= {renamed[1]} if renamed[2] in alive else set()
        alive -= set(re.findall(r"del (buf\d+)", line))
        counts.append(len(alive))
    assert 0 < max(counts) < rows // 2, counts


def low_precision_and_autocast() -> None:
    V = 13
    head, target = tokens(V, torch.float32)
    x, weight, bias = head.values()
    half = [leaf(t.to(torch.bfloat16)) for t in (x, part(weight), part(bias))]
    loss = distributed.linear_cross_entropy(*half[:2], target, half[2], **group_of(V))
    assert loss.dtype is torch.float32
    assert [g.dtype for g in torch.autograd.grad(loss, half)] == [torch.bfloat16] * 3
    with torch.autocast(ranks.DEVICE, torch.bfloat16):
        cast = distributed.linear_cross_entropy(
            leaf(x), part(weight), target, part(bias), **group_of(V)
        )
    torch.testing.assert_close(cast, loss, rtol=0, atol=0)


def results_are_those_of_every_rank() -> None:
    V = 13
    head, target = tokens(V, torch.float32)
    x, weight, bias = head.values()
    loss = distributed.linear_cross_entropy(x, part(weight), target, **group_of(V))
    log_prob, entropy = distributed.linear_log_prob(x, part(weight), target, **group_of(V))
    for result in (loss, log_prob, entropy):
        others = [torch.empty_like(result) for _ in range(dist.get_world_size())]
        dist.all_gather(others, result.detach())
        assert all(torch.equal(other, result) for other in others)


def refused() -> None:
    mesh = ranks.mesh()
    V = 8
    head, target = tokens(V, torch.float32)
    x, weight, bias = head.values()
    rows = distribute_tensor(weight.detach(), mesh, [Shard(0)])
    columns = distribute_tensor(weight.detach(), mesh, [Replicate()])
    shard, given, f = part(weight), group_of(V), distributed.linear_cross_entropy
    columns_of_x = distribute_tensor(x.detach(), mesh, [Shard(2)])
    learned = leaf(torch.ones(4, 3))
    of_16 = {**given, "vocab_size": 16}
    for message, call in (
        ("group is None", lambda: f(x, shard, target)),
        ("vocab_size is None", lambda: f(x, shard, target, group=given["group"])),
        ("must have .* words on rank", lambda: f(x, shard, target, **of_16)),
        ("must be None for a DTensor weight", lambda: f(x, rows, target, **given)),
        ("weight must be sharded over words", lambda: f(x, columns, target)),
        ("lora_a must be replicated", lambda: f(x, rows, target, lora_a=rows, lora_b=rows)),
        ("lora_b must have .* words", lambda: f(x, shard, target, lora_a=x, lora_b=x[:1], **given)),
        ("x must be replicated", lambda: f(columns_of_x, rows, target)),
        ("sequence_dim must be a", lambda: f(x, shard, target, **given, sequence_dim=-1)),
        ("target must have the shape", lambda: f(x, shard, target[:1], **given)),
        ("class weight must", lambda: f(x, shard, target, None, torch.ones(3), **given)),
        ("token_weight must", lambda: f(x, shard, target, token_weight=learned, **given)),
        ("reduction must be one of", lambda: f(x, shard, target, reduction="all", **given)),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(TypeError, match="target must be int64 or int32"):
        f(x, shard, target.float(), **given)
    for reduction in ("mean", "none"):
        loss = f(leaf(x), shard, target, reduction=reduction, **given).sum()
        with pytest.raises(RuntimeError, match="cannot be differentiated again"):
            torch.autograd.grad(loss, shard, create_graph=True)


def in_the_place_of_megatrons() -> None:
    V = 8 * dist.get_world_size()
    logits, target = leaf(torch.randn(5, 2, V)), torch.randint(V, (5, 2))
    target[0, 0] = -1  # No word: users of Megatron mask such tokens afterwards.
    words, weights = part(logits, -1), torch.randn(5, 2)
    loss = megatron.fused_vocab_parallel_cross_entropy(words, target, dist.group.WORLD)
    expected = liger_ops.cross_entropy(logits, target, ignore_index=-1, reduction="none")
    torch.testing.assert_close(loss, expected)
    for one in (loss, expected):
        (one * weights).sum().backward()
    assert logits.grad is not None
    torch.testing.assert_close(words.grad, part(logits.grad, -1).detach())


CHECKS = (
    every_loss, words_of_probability_0,
    a_target_that_no_rank_has, dtensors, within_loss_parallel, collectives_and_bytes,
    checkpointed, a_second_backward, no_token_counts, chunks_of_tokens,
    chunks_by_default, low_precision_and_autocast, results_are_those_of_every_rank, refused,
    in_the_place_of_megatrons,
)  # fmt: skip

test_sharded_vocabulary = ranks.tests(
    {1: (chunks_compiled_by_inductor,), 2: (*CHECKS, extreme_logits, compiled), 4: CHECKS}, 300
)
