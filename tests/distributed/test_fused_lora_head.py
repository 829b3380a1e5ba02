"""A head with LoRA of peft that is sharded: fused models train as in one process."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from packaging.version import Version
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import ranks
from adapted_heads import HEAD, adapted, styled
from fused_families import VOCABULARY
from liger_ops import backend, fuse
from parallel_plans import parallel
from plans_of_transformers import loaded
from sharded_training import Graphs, batch, compare, full, loss_of, made, shard, trained

pytestmark = pytest.mark.device_kernels

SECONDS = 300


def mesh() -> Any:
    return ranks.mesh(names=("tp",))["tp"]


@contextlib.contextmanager
def fused(model: Any) -> Iterator[Any]:
    report = fuse(model)
    assert report.counts().get("linear_cross_entropy") == 1, report.left
    with warnings.catch_warnings(action="error", category=UserWarning):
        assert "logits" not in model(**batch(0, 1))
        yield model


def adapters_are_whole() -> None:
    """A plan that names the linear layer alone: the gradients of the adapters are whole too."""
    with fused(styled(adapted(made(), adapters=2), mesh(), adapter=False)) as model:
        compare(trained(model), trained(adapted(made(), adapters=2)))


def adapters_are_sharded() -> None:
    truth = trained(adapted(made()))
    for sequence, logits in ((False, None), (False, Shard(-1)), (True, None)):
        with fused(styled(adapted(made()), mesh(), logits, sequence)) as model:
            compare(trained(model), truth)


def the_head_is_frozen() -> None:
    """As peft trains: no gradient but the adapters'."""
    runs = []
    for sharded in (False, True):
        model = adapted(made())
        model = styled(model, mesh()) if sharded else model
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora" in name)
        with fused(model):
            loss = loss_of(model)(**batch(0, 1))
        loss.backward()
        grads = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
        assert len(grads) == 2
        runs.append([(loss.detach(), {name: full(grad) for name, grad in grads.items()})])
    compare(runs[1], runs[0])


def no_logits_are_gathered() -> None:
    most = -(-VOCABULARY // dist.get_world_size())
    logits = "all_gather_into_tensor", batch(0, 1)["labels"].numel() * most * 4
    for switches, gathered in (({"loss": False}, True), ({}, False)):
        model = styled(adapted(made()), mesh())
        fuse(model, **switches)
        with ranks.Traffic() as traffic:
            loss_of(model)(**batch(0, 1)).backward()
        assert (logits in traffic.seen) is gathered


def loaded_with_a_plan_of_transformers() -> None:
    """peft shards the adapters, and takes heads that do not gather their logits alone."""
    one = made()
    model = loaded(one, tp_plan={"lm_head": "colwise"}, tp_size=dist.get_world_size())
    model, one = (adapted(each, "q_proj") for each in (model, one))
    # Each rank has drawn its part of an adapter.
    with torch.no_grad():
        for own, whole in zip(model.parameters(), one.parameters(), strict=True):
            whole.copy_(full(own))
    with fused(model):
        compare(trained(model), trained(one))


def the_step_is_compiled() -> None:
    graphs, model = Graphs(), styled(adapted(made()), mesh())
    fuse(model)
    options = {"inner_backend": graphs, "strict": True}
    step = torch.compile(loss_of(model), backend=backend, options=options)
    compare(trained(model, step), trained(adapted(made())))
    assert len(graphs) == 1 and not graphs.nodes("cross_entropy")


def what_the_op_does_not_compute_is_left() -> None:
    truth, calls = trained(adapted(made())), []
    model = styled(adapted(made()), mesh())
    fuse(model)
    model.get_submodule(f"{HEAD}.lora_B.default").register_forward_hook(
        lambda *given: calls.append(given)
    )
    with pytest.warns(UserWarning, match="an adapter of its head has hooks"):
        compare(trained(model), truth)
    assert len(calls) == 3
    # peft gives a head that is sharded already an adapter of the rank's words, whose output cannot
    # be added to the logits of all words.
    model = adapted(parallel(made(), mesh(), sequence=False))
    reasons = [finding.reason for finding in fuse(model).left]
    assert "an adapter of its head is not sharded over words as its head is" in reasons, reasons
    with pytest.raises(RuntimeError, match="size of tensor"):
        model(**batch(0, 1))
    # A rank's words have no loss of their own.
    model = styled(adapted(made()), mesh(), Shard(-1))
    fuse(model)
    with pytest.raises(ValueError, match="its head returns the logits of a rank's words"):
        model(**batch(0, 1), skip_logits=False, reduction="sum")


def sharded_by_fsdp() -> None:
    """The head with its adapters, or its linear layer by itself."""
    truth = trained(adapted(made()).base_model.model)
    for together in (True, False):
        inner = adapted(made()).base_model.model
        fuse(inner)
        apart = inner.lm_head if together else inner.lm_head.base_layer
        fully_shard(apart, mesh=ranks.mesh())
        shard(inner)
        with warnings.catch_warnings(action="error", category=UserWarning):
            compare(trained(inner), truth)


CHECKS = [
    adapters_are_whole,
    adapters_are_sharded,
    the_head_is_frozen,
    no_logits_are_gathered,
    the_step_is_compiled,
    what_the_op_does_not_compute_is_left,
    sharded_by_fsdp,
]
# Before peft 0.21.1 the adapters of a head with a plan are whole, and its output cannot be added.
if Version(peft.__version__) >= Version("0.21.1"):
    CHECKS.append(loaded_with_a_plan_of_transformers)

test_fused_lora_head = ranks.tests({2: CHECKS}, SECONDS)
