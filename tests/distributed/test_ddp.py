"""DDP: fused and compiled models train as in one process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ranks
from liger_ops import backend, fuse
from sharded_training import MIXTURE, TRAINED, Graphs, batch, check, loss_of, made, trained

pytestmark = pytest.mark.device_kernels

SECONDS = 400
PARTS = {"rope": 2, "fused_add_rms_norm": 4, "linear_cross_entropy": 1}


def replicated(model: Any, **options: Any) -> Any:
    return DistributedDataParallel(model, **options)


def fused() -> None:
    for family in TRAINED:
        model = made(family)
        assert len(fuse(model)) > 5
        check(trained(replicated(model)), family)


def with_a_static_graph() -> None:
    model = made()
    fuse(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    check(trained(replicated(model, static_graph=True)))


@contextlib.contextmanager
def small_buckets(megabytes: float) -> Iterator[dict[str, Any]]:
    """Dynamo splits the graph of the model at the bounds of DDP's buckets."""
    first_bucket = dist._DEFAULT_FIRST_BUCKET_BYTES
    dist._DEFAULT_FIRST_BUCKET_BYTES = 8000
    try:
        yield {"bucket_cap_mb": megabytes}
    finally:
        dist._DEFAULT_FIRST_BUCKET_BYTES = first_bucket


def with_gradients_that_are_views_of_buckets() -> None:
    model = made()
    fuse(model)
    with small_buckets(0.01) as buckets:
        model = replicated(model, gradient_as_bucket_view=True, static_graph=True, **buckets)
        check(trained(model))
    loss_of(model)(**batch(0, 1)).backward()
    stored = {one.grad.untyped_storage().data_ptr() for one in model.parameters()}
    assert 2 < len(stored) < len(list(model.parameters()))


def the_collectives_are_those_of_the_model() -> None:
    def collectives(change: Callable[[Any], Any]) -> list[tuple[str, int]]:
        model = made()
        change(model)
        with small_buckets(0.01) as buckets:
            model = replicated(model, **buckets)
            # The first step orders the buckets.
            loss_of(model)(**batch(0, 1)).backward()
            with ranks.Traffic() as traffic:
                loss_of(model)(**batch(0, 1)).backward()
        return traffic.seen

    ours = collectives(fuse)
    assert sum(name == "allreduce_" for name, _ in ours) > 2
    assert ours == collectives(lambda model: None)


def with_parameters_that_may_be_unused() -> None:
    model = made(MIXTURE)
    fuse(model)
    check(trained(replicated(model, find_unused_parameters=True)), MIXTURE)


def with_a_parameter_that_is_unused() -> None:
    """A fused norm and a fused head do not hide from DDP that a layer is not used."""
    model, plain = made(), made()
    fuse(model)
    for one in (model, plain):
        one.model.layers[1].forward = lambda hidden_states, *args, **kwargs: hidden_states
    rows = batch(0, 1)
    wrapped = replicated(model, find_unused_parameters=True)
    loss_of(wrapped)(**rows).backward()
    loss_of(plain)(**rows).backward()
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        if one.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6)


def accumulated() -> None:
    model = made()
    fuse(model)
    model = replicated(model)
    rows = batch(0, 1)
    with model.no_sync():
        loss_of(model)(**rows).backward()
    loss_of(model)(**rows).backward()
    plain = made()
    (2 * loss_of(plain)(**rows)).backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6)


def each_graph_of_a_bucket_is_rewritten() -> None:
    graphs, model = Graphs(), made()
    fuse(model, norms=False, activations=False, rope=False)
    options = {"inner_backend": graphs, "strict": True}
    with small_buckets(0.01) as buckets:
        model = replicated(model, **buckets)
        step = torch.compile(loss_of(model), backend=backend, options=options)
        check(trained(model, step))
    assert len(graphs) > 2
    assert {name: len(graphs.nodes(name)) for name in PARTS} == PARTS
    # A bound between the projections of gate and up cuts one of them.
    assert len(graphs.nodes("swiglu")) >= 1


def a_padded_batch_follows_a_full_one() -> None:
    """AOTAutograd refuses another compilation of a part of a graph that is split."""
    model, plain = made(), made()
    options = {"inner_backend": "aot_eager", "strict": True}
    rows = batch(0, 1)
    # The first part has attention, beside the mask's operations.
    with small_buckets(0.03) as buckets:
        step = torch.compile(
            loss_of(replicated(model, **buckets)), backend=backend, options=options
        )
        for padded in (False, True, False):
            mask = torch.ones_like(rows["labels"])
            mask[1, -2:] = 0 if padded else 1
            given = {**rows, "attention_mask": mask}
            losses = []
            for one, compute in ((model, step), (plain, loss_of(plain))):
                one.zero_grad()
                loss = compute(**given)
                loss.backward()
                losses.append(loss.detach())
            torch.testing.assert_close(*losses)
            for one, other in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6)


CHECKS = [
    fused,
    with_a_static_graph,
    with_gradients_that_are_views_of_buckets,
    the_collectives_are_those_of_the_model,
    with_parameters_that_may_be_unused,
    with_a_parameter_that_is_unused,
    accumulated,
    each_graph_of_a_bucket_is_rewritten,
    a_padded_batch_follows_a_full_one,
]

test_ddp = ranks.tests({2: CHECKS}, SECONDS)
