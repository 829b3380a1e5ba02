"""The masks of models of transformers: which become is_causal, and that the models train alike."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers
from torch import Tensor

from attention_graphs import as_it_is, attention_options, compiled
from causal_masks import OP
from fused_families import TEXT, VOCABULARY
from liger_ops.rewrites.attention import causal_attention


# Models of transformers. Without a cache they make a mask when they are compiled; with one, this
# version passes is_causal itself.
def model(name: str, **options) -> torch.nn.Module:
    config_name = options.pop("config", f"{name}Config")
    config = getattr(transformers, config_name)(**{**TEXT, **options})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model_class = getattr(transformers, f"{name}ForCausalLM")
        return model_class._from_config(config, attn_implementation="sdpa").train()


TOKENS = 9
GEMMA3 = {"config": "Gemma3TextConfig", "sliding_window": 4}
GEMMA3["layer_types"] = ["sliding_attention", "full_attention"]
PADDING = {"attention_mask": torch.ones(2, TOKENS, dtype=torch.long)}
POSITIONS = {"position_ids": torch.arange(TOKENS).expand(2, -1)}
MODELS = [
    pytest.param("Llama", {}, {}, False, 2, id="Llama"),
    pytest.param("Llama", {}, {}, True, 2, id="Llama-dynamic"),
    pytest.param("Llama", {}, PADDING, False, 0, id="Llama-padding"),
    pytest.param("Llama", {}, POSITIONS, False, 0, id="Llama-positions"),
    pytest.param("Mistral", {"sliding_window": 4096}, {}, False, 2, id="Mistral"),
    pytest.param("Mistral", {"sliding_window": 4096}, {}, True, 0, id="Mistral-dynamic"),
    pytest.param("Mistral", {"sliding_window": 4}, {}, False, 0, id="Mistral-window"),
    pytest.param("Mistral", {"sliding_window": None}, {}, False, 2, id="Mistral-no-window"),
    pytest.param("Gemma3", GEMMA3, {}, False, 1, id="Gemma3"),
    pytest.param("Gemma3", GEMMA3, {}, True, 1, id="Gemma3-dynamic"),
    pytest.param("Qwen2", {}, {}, False, 2, id="Qwen2"),
    pytest.param("GPTNeoX", {}, {}, False, 2, id="GPTNeoX"),
]


def losses_and_gradients(
    loss: Callable[[Tensor], Tensor], llm: torch.nn.Module, tokens: Tensor
) -> list[Tensor]:
    llm.zero_grad()
    value = loss(tokens)
    value.backward()
    return [value.detach()] + [p.grad.clone() for p in llm.parameters() if p.grad is not None]


@pytest.mark.parametrize(("name", "options", "arguments", "dynamic", "count"), MODELS)
def test_models(name, options, arguments, dynamic, count):
    llm = model(name, **options)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, VOCABULARY, (2, TOKENS), generator=generator)

    def loss(tokens: Tensor) -> Tensor:
        return llm(input_ids=tokens, labels=tokens, **arguments).loss

    expected = losses_and_gradients(loss, llm, tokens)
    rewritten, report, _ = compiled(loss, [causal_attention.rewrite], dynamic, as_it_is)
    actual = losses_and_gradients(rewritten, llm, tokens)
    assert report.counts().get(OP, 0) == count
    assert len(report.findings) == 2
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_mask_made_beside_a_cache(dynamic, monkeypatch):
    """As some versions of transformers and torch make it, and as this one does for export."""
    masking = transformers.masking_utils
    if hasattr(masking, "is_torchdynamo_exporting"):
        monkeypatch.setattr(masking, "is_torchdynamo_exporting", lambda: True)
    llm = model("Llama", use_cache=True)
    tokens = torch.arange(1, 2 * TOKENS + 1).view(2, TOKENS)

    def loss(tokens: Tensor) -> Tensor:
        return llm(input_ids=tokens, labels=tokens).loss

    rewritten, report, graphs = compiled(loss, [causal_attention.rewrite], dynamic, as_it_is)
    torch.testing.assert_close(rewritten(tokens), loss(tokens))
    assert report.counts() == {OP: 2}
    assert all(option["is_causal"] for option in attention_options(graphs))


def test_a_checkpointed_model():
    llm = model("Llama")
    llm.gradient_checkpointing_enable()
    tokens = torch.arange(1, 2 * TOKENS + 1).view(2, TOKENS)

    def loss(tokens: Tensor) -> Tensor:
        return llm(input_ids=tokens, labels=tokens).loss

    expected = losses_and_gradients(loss, llm, tokens)
    rewritten, report, _ = compiled(loss, [causal_attention.rewrite])
    actual = losses_and_gradients(rewritten, llm, tokens)
    assert report.counts() == {OP: 2}
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
