"""Compiled models that use a key-value cache: generation, and trained prefixes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import liger_ops
from architectures import text_batch
from compiled_models import Inner, loss_of, results
from trained_models import MODELS
from training_steps import NEAR, difference, randomized


def rewritten(model: Any) -> tuple[Any, Inner]:
    torch._dynamo.reset()
    inner = Inner()
    options = {"inner_backend": inner, "rewrites": "all", "strict": True}
    return torch.compile(model, backend=liger_ops.backend, options=options), inner


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "GptOssForCausalLM"])
def test_generate(name: str) -> None:
    """The prompt, then token by token with the cache: same tokens, and same logits for each."""
    model = randomized(MODELS[name].build()).eval()
    prompt = text_batch()["input_ids"]
    options = {"max_new_tokens": 6, "do_sample": False, "output_scores": True}
    options |= {"return_dict_in_generate": True, "eos_token_id": None}
    expected = model.generate(prompt, **options)
    model.forward, inner = rewritten(model.forward)
    actual = model.generate(prompt, **options)
    assert sum(graph["rms_norm"] for graph in inner.counts) >= 2
    assert torch.equal(actual.sequences, expected.sequences)
    torch.testing.assert_close(actual.scores, expected.scores, rtol=1e-4, atol=1e-4)


def test_prefix_tuning() -> None:
    """The prefix is a cache that has a gradient."""
    peft = pytest.importorskip("peft")
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    torch.manual_seed(0)
    model = randomized(peft.get_peft_model(MODELS["LlamaForCausalLM"].build(), config))
    batch = MODELS["LlamaForCausalLM"].batch()
    expected = results(model, loss_of(model), batch)
    compiled, inner = rewritten(model)
    actual = results(model, loss_of(compiled), batch)
    assert sum(graph["rms_norm"] for graph in inner.counts)
    assert difference(actual, expected) <= NEAR
    assert any("prompt" in name for name in actual)
