"""FSDP2: fused and compiled models train as in one process."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor

import ranks
from liger_ops import backend, fuse
from sharded_training import (
    MIXTURE,
    TRAINED,
    Graphs,
    batch,
    check,
    full,
    loss_of,
    made,
    shard,
    trained,
)

pytestmark = pytest.mark.device_kernels

SECONDS = 400


def compiled_layers(model: Any, graphs: Graphs) -> Any:
    for layer in model.model.layers:
        layer.compile(backend=backend, options={"inner_backend": graphs, "strict": True})
    return model


def parts_left_to_eager(model: Any) -> Any:
    """Fuse what is outside of the layers, or reaches across them."""
    fuse(model, norms=False, activations=False, rope=False)
    return model


def fused_before_it_is_sharded() -> None:
    for family in TRAINED:
        model = made(family)
        assert len(fuse(model)) > 5
        check(trained(shard(model)), family)


def fused_after_it_is_sharded() -> None:
    for family in TRAINED:
        model = shard(made(family))
        assert len(fuse(model)) > 5
        check(trained(model), family)


def sharded_and_replicated() -> None:
    """A mesh of two dimensions: parameters are sharded over one, and replicated over the other."""
    mesh = ranks.mesh(2, 2, names=("replicate", "shard"))
    for first in (True, False):
        model = made() if first else shard(made(), mesh=mesh)
        fuse(model)
        check(trained(shard(model, mesh=mesh) if first else model))
    graphs, model = Graphs(), parts_left_to_eager(made())
    check(trained(shard(compiled_layers(model, graphs), mesh=mesh)))
    assert graphs.nodes("swiglu")


def no_logits_are_computed() -> None:
    model = shard(made())
    fuse(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "logits" not in model(**batch(0, 1))


def layers_are_rewritten() -> None:
    graphs, family = Graphs(), MIXTURE
    model = shard(compiled_layers(parts_left_to_eager(made(family)), graphs))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="liger_ops")
        check(trained(model), family)
    # All layers share one compilation.
    for name in ("rms_norm_rope", "moe_experts", "fused_add_rms_norm", "rms_norm"):
        assert len(graphs.nodes(name)) == 1, name
    (attention,) = graphs.nodes("scaled_dot_product_attention")
    assert attention.kwargs["is_causal"] and attention.kwargs["attn_mask"] is None


def layers_of_fused_norms_are_rewritten() -> None:
    """The norms that FSDP2 holds call the op by name, which is a part of fused_add_rms_norm."""
    graphs, model = Graphs(), shard(made())
    fuse(model)
    compiled_layers(model, graphs)
    check(trained(model))
    assert graphs.nodes("fused_add_rms_norm")


def the_whole_model_is_compiled() -> None:
    graphs = Graphs()
    model = parts_left_to_eager(shard(made()))
    options = {"inner_backend": graphs, "strict": True}
    check(trained(model, torch.compile(loss_of(model), backend=backend, options=options)))
    names = ["rope", "fused_add_rms_norm"]
    # FSDP2's hooks break the graph of the forward in which logits are skipped. Dynamo of torch 2.11
    # then runs that forward, and the loss in it, outside of graphs.
    if Version(torch.__version__) >= Version("2.12"):
        names.append("linear_cross_entropy")
    for name in names:
        assert graphs.nodes(name), name


def gradients_are_accumulated() -> None:
    model = shard(made())
    fuse(model)
    check(trained(model, parts=2))


def activations_are_checkpointed() -> None:
    for compiled in (False, True):
        model = shard(made())
        model.gradient_checkpointing_enable({"use_reentrant": False})
        fuse(model, norms=not compiled, activations=not compiled, rope=not compiled)
        if compiled:
            compiled_layers(model, Graphs())
        check(trained(model))


def whole_parameters_stay_after_the_forward() -> None:
    for reshards in (False, True):
        model = shard(made(), reshard_after_forward=reshards)
        fuse(model)
        check(trained(model))


def the_head_is_gathered_once_and_freed() -> None:
    """The collectives of a step, and their bytes, are those of the model without `fuse`, also where
    the head is sharded with the last norm."""

    def collectives(change: Callable[[Any], Any], apart: bool) -> list[tuple[str, int]]:
        model = made()
        if apart:
            fully_shard([model.model.norm, model.lm_head])
        shard(model)
        change(model)
        # The first step initialises FSDP2.
        loss_of(model)(**batch(0, 1)).backward()
        with ranks.Traffic() as traffic:
            loss_of(model)(**batch(1, 2)).backward()
        assert isinstance(model.lm_head.weight, DTensor)
        for module in model.modules():
            if hasattr(module, "unshard"):
                groups = getattr(module._get_fsdp_state(), "_fsdp_param_groups", None)
                groups = groups or [module._get_fsdp_state()._fsdp_param_group]
                for held in (one for group in groups for one in group.fsdp_params):
                    assert held._unsharded_param.untyped_storage().size() == 0
        return traffic.seen

    for apart in (False, True):
        ours = collectives(fuse, apart)
        # An all-gather of each group, again in the backward but for the model's own, and a
        # reduce-scatter.
        assert len(ours) >= 3 * 3 - 1
        assert ours == collectives(lambda model: None, apart)


def the_head_is_sharded_with_the_last_norm() -> None:
    """As accelerate does; or by itself."""
    for together in (True, False):
        model = made()
        fuse(model)
        fully_shard([model.model.norm, model.lm_head] if together else model.lm_head)
        shard(model)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="liger_ops")
            check(trained(model, parts=1 if together else 2))
        assert isinstance(model.lm_head.weight, DTensor)


def sharded_by_fsdp1() -> None:
    """Before FSDP1, which sets a part of each weight in its place; afterwards fuse says so."""
    wrap = functools.partial(
        FullyShardedDataParallel, use_orig_params=True, device_id=torch.device(ranks.DEVICE),
        auto_wrap_policy=ModuleWrapPolicy({type(made().model.layers[0])}),
    )  # fmt: skip
    model, late = made(), made()
    assert len(fuse(model)) > 5
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="liger_ops")
        check(trained(wrap(model)))
    wrap(late)
    reasons = " ".join(finding.reason for finding in fuse(late).left)
    assert "held by FSDP" in reasons and "FullyShardedDataParallel" in reasons


def a_policy_of_bfloat16() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    runs = []
    for fused in (True, False):
        model = shard(made(), mp_policy=policy)
        if fused:
            assert len(fuse(model)) > 5
        loss = loss_of(model)(**batch(0, 2))
        assert loss.dtype is torch.float32 or not fused
        loss.backward()
        runs.append((loss.detach(), [full(one.grad) for one in model.parameters()]))
    truth = made()
    loss = loss_of(truth)(**batch(0, 2))
    loss.backward()
    errors = [
        torch.stack(
            [(grad - one.grad).norm() for grad, one in zip(grads, truth.parameters(), strict=True)]
        ).norm()
        for _, grads in runs
    ]
    whole = torch.stack([one.grad.norm() for one in truth.parameters()]).norm()
    assert errors[0] <= 2 * errors[1] + 2**-8 * whole, errors
    fused_error, error = ((value - loss).abs() for value, _ in runs)
    assert fused_error <= 2 * error + 2**-8 * loss


CHECKS = [
    fused_before_it_is_sharded,
    fused_after_it_is_sharded,
    no_logits_are_computed,
    layers_are_rewritten,
    layers_of_fused_norms_are_rewritten,
    the_whole_model_is_compiled,
    gradients_are_accumulated,
    activations_are_checkpointed,
    whole_parameters_stay_after_the_forward,
    the_head_is_gathered_once_and_freed,
    the_head_is_sharded_with_the_last_norm,
    sharded_by_fsdp1,
    a_policy_of_bfloat16,
]

test_fsdp = ranks.tests(
    {2: CHECKS, 4: [fused_after_it_is_sharded, sharded_and_replicated]}, SECONDS
)
