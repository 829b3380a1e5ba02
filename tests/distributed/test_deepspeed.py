"""DeepSpeed's ZeRO: fused models train as others do."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ranks
from fused_families import Family
from liger_ops import fuse
from reloaded_models import reloaded
from sharded_training import LLAMA, ROWS, STEPS, TRAINED, Run, batch, compare, items, made, named

pytestmark = [
    pytest.mark.device_kernels,
    pytest.mark.skipif(
        importlib.util.find_spec("deepspeed") is None,
        reason="deepspeed is not installed: it compiles an operator of its own before it trains",
    ),
]

SECONDS = 400


def configuration(stage: int) -> dict[str, Any]:
    # Every parameter is partitioned, however small.
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


def as_launched() -> None:
    """Set what a launcher sets for DeepSpeed."""
    local = torch.cuda.current_device() if ranks.DEVICE == "cuda" else dist.get_rank()
    os.environ.update(LOCAL_RANK=str(local), DS_ACCELERATOR=ranks.DEVICE)


def engine_of(model: Any, stage: int = 3) -> Any:
    as_launched()
    import deepspeed

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=configuration(stage))[0]


def trained(engine: Any) -> Run:
    from deepspeed.utils import safe_get_full_grad

    count, rank, run = dist.get_world_size(), dist.get_rank(), []
    for step in range(STEPS):
        whole = batch(step, count)
        given = {name: value[rank * ROWS : (rank + 1) * ROWS] for name, value in whole.items()}
        # Ranks are averaged.
        loss = engine(**given, num_items_in_batch=items(whole)).loss * count
        engine.backward(loss)
        total = loss.detach() / count
        dist.all_reduce(total)
        grads = {name: safe_get_full_grad(p) for name, p in engine.module.named_parameters()}
        run.append((total, grads))
        engine.step()
    return run


@functools.cache
def expected(name: str) -> Run:
    """The same steps without any op."""
    return trained(engine_of(made(named(name))))


@contextlib.contextmanager
def without_logits(model: Any) -> Any:
    """No call computes logits, or says that it has to."""
    seen = []
    hook = model.register_forward_hook(lambda *given: seen.append(given[-1].logits))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="liger_ops")
        yield
    hook.remove()
    assert seen and seen == [None] * len(seen)


def fused_first() -> None:
    for stage in (2, 3):
        for family in TRAINED:
            model = made(family)
            assert len(fuse(model)) > 5
            engine = engine_of(model, stage)
            with without_logits(model):
                compare(trained(engine), expected(family.name))


def fused_after() -> None:
    for family in TRAINED:
        found = fuse(made(family)).counts()
        engine = engine_of(made(family))
        counts = fuse(engine.module).counts()
        assert all(counts[name] == found[name] for name in ("rms_norm", "linear_cross_entropy"))
        with without_logits(engine.module):
            compare(trained(engine), expected(family.name))


def loaded_in_parts(family: Family) -> Any:
    """A model whose parameters are partitioned as they are loaded, as Trainer's are."""
    from transformers.integrations import HfDeepSpeedConfig

    as_launched()
    model = made(family)
    # transformers partitions while this object lives.
    partitioning = HfDeepSpeedConfig(configuration(3))
    loaded = reloaded(model, dtype=torch.float32)
    del partitioning
    assert all(not parameter.numel() for parameter in loaded.parameters())
    return loaded


def fused_in_parts() -> None:
    for family in TRAINED:
        model = loaded_in_parts(family)
        counts = fuse(model).counts()
        assert counts == fuse(made(family)).counts()
        engine = engine_of(model)
        with without_logits(model):
            compare(trained(engine), expected(family.name))


def activations_are_checkpointed() -> None:
    for reentrant in (False, True):
        model = made(LLAMA)
        fuse(model)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        compare(trained(engine_of(model)), expected(LLAMA.name))


CHECKS = [fused_first, fused_after, fused_in_parts, activations_are_checkpointed]

test_deepspeed = ranks.tests({2: CHECKS}, SECONDS)
