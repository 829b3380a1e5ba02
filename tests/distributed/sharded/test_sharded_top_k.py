"""The divergence from a teacher's top k words over a sharded vocabulary, on 2 and 4 ranks, against
one process."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import liger_ops
import ranks
from liger_ops import distributed
from sharded_heads import (
    FLOAT32,
    FLOAT64,
    D,
    check_gradients,
    compare,
    dims_of,
    group_of,
    leaf,
    part,
    parts_of,
    tokens,
)

pytestmark = pytest.mark.device_kernels

OP = "linear_top_k_divergence"
OPTIONS: list[dict[str, Any]] = [
    {"kind": "forward_kl", "tail": "bucket", "temperature": 0.7, "softcap": 3.0},
    {"kind": "reverse_kl", "tail": "bucket", "logit_scale": 0.5},
    {"kind": "jsd", "beta": 0.3, "tail": "drop", "softcap": 2.0, "temperature": 2.0},
    {"kind": "tvd", "tail": "zero"},
    {"kind": "forward_kl", "tail": "drop"},
]


def of_tokens(V: int, K: int, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A head and the teacher's log-probabilities, and what has no gradient. A token lists words of
    one rank alone, another one word, and one none; some of a token's words come twice."""
    head, target = tokens(V, dtype)
    head["x"], head["weight"] = leaf(head["x"] / 2), leaf(head["weight"] / 2)
    ids = torch.rand(*target.shape, V).argsort(-1)[..., :K]
    ids[1, 0], ids[1, 1] = torch.arange(K), torch.arange(V - K, V)
    ids[1, 2, 1:], ids[2, 0], ids[2, 2, -1] = -1, -7, ids[2, 2, 0]
    log_prob = (3 * torch.randn(*ids.shape, V, dtype=dtype)).log_softmax(-1)[..., 0]
    return {**head, "teacher_log_prob": leaf(log_prob)}, {"teacher_ids": ids, "target": target}


def with_lora(V: int, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    dtype = inputs["x"].dtype
    a, b = (leaf(torch.randn(shape, dtype=dtype)) for shape in ((2, D), (V, 2)))
    return {**inputs, "lora_a": a, "lora_b": b}


def every_form() -> None:
    for i, options in enumerate(OPTIONS):
        # 13 divides by no number of ranks; of 5 words, four ranks have 2, 2, 1 and 0. With 5 of 5,
        # a token may list every word.
        for V, K, dtype, tolerance in (
            (13, 4, torch.float64, FLOAT64), (5, 5, torch.float32, FLOAT32),
        ):  # fmt: skip
            inputs, constants = of_tokens(V, K, dtype)
            if i % 2:
                inputs = with_lora(V, inputs)
            dim = (None, 0)[(i // 2 + (V == 5)) % 2]
            given = {**options, **constants, "chunk_bytes": 64}
            sharding = {**group_of(V), "sequence_dim": dim}
            compare(OP, inputs, dims_of(inputs, dim), given, sharding, **tolerance)


def infinite_and_undefined() -> None:
    """A rank's words have no probability; a word out of range, and NaN, give NaN; a token that does
    not count gives 0."""
    V = 8
    inputs, constants = of_tokens(V, 3, torch.float64)
    own = slice(V - V // dist.get_world_size(), None)
    inputs["bias"] = leaf(inputs["bias"].detach().index_fill(0, torch.arange(V)[own], -torch.inf))
    given = {**constants, "kind": "forward_kl", "tail": "drop"}
    whole = liger_ops.linear_top_k_divergence(**inputs, **given)
    assert not whole.isfinite().all() and whole.isfinite().any()
    parts = parts_of(inputs, dims_of(inputs))
    found = distributed.linear_top_k_divergence(**parts, **given, **group_of(V))
    torch.testing.assert_close(found, whole, equal_nan=True, **FLOAT64)

    inputs, constants = of_tokens(V, 3, torch.float64)
    constants["teacher_ids"][3, 0, 1] = V
    inputs["x"] = leaf(inputs["x"].detach().index_fill(0, torch.tensor([0]), torch.nan))
    parts = parts_of(inputs, dims_of(inputs))
    found = distributed.linear_top_k_divergence(**parts, **constants, **group_of(V))
    # The whole first row is ignored.
    assert found.isnan().nonzero().tolist() == [[3, 0]]
    (dx,) = torch.autograd.grad(found[:3].sum(), parts["x"])
    assert not dx[0].any() and dx[1].all()


def bytes_that_move() -> None:
    V, K = 8, 3
    inputs, constants = of_tokens(V, K, torch.float32)
    parts = parts_of(inputs, dims_of(inputs))
    call = functools.partial(distributed.linear_top_k_divergence, **constants, **group_of(V))
    loss, forward = ranks.recorded(lambda: call(**parts))
    numbers = K + 2 * dist.get_world_size()
    assert forward == [("all_reduce", 4 * 12 * numbers)], forward
    _, backward = ranks.recorded(lambda: torch.autograd.grad(loss.sum(), list(parts.values())))
    assert backward == [("all_reduce", 4 * 12 * D)], backward


def compiled() -> None:
    inputs, constants = of_tokens(13, 4, torch.float64)
    inputs = with_lora(13, inputs)
    given = {**OPTIONS[0], **constants, "chunk_bytes": 64}
    f = functools.partial(distributed.linear_top_k_divergence, **given, **group_of(13))
    dims = dims_of(inputs)
    parts = parts_of(inputs, dims)
    got = torch.compile(f, backend="aot_eager", fullgraph=True)(**parts)
    expected = liger_ops.linear_top_k_divergence(**inputs, **given)
    check_gradients(expected, got, inputs, parts, dims, **FLOAT64)


def refused() -> None:
    f, given = distributed.linear_top_k_divergence, group_of(8)
    x, weight = torch.zeros(4, 3, D), part(torch.zeros(8, D))
    ids, log_prob = torch.zeros(4, 3, 2, dtype=torch.int64), torch.zeros(4, 3, 2)
    for message, call in (
        ("teacher_ids must be int64", lambda: f(x, weight, ids.float(), log_prob, **given)),
        ("teacher_ids must have the shape", lambda: f(x, weight, ids[:1], log_prob[:1], **given)),
        ("teacher_log_prob must have", lambda: f(x, weight, ids, log_prob[:1], **given)),
        ("target must have", lambda: f(x, weight, ids, log_prob, target=ids, **given)),
        ("kind must be", lambda: f(x, weight, ids, log_prob, kind="cosine", **given)),
        ("tail must be", lambda: f(x, weight, ids, log_prob, tail="all", **given)),
        ("weight must have .* words", lambda: f(x, weight[:1], ids, log_prob, **given)),
        ("weight must be a DTensor, or group", lambda: f(x, weight, ids, log_prob)),
    ):
        with pytest.raises((ValueError, TypeError), match=f"distributed.{OP}: {message}"):
            call()
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        loss = f(x, weight, ids, log_prob, tail="drop", kind="tvd", **given).sum()
        torch.autograd.grad(loss, weight, create_graph=True)


CHECKS = (every_form, infinite_and_undefined, bytes_that_move)

test_sharded_top_k = ranks.tests({2: (*CHECKS, refused, compiled), 4: CHECKS}, 300)
