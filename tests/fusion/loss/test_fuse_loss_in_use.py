"""A model with fused loss in use: copied, saved, checkpointed, extended, inside another."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from causal_models import (
    LLAMA,
    Tiny,
    assert_same_gradients,
    assert_same_output,
    assert_trains_alike,
    batch,
    gradients,
    pair,
    with_fused_loss,
)
from fused_models import fused_modules
from liger_ops.fusion import fuse, loss, unfuse


def test_signature_and_name_are_those_of_the_class() -> None:
    model, fused = pair()
    assert inspect.signature(fused.forward) == inspect.signature(model.forward)
    assert type(fused).__name__ == type(model).__name__
    assert isinstance(fused, type(model))


def test_gradient_checkpointing() -> None:
    model, fused = pair()
    for one in (model, fused):
        one.gradient_checkpointing_enable({"use_reentrant": False})
    assert_trains_alike(fused, model, **batch())


def test_checkpointed_as_a_whole() -> None:
    model, fused = pair()

    def value(**inputs: Any) -> Tensor:
        return fused(**inputs).loss

    actual = torch.utils.checkpoint.checkpoint(value, **batch(), use_reentrant=False)
    expected = model(**batch()).loss
    assert_same_gradients(gradients(fused, actual), gradients(model, expected))


def test_save_pretrained(tmp_path: Path) -> None:
    model, fused = pair()
    fuse(fused)
    fused.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager"
    ).train()
    assert type(loaded) is type(model) and not fused_modules(loaded)
    assert loaded.state_dict().keys() == fused.state_dict().keys()
    assert_same_output(loaded(**batch()), model(**batch()))
    assert_trains_alike(with_fused_loss(loaded), model, **batch())


def test_two_models_share_a_class() -> None:
    """Code that torch.compile made for one model is used for the other."""
    assert type(pair()[1]) is type(pair()[1])


def test_model_in_a_model() -> None:
    model = LLAMA.model()
    parent = nn.ModuleDict({"language": model})
    report = fuse(parent)
    assert [entry.where for entry in report.fused if entry.kind == "loss"] == ["language"]
    assert parent["language"](**batch()).logits is None
    unfuse(parent)
    assert parent["language"](**batch()).logits is not None


def test_random_state_and_global_modes_are_kept() -> None:
    model = LLAMA.model()
    torch.manual_seed(3)
    state = torch.get_rng_state()
    with torch.inference_mode(), torch.device("meta"):
        loss.fuse(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert_trains_alike(model, LLAMA.model(), **batch())


def test_replica_of_data_parallel() -> None:
    """A replica shares its class with the model, and its head holds a plain tensor."""
    model, fused = pair()
    replica = fused._replicate_for_data_parallel()
    replica.lm_head = fused.lm_head._replicate_for_data_parallel()
    replica.lm_head.weight = fused.lm_head.weight * 2
    replica.lm_head._parameters["bias"] = None
    output = replica(**batch())
    assert output.logits is None
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    torch.testing.assert_close(output.loss, model(**batch()).loss)


def test_forward_that_extends_another() -> None:
    class Extended(transformers.LlamaForCausalLM):
        def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
            return super().forward(input_ids=input_ids, labels=labels, **kwargs)

    model = LLAMA.model()
    model.__class__ = Extended
    assert_trains_alike(with_fused_loss(model), model, **batch())


def test_attributes_that_forward_sets_reach_the_model() -> None:
    class Counting(Tiny):
        calls = 0

        def forward(self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any) -> Any:
            self.calls += 1
            return super_forward(self, input_ids, labels, **kwargs)

    super_forward = Tiny.forward
    model = Counting()
    model.calls = 5
    model = with_fused_loss(model)
    assert model(**batch())["loss"].isfinite()
    model(**batch())
    assert vars(model)["calls"] == 7
