"""A head with LoRA adapters of peft: fused where peft adds plain LoRAs, and otherwise left."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from causal_models import assert_same_gradients, batch, gradients
from fused_families import text
from liger_ops.fusion import loss, unfuse

peft = pytest.importorskip("peft", reason="the adapters are peft's")

FAMILY = text("Llama", 3, num_hidden_layers=1)
ON_HEAD = {"target_modules": ["q_proj", "lm_head"], "init_lora_weights": False, "r": 4}


def adapted(model: Any, *configs: dict[str, Any]) -> Any:
    """The model with an adapter for each configuration, all of them active."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        first, *others = (peft.LoraConfig(**{**ON_HEAD, **config}) for config in configs)
        model = peft.get_peft_model(model, first)
        for i, config in enumerate(others):
            model.add_adapter(f"other{i}", config)
    if others:
        model.base_model.set_adapter(["default", *(f"other{i}" for i in range(len(others)))])
    return model


def pair(*configs: dict[str, Any], family: Any = FAMILY) -> tuple[Any, Any]:
    """The model with adapters, and the same model fused."""
    model, fused = adapted(family.model(), *configs), adapted(family.model(), *configs)
    report = loss.fuse(fused)
    assert report.fused and not report.left
    return fused, model


def run(model: Any, **inputs: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """A step's output and gradients, with the same dropout for every model."""
    torch.manual_seed(5)
    output = model(**{**batch(), **inputs})
    return output, gradients(model, output.loss)


def assert_fused(fused: Any, model: Any, **inputs: Any) -> dict[str, torch.Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        output, found = run(fused, **inputs)
    expected, grads = run(model, **inputs)
    assert output.logits is None and expected.logits is not None
    torch.testing.assert_close(output.loss, expected.loss, rtol=2e-6, atol=1e-6)
    assert_same_gradients(found, grads)
    return found


@pytest.mark.parametrize(
    "configs",
    (
        ({},),
        ({"lora_alpha": 3, "use_rslora": True, "lora_dropout": 0.4},),
        ({}, {"r": 3, "lora_alpha": 5, "lora_dropout": 0.2}),
    ),
)
def test_a_step_is_that_of_peft(configs: tuple[dict[str, Any], ...]) -> None:
    """The head's adapters have gradients, its weight has none; also with a Trainer's divisor."""
    fused, model = pair(*configs)
    found = assert_fused(fused, model)
    of_head = {name for name in found if "lm_head" in name}
    assert len(of_head) == 2 * len(configs) and all("lora_" in name for name in of_head)
    assert_fused(fused, model, num_items_in_batch=torch.tensor(23))
    fused.eval(), model.eval()
    output, expected = fused(**batch(), skip_logits=True), model(**batch())
    assert output.logits is None
    torch.testing.assert_close(output.loss, expected.loss)
    assert torch.equal(fused(**batch()).logits, expected.logits)
    with model.disable_adapter(), fused.disable_adapter():
        torch.testing.assert_close(fused(**batch(), skip_logits=True).loss, model(**batch()).loss)
    assert unfuse(fused) == 1


def test_steps_of_an_optimizer_and_the_options_of_the_loss() -> None:
    """Dropout before the adapter is drawn once for a loss that is computed twice, as token scaling
    is."""
    fused, model = pair({"lora_dropout": 0.3})
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.5) for one in (fused, model)]
    for _ in range(3):
        assert_fused(fused, model)
        for optimizer in optimizers:
            optimizer.step()
    for options in ({"use_token_scaling": True}, {"label_smoothing": 0.1}):
        skipping, found = run(fused, **options)
        torch.manual_seed(5)
        with_logits = fused(**batch(), **options, skip_logits=False)
        torch.testing.assert_close(skipping.loss, with_logits.loss, rtol=2e-6, atol=1e-6)
        assert_same_gradients(found, gradients(fused, with_logits.loss))


@pytest.mark.parametrize("autocast", (False, True))
def test_lower_precision(autocast: bool) -> None:
    """The adapters stay in float32, as peft keeps them; the loss is as close to float32's as with
    peft."""
    fused, model = pair({"lora_dropout": 0.2})
    exact = run(model)[0].loss
    if not autocast:
        for one in (fused, model):
            one.bfloat16()
            for name, parameter in one.named_parameters():
                if "lora_" in name:
                    parameter.data = parameter.data.float()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        (output, found), (expected, grads) = run(fused), run(model)
    assert output.logits is None
    assert abs(output.loss - exact) <= 2 * abs(expected.loss - exact) + 0.01
    assert_same_gradients(found, grads, bound=0.05)
    assert {name: grad.dtype for name, grad in found.items()} == {
        name: grad.dtype for name, grad in grads.items()
    }


def test_traced_whole() -> None:
    fused, model = pair({}, {"r": 2})
    torch._dynamo.reset()
    compiled = torch.compile(fused, fullgraph=True, backend="eager")
    output, found = run(compiled)
    assert output.logits is None
    expected, grads = run(model)
    torch.testing.assert_close(output.loss, expected.loss)
    assert_same_gradients({n.removeprefix("_orig_mod."): g for n, g in found.items()}, grads)


@pytest.mark.parametrize(
    "config",
    (
        {"target_modules": ["lm_head"]},
        {"target_modules": ["embed_tokens"]},
        {"target_modules": ["embed_tokens", "lm_head"]},
        {"target_modules": ["embed_tokens"], "ensure_weight_tying": True},
        {"modules_to_save": ["lm_head"], "target_modules": ["q_proj"]},
    ),
)
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_a_head_tied_to_the_embedding(config: dict[str, Any]) -> None:
    """An adapter of the embedding alone does not change the logits."""
    family = text("Llama", 3, num_hidden_layers=1, tie_word_embeddings=True)
    fused, model = pair(config, family=family)
    assert_fused(fused, model)


def test_a_capped_head() -> None:
    fused, model = pair({}, family=text("Gemma2", 3, num_hidden_layers=2))
    assert_fused(fused, model)


@pytest.mark.parametrize(
    "what, reason",
    (
        ("dora", "is not a plain LoRA"),
        ("bias", "has a bias"),
        ("hook", "an adapter of its head has hooks"),
        ("unmerges", "that is merged and disabled"),
    ),
)
def test_left_to_peft(what: str, reason: str) -> None:
    config = {"dora": {"use_dora": True}, "bias": {"lora_bias": True}}.get(what, {})
    fused, model = FAMILY.model(), FAMILY.model()
    loss.fuse(fused)
    fused, model = adapted(fused, config), adapted(model, config)
    for one in (fused, model):
        head = one.base_model.model.lm_head
        if what == "hook":
            head.lora_A["default"].register_forward_hook(lambda module, args, output: output * 2)
        if what == "unmerges":
            head.merge()
            head.enable_adapters(False)
    with pytest.warns(UserWarning, match=reason):
        output, found = run(fused)
    expected, grads = run(model)
    assert torch.equal(output.logits, expected.logits) and torch.equal(output.loss, expected.loss)
    assert all(torch.equal(found[name], grad) for name, grad in grads.items())
