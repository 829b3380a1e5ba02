"""The most probable words, and the log-probabilities of K words, over a sharded vocabulary, on 2
and 4 ranks, against one process."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import liger_ops
import ranks
from liger_ops import distributed
from sharded_heads import (
    FLOAT64,
    D,
    check_gradients,
    dims_of,
    group_of,
    leaf,
    part,
    parts_of,
    tokens,
)

pytestmark = pytest.mark.device_kernels


def words_without_probability() -> None:
    """All of the last rank's words are -inf; a token of NaN has NaN."""
    V, k = 8, 4
    inputs, _ = tokens(V, torch.float64)
    own = torch.arange(V - V // dist.get_world_size(), V)
    inputs["bias"] = leaf(inputs["bias"].detach().index_fill(0, own, -torch.inf))
    inputs["x"] = leaf(inputs["x"].detach().index_fill(0, torch.tensor([1]), torch.nan))
    parts = parts_of(inputs, dims_of(inputs))
    words, log_prob = distributed.linear_top_k(**parts, k=k, **group_of(V))
    expected, values = liger_ops.linear_top_k(**inputs, k=k)
    kept = [0, 2, 3]
    torch.testing.assert_close(words[kept], expected[kept])
    torch.testing.assert_close(log_prob, values, equal_nan=True, **FLOAT64)
    assert log_prob[1].isnan().all() and log_prob[kept].isfinite().all()


def equal_logits() -> None:
    """Equal words come in the order of the vocabulary."""
    weight = torch.zeros(8, D, dtype=torch.float64)
    words, _ = distributed.linear_top_k(
        torch.zeros(2, D, dtype=torch.float64), part(weight), 5, **group_of(8)
    )
    assert words.tolist() == 2 * [[0, 1, 2, 3, 4]]


def targets_of_which_some_are_ignored() -> None:
    """A token whose K targets are ignored gives 0; a target that no rank has gives NaN."""
    V = 8
    inputs, _ = tokens(V, torch.float64)
    target = torch.randint(0, V, (4, 3, 3))
    target[0], target[1, :, 0], target[2, 0] = -100, -100, target[2, 0, 0].item()
    dims = dims_of(inputs)
    parts = parts_of(inputs, dims)
    given = {"target": target, "temperature": 0.7}
    got = distributed.linear_log_prob(**parts, **given, **group_of(V))
    expected = liger_ops.linear_log_prob(**inputs, **given)
    check_gradients(expected, got, inputs, parts, dims, **FLOAT64)
    assert not got[0][0].any() and not got[1][0].any() and not got[0][1, :, 0].any()
    target[3, 0, 1] = V
    log_prob, _ = distributed.linear_log_prob(**parts, **given, **group_of(V))
    assert log_prob.isnan().nonzero().tolist() == [[3, 0, 1]]


def bytes_that_move() -> None:
    V, k = 8, 3
    inputs, _ = tokens(V, torch.float32)
    parts = parts_of(inputs, dims_of(inputs))
    call = functools.partial(distributed.linear_top_k, k=k, **group_of(V))
    (_, log_prob), forward = ranks.recorded(lambda: call(**parts))
    gather = "all_gather_into_tensor"
    assert sorted(forward) == [(gather, 4 * 12 * (k + 2)), (gather, 8 * 12 * k)], forward
    _, backward = ranks.recorded(lambda: torch.autograd.grad(log_prob.sum(), [*parts.values()]))
    assert backward == [("all_reduce", 4 * 12 * D)], backward


def compiled() -> None:
    inputs, _ = tokens(13, torch.float64)
    dims = dims_of(inputs)
    parts = parts_of(inputs, dims)
    target = torch.randint(0, 13, (4, 3, 4))
    for name, given in (("linear_top_k", {"k": 4}), ("linear_log_prob", {"target": target})):
        f = functools.partial(getattr(distributed, name), **given, chunk_bytes=64, **group_of(13))
        got = torch.compile(f, backend="aot_eager", fullgraph=True)(**parts)
        expected = getattr(liger_ops, name)(**inputs, **given, chunk_bytes=64)
        check_gradients(expected, got, inputs, parts, dims, **FLOAT64)


def centred_scores() -> None:
    """`LinearScoreCenteringLoss` of DTensors, with the words or the rows sharded."""
    V, mesh = 13, ranks.mesh(dist.get_world_size())
    inputs, target = tokens(V, torch.float64)
    words = torch.randint(0, V, (4, 3, 4))
    words[1, 0, 0] = target[1, 0]
    sampled = torch.randn(4, 3, 5, dtype=torch.float64).log_softmax(-1)
    given = {
        **inputs, "target": target, "words": words, "sampling_top_log_prob": sampled[..., :4],
        "advantages": torch.randn(4, 3, dtype=torch.float64), "sampling_log_prob": sampled[..., 4],
    }  # fmt: skip
    module = liger_ops.losses.LinearScoreCenteringLoss(
        importance_sampling="truncate", chunk_bytes=600
    )
    expected = module(**given)
    for by_words in (True, False):
        sharded = ("weight", "bias") if by_words else given.keys() - {"weight", "bias"}
        placed = {
            name: distribute_tensor(
                tensor.detach(), mesh, [Shard(0) if name in sharded else Replicate()]
            ).requires_grad_(tensor.requires_grad)
            for name, tensor in given.items()
        }
        found = module(**placed)
        for value, truth in zip(found, expected, strict=True):
            torch.testing.assert_close(value.full_tensor(), truth, **FLOAT64)
        # DTensor of PyTorch 2.11 finds no mesh in a backward whose first argument, dloss, is None.
        finds_mesh = by_words or torch.__version__ >= "2.13"
        for name in ("loss", "per_token_loss")[: 1 + finds_mesh]:
            sums = [getattr(output, name).sin().sum() for output in (found, expected)]
            leaves = [placed[name] for name in inputs], [*inputs.values()]
            pairs = zip(sums, leaves, strict=True)
            grads = [torch.autograd.grad(*pair, retain_graph=True) for pair in pairs]
            for value, truth in zip(*grads, strict=True):
                torch.testing.assert_close(value.full_tensor(), truth, **FLOAT64)


def refused() -> None:
    given, target = group_of(8), torch.zeros(4, 3, 2, dtype=torch.int64)
    x, weight = torch.zeros(4, 3, D), part(torch.zeros(8, D))
    top_k, log_prob = distributed.linear_top_k, distributed.linear_log_prob
    for message, call in (
        (
            "linear_top_k: k must be at most the number of words, 8",
            lambda: top_k(x, weight, 9, **given),
        ),
        ("linear_top_k: k must be at least 1", lambda: top_k(x, weight, 0, **given)),
        ("linear_top_k: weight must have .* words", lambda: top_k(x, weight[:1], 2, **given)),
        ("linear_log_prob: target must have", lambda: log_prob(x, weight, target[:3], **given)),
        (
            "linear_log_prob: target must have",
            lambda: log_prob(x, weight, target[..., :0], **given),
        ),
    ):
        with pytest.raises(ValueError, match=f"distributed.{message}"):
            call()
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        loss = top_k(x, weight, 2, **given)[1].sum()
        torch.autograd.grad(loss, weight, create_graph=True)


CHECKS = (
    words_without_probability, equal_logits, targets_of_which_some_are_ignored, bytes_that_move,
)  # fmt: skip

test_sharded_words = ranks.tests({2: (*CHECKS, refused, compiled, centred_scores), 4: CHECKS}, 300)
