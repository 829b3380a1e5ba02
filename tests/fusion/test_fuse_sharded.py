"""`fuse` and FSDP2's `fully_shard`, in either order; tests/distributed has several ranks."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

from fused_models import LLAMA
from liger_ops import fuse, unfuse

STEPS = 2
PARTS = {"rms_norm": 5, "swiglu": 2, "rope": 2}
pytestmark = pytest.mark.usefixtures("mesh")


def sharded(model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """Shard each layer, some parts of the first layer, and the rest of the model."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    first, *others = model.model.layers
    for module in (first.mlp, first.input_layernorm, first.self_attn, first, *others, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    return model


def trained(model: nn.Module) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The losses of a few training steps, and the gradients of the last step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = LLAMA.inputs(torch.float32)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        # Each rank has different rows.
        rows = x.roll(dist.get_rank(), dims=1)
        loss = model(rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    gradients = {name: whole(parameter.grad) for name, parameter in model.named_parameters()}
    return losses, gradients


def whole(x: Any) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def check_training() -> None:
    expected = trained(sharded(LLAMA.model()))
    before, after = LLAMA.model(), sharded(LLAMA.model())
    assert Counter(entry.op for entry in fuse(before).fused) == LLAMA.parts
    found = Counter(entry.op for entry in fuse(after).fused)
    assert {op: found[op] for op in PARTS} == PARTS
    for model in (sharded(before), after):
        torch.testing.assert_close(trained(model), expected, rtol=1e-4, atol=1e-5)


def test_trains_as_before_in_a_world_of_one() -> None:
    check_training()


def test_shards_stay_and_classes_come_back() -> None:
    model, untouched = sharded(LLAMA.model()), sharded(LLAMA.model())
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    report = fuse(model)
    assert {entry.class_name for entry in report.fused} >= {"LlamaRMSNorm", "LlamaMLP"}
    assert fuse(model).fused == ()
    assert all(module is modules[name] for name, module in model.named_modules())
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert type(model.model.norm).__name__ == "LlamaRMSNorm"
    trained(model)
    assert unfuse(model) == len(report)
    assert [type(module) for module in model.modules()] == [
        type(module) for module in untouched.modules()
    ]
    trained(model)


def test_fused_before_sharding() -> None:
    """The classes below FSDP2's come back."""
    model = LLAMA.model()
    fuse(model)
    assert unfuse(sharded(model))
    expected = [type(module) for module in sharded(LLAMA.model()).modules()]
    assert [type(module).__name__ for module in model.modules()] == [
        one.__name__ for one in expected
    ]


def test_parameters_of_the_policys_dtype() -> None:
    model, untouched = (sharded(LLAMA.model(), torch.bfloat16) for _ in range(2))
    assert len(fuse(model)) >= sum(PARTS.values())
    x = LLAMA.inputs(torch.float32)
    truth = LLAMA.model()(x).logits
    y, expected = model(x).logits, untouched(x).logits
    assert y.dtype is expected.dtype is torch.bfloat16
    assert (y - truth).norm() <= 2 * (expected - truth).norm() + 2**-8 * truth.norm()


def test_unsharded_for_now() -> None:
    """Between forward and backward FSDP2 may leave whole tensors in the modules."""
    model = sharded(LLAMA.model())
    for module in model.modules():
        if hasattr(module, "unshard"):
            module.unshard()
    modules = list(model.modules())
    assert len(fuse(model, loss=False)) == sum(PARTS.values())
    assert all(ours is theirs for ours, theirs in zip(model.modules(), modules, strict=True))
    trained(model)


def test_a_part_of_a_sharded_model() -> None:
    """The whole model holds the part's parameters, and `fuse` gets only the part."""
    layer = sharded(LLAMA.model()).model.layers[0]
    report = fuse(layer.post_attention_layernorm)
    assert not report
    assert "held by FSDP" in report.left[0].reason


def test_norms_that_tensor_parallelism_shards() -> None:
    """A weight that every rank has whole is a norm's, and the module stays in its place."""
    mesh = init_device_mesh("cpu", (1,))
    replicated, sharded_weight = (nn.Sequential(nn.LayerNorm(8)) for _ in range(2))
    parallelize_module(replicated, mesh, {"0": SequenceParallel()})
    norm, hooks = replicated[0], dict(replicated[0]._forward_pre_hooks)
    assert fuse(replicated).counts() == {"layer_norm": 1}
    assert replicated[0] is norm and dict(norm._forward_pre_hooks) == hooks
    assert unfuse(replicated) == 1 and type(norm) is nn.LayerNorm

    weight = distribute_tensor(sharded_weight[0].weight.detach(), mesh, [Shard(0)])
    sharded_weight[0].weight = nn.Parameter(weight)
    report = fuse(sharded_weight)
    assert not report and "sharded" in report.left[0].reason


def test_fused_before_tensor_parallelism() -> None:
    model = nn.Sequential(nn.LayerNorm(8))
    fuse(model)
    parallelize_module(model, init_device_mesh("cpu", (1,)), {"0": SequenceParallel()})
    assert unfuse(model) == 1 and type(model[0]) is nn.LayerNorm
