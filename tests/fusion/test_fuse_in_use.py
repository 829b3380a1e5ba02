"""A fused model in use: with other models, checkpointed, in autocast, generating, on an NPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import liger_ops.lowering.npu  # noqa: F401
import simulated_npu
from causal_models import assert_same_gradients, batch, gradients
from fused_families import Family
from fused_models import GEMMA3, GPT_OSS, LLAMA, QWEN3_MOE, results
from graphs import Recorder, liger_ops_of
from liger_ops.fusion import fuse


def test_two_models_compiled_in_one_process() -> None:
    """Code compiled for a fused layer is not used for an untouched one, nor the reverse."""
    fused, untouched = LLAMA.model(), LLAMA.model()
    fuse(fused)
    x = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(1))
    torch._dynamo.reset()
    recorder = Recorder()
    compiled = torch.compile(
        lambda mlp, x: mlp(x), fullgraph=True, backend=recorder.backend(), dynamic=False
    )
    graphs = []
    for model in (fused, untouched, fused, untouched):
        mlp = model.model.layers[0].mlp
        torch.testing.assert_close(compiled(mlp, x), mlp(x))
        graphs.append(len(recorder.forwards))
    assert graphs == [1, 2, 2, 2]
    assert [liger_ops_of([graph]) for graph in recorder.forwards] == [{"swiglu": 1}, {}]


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.parametrize("family", [LLAMA, GEMMA3, GPT_OSS], ids=lambda family: family.name)
def test_gradient_checkpointing(family: Family) -> None:
    model = family.model()
    fuse(model)
    x = family.inputs(torch.float32)
    expected = results(model, x)
    calls = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    model.gradient_checkpointing_enable()
    torch.testing.assert_close(results(model, x), expected)
    assert len(calls) == 2


def test_compiled_with_a_loss_after_a_graph_break() -> None:
    """transformers warns of the cache during checkpointing, which breaks torch.compile's graph."""
    losses = []
    for fused in (False, True):
        torch._dynamo.reset()
        model = GEMMA3.model().train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        if fused:
            fuse(model)
        step = torch.compile(model, backend="aot_eager")
        tokens = torch.arange(3, 19).reshape(2, 8)
        loss = step(input_ids=tokens, labels=tokens, use_cache=True, label_smoothing=0.0).loss
        loss.backward()
        losses.append(loss.detach())
    torch.testing.assert_close(losses[1], losses[0])


def test_generation_and_recorded_outputs() -> None:
    """A key cache, and attentions and hidden states, which transformers records by class."""
    model, untouched = LLAMA.model().eval(), LLAMA.model().eval()
    fuse(model)
    x = LLAMA.inputs(torch.float32)
    options = {"max_new_tokens": 5, "do_sample": False, "use_cache": True}
    assert torch.equal(model.generate(x, **options), untouched.generate(x, **options))
    wanted = {"output_attentions": True, "output_hidden_states": True}
    y, expected = model(x, **wanted), untouched(x, **wanted)
    torch.testing.assert_close(y.attentions, expected.attentions)
    torch.testing.assert_close(y.hidden_states, expected.hidden_states)
    assert len(y.attentions) == 2


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("family", [GPT_OSS, QWEN3_MOE], ids=lambda family: family.name)
def test_experts_implementations(family: Family, implementation: str) -> None:
    model, untouched = family.model(), family.model()
    model.set_experts_implementation(implementation)
    untouched.set_experts_implementation(implementation)
    report = fuse(model, attention=False)
    # Qwen's eager forward contains the activation.
    has_activation = family is GPT_OSS or implementation != "eager"
    assert len(report) == sum(family.parts.values()) - (0 if has_activation else 2)
    assert len(report.left) == (2 if implementation == "eager" else 0)
    x = family.inputs(torch.float32)
    expected = results(untouched, x)
    found = results(model, x)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_a_step_on_the_simulated_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated_npu, "active", True)
    untouched, model = LLAMA.model(), LLAMA.model()
    expected = untouched(**batch(), num_items_in_batch=11)
    expected_gradients = gradients(untouched, expected.loss)
    fuse(model)
    simulated_npu.forget()
    inputs = {name: simulated_npu.to_npu(value) for name, value in batch().items()}
    found = model.to("npu")(**inputs, num_items_in_batch=11)
    assert found.logits is None
    actual = gradients(model, found.loss)
    modules = {name.rpartition(".")[0] for name in simulated_npu.launched}
    simulated_npu.forget()
    files = ("norms.rms_norm", "activations.activations", "rope.rope", "losses.cross_entropy")
    assert modules == {f"liger_ops.lowering.npu.{file}" for file in files}
    torch.testing.assert_close(simulated_npu.to_cpu(found.loss), expected.loss)
    on_cpu = {name: simulated_npu.to_cpu(grad) for name, grad in actual.items()}
    assert_same_gradients(on_cpu, expected_gradients, bound=1e-4)


def test_fast_path_of_torch_transformer() -> None:
    """nn.TransformerEncoderLayer reads attributes of its norms, and does not call them in eval."""
    layer = nn.TransformerEncoderLayer(16, 2, 16, dropout=0.0, batch_first=True)
    x = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(1))
    before = [layer.train()(x), layer.eval()(x)]
    assert len(fuse(layer)) == 2
    torch.testing.assert_close([layer.train()(x), layer.eval()(x)], before)
