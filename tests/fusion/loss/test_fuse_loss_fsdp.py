"""The fused loss of models sharded by FSDP2, fused before and after `fully_shard`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from causal_models import assert_same_gradients, assert_trains_alike, batch, gradients
from fused_families import text
from liger_ops import explain
from liger_ops.fusion import loss

FAMILY = text("Llama", 3, num_hidden_layers=1)


def sharded(model: Any, mesh: Any, head: bool = False, **options: Any) -> Any:
    parts = [*model.model.layers, *([model.lm_head] if head else []), model]
    for part in parts:
        fully_shard(part, mesh=mesh, **options)
    return model


def test_mixed_precision(mesh: Any) -> None:
    """The head's product is in bfloat16, as without fuse."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model, fused = (sharded(FAMILY.model(), mesh, mp_policy=policy) for _ in range(2))
    loss.fuse(fused)
    output, expected = fused(**batch()), model(**batch())
    assert output.logits is None
    assert output.loss.dtype is expected.loss.dtype
    torch.testing.assert_close(output.loss, expected.loss, rtol=1e-4, atol=1e-4)
    grads = gradients(fused, output.loss), gradients(model, expected.loss)
    assert_same_gradients(*grads, bound=2e-2)


@pytest.mark.parametrize("group", [[], ["lm_head"], ["model.norm", "lm_head"]], ids=str)
@pytest.mark.parametrize("when", ["before", "after"])
def test_trains_as_before(mesh: Any, group: list[str], when: str) -> None:
    """The head is sharded with the model, or by itself, or with the last norm as by accelerate.
    FSDP2's hooks of it gather its weight, reduce its gradient, and run around the loss."""
    model, fused = FAMILY.model(), FAMILY.model()
    if when == "before":
        loss.fuse(fused)
    if group:
        parts = [fused.get_submodule(name) for name in group]
        fully_shard(parts, mesh=mesh, reshard_after_forward=True)
    sharded(fused, mesh)
    if when == "after":
        report = loss.fuse(fused)
        assert [e.class_name for e in report.fused] == ["LlamaForCausalLM"] and not report.left
    assert_trains_alike(fused, model, **batch())
    assert isinstance(fused.lm_head.weight, DTensor)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    "adapters",
    [
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        {"target_modules": ["lm_head"]},
    ],
    ids=["saved", "lora"],
)
def test_adapted_head_sharded_by_itself(mesh: Any, adapters: dict[str, Any], when: str) -> None:
    """As accelerate shards a model of peft: the hooks are those of peft's module."""
    peft = pytest.importorskip("peft", reason="the adapters are peft's")
    model, fused = FAMILY.model(), FAMILY.model()
    if when == "before":
        loss.fuse(fused)
    config = peft.LoraConfig(**adapters, init_lora_weights=False)
    for one in (model, fused):
        torch.manual_seed(3)
        peft.get_peft_model(one, config)
    fully_shard([fused.model.norm, fused.lm_head], mesh=mesh, reshard_after_forward=True)
    sharded(fused, mesh)
    if when == "after":
        assert len(loss.fuse(fused)) == 1
    assert_trains_alike(fused, model, **batch())
    assert all(isinstance(parameter, DTensor) for parameter in fused.lm_head.parameters())


def test_head_whose_policy_rounds_its_output(mesh: Any) -> None:
    """It would round the loss in the place of the logits."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.bfloat16)
    report = loss.fuse(sharded(FAMILY.model(), mesh, head=True, mp_policy=policy))
    assert not report
    assert "with the output_dtype torch.bfloat16" in report.left[0].reason


def test_head_with_another_hook(mesh: Any) -> None:
    """It has to be called."""
    model, fused = FAMILY.model(), FAMILY.model()
    loss.fuse(fused)
    sharded(fused, mesh, head=True)
    fused.lm_head.register_forward_hook(lambda *_: None)
    with pytest.warns(UserWarning, match="from all logits, as it did before fuse: its head has"):
        output = fused(**batch())
    torch.testing.assert_close(output.loss, model(**batch()).loss)


def test_explain_says_where_the_logits_go(mesh: Any) -> None:
    """The graph ends at FSDP2's hooks of the model, and its output holds the logits."""
    model = sharded(FAMILY.model(), mesh)
    report = explain(lambda **given: model(**given).loss, **batch())
    (finding,) = [one for one in report.left if one.op == "linear_cross_entropy"]
    assert "the logits are returned, to the code after the hooks of FSDP2 or DDP" in finding.reason
