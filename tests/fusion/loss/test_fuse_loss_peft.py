"""A head wrapped by peft: trained whole, adapted, merged, before fuse and after."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from causal_models import assert_trains_alike, batch
from fused_families import text
from liger_ops.fusion import loss, unfuse

peft = pytest.importorskip("peft", reason="the adapters are peft's")

FAMILY = text("Llama", 3, num_hidden_layers=1)


def adapted(model: Any, **options: Any) -> Any:
    config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False, **options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return peft.get_peft_model(model, config)


def adapted_pair(when: str, **options: Any) -> tuple[Any, Any]:
    """The model with adapters, and the same model fused before or after adding them."""
    model, fused = FAMILY.model(), FAMILY.model()
    if when == "before":
        assert loss.fuse(fused)
    model, fused = adapted(model, **options), adapted(fused, **options)
    if when == "after":
        report = loss.fuse(fused)
        assert [entry.where for entry in report.fused] == ["base_model.model"]
        assert not report.left
    return model, fused


@pytest.mark.parametrize("when", ["before", "after"])
def test_head_trained_whole(when: str) -> None:
    model, fused = adapted_pair(when, modules_to_save=["lm_head"])
    with torch.no_grad():
        for one in (model, fused):
            one.base_model.model.lm_head.modules_to_save["default"].weight.mul_(1.5)
    assert_trains_alike(fused, model, **batch())
    names = {name for name, grad in fused.named_parameters() if grad.grad is not None}
    assert any("lm_head.modules_to_save" in name for name in names)
    with model.disable_adapter(), fused.disable_adapter():
        # Disabling the adapters leaves everything frozen.
        output = fused(**batch())
        assert output.logits is None
        torch.testing.assert_close(output.loss, model(**batch()).loss)
    if when == "after":
        assert unfuse(fused) == 1


@pytest.mark.parametrize("when", ["before", "after"])
def test_head_trained_whole_is_traced(when: str) -> None:
    """A head that is replaced after `fuse` gets its class in an eager call."""
    model, fused = adapted_pair(when, modules_to_save=["lm_head"])
    torch._dynamo.reset()
    compiled = torch.compile(fused, fullgraph=True, backend="eager")
    if when == "before":
        with pytest.warns(UserWarning, match="has not been called before torch.compile"):
            torch.testing.assert_close(compiled(**batch()).loss, model(**batch()).loss)
        fused(**batch())
        torch._dynamo.reset()
    output = compiled(**batch())
    assert output.logits is None
    torch.testing.assert_close(output.loss, model(**batch()).loss)


def test_adapted_head_and_merged_head() -> None:
    model, fused = FAMILY.model(), FAMILY.model()
    loss.fuse(fused)
    config = peft.LoraConfig(target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    for one in (model, fused):
        torch.manual_seed(3)
        peft.inject_adapter_in_model(config, one)
    assert_trains_alike(fused, model, **batch())
    for one in (model, fused):
        one.lm_head.merge()
    assert_trains_alike(fused, model, **batch())
    for one in (model, fused):
        one.lm_head.unmerge()
        one.lm_head.enable_adapters(False)
    output = fused(**batch())
    assert output.logits is None
    torch.testing.assert_close(output.loss, model(**batch()).loss)


def test_merged_and_unloaded() -> None:
    options: dict[str, Any] = {"target_modules": ["q_proj", "lm_head"], "init_lora_weights": False}
    model, fused = FAMILY.model(), FAMILY.model()
    loss.fuse(fused)
    for_both = []
    for one in (model, fused):
        torch.manual_seed(3)
        for_both.append(peft.get_peft_model(one, peft.LoraConfig(**options)).merge_and_unload())
    # The adapted layers are still frozen.
    assert_trains_alike(*(one.requires_grad_() for one in reversed(for_both)), **batch())
