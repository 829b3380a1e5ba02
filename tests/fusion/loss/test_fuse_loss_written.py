"""Losses of forwards that make a CrossEntropyLoss in each call."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.nn import CrossEntropyLoss

from architectures import NEW
from causal_models import Tiny, assert_same_gradients, assert_trains_alike, batch, gradients
from fused_families import VOCABULARY
from liger_ops.fusion import loss, unfuse

BERT = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 4, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
BART = {
    "vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 1, "dropout": 0.0,
}  # fmt: skip
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4, "dropout_rate": 0.0}


def bert() -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(**BERT))


def bart() -> nn.Module:
    """A model that adds a buffer to the logits."""
    model = transformers.BartForConditionalGeneration(transformers.BartConfig(**BART))
    model.final_logits_bias.normal_()
    return model


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCABULARY, decoder_start_token_id=0, pad_token_id=0, **T5
    )
    return transformers.T5ForConditionalGeneration(config)


def whisper() -> nn.Module:
    sizes = {"max_source_positions": 20, "max_target_positions": 30, "num_mel_bins": 8}
    return transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**BART, **sizes))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "Bert": bert, "Bart": bart, "T5": t5, "Whisper": whisper,
}  # fmt: skip
EACH = pytest.mark.parametrize("build", MODELS.values(), ids=MODELS.keys())


def pair(build: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build().train()
    fused = copy.deepcopy(model)
    report = loss.fuse(fused)
    assert [entry.where for entry in report.fused] == [""]
    assert not report.left
    return model, fused


def inputs_of(model: nn.Module, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    if not isinstance(model, transformers.WhisperForConditionalGeneration):
        return dict(batch())
    generator = torch.Generator().manual_seed(2)
    features = torch.randn(2, 8, 40, generator=generator).to(dtype)
    return {"input_features": features, "labels": batch()["labels"]}


@EACH
def test_trains_as_before(build: Callable[[], nn.Module]) -> None:
    model, fused = pair(build)
    inputs = inputs_of(model)
    output = assert_trains_alike(fused, model, **inputs)
    names = [name for name in model(**inputs) if name != "logits"]
    assert list(output) == names
    if NEW or build is bert:
        # Older versions: Dynamo traces none of the other models whole, fused or not.
        assert_traced(fused, inputs, output.loss)
    copied = pickle.loads(pickle.dumps(fused))
    torch.testing.assert_close(copied(**inputs).loss, output.loss)
    assert torch.equal(fused.eval()(**inputs).logits, model.eval()(**inputs).logits)
    assert unfuse(fused) == 1
    assert type(fused) is type(model)


def assert_traced(fused: nn.Module, inputs: dict[str, Any], loss: Tensor) -> None:
    """Compiled, the loss is the same, and logits are skipped."""
    torch._dynamo.reset()
    compiled = torch.compile(fused, fullgraph=True, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        traced = compiled(**inputs)
    torch.testing.assert_close(traced.loss, loss)
    assert traced.logits is None


@EACH
@pytest.mark.parametrize("use", ["bfloat16", "autocast"])
def test_dtype_of_the_loss(build: Callable[[], nn.Module], use: str) -> None:
    """The dtype is that of the model's own loss; the value is as close as its rounding allows."""
    model, fused = pair(build)
    inputs = inputs_of(model, torch.bfloat16 if use == "bfloat16" else torch.float32)
    if use == "bfloat16":
        model.bfloat16(), fused.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=use == "autocast"):
        expected, actual = model(**inputs).loss, fused(**inputs).loss
    assert actual.dtype is expected.dtype
    torch.testing.assert_close(actual, expected, rtol=2e-2, atol=0)
    assert_same_gradients(gradients(fused, actual), gradients(model, expected), bound=5e-2)


def test_options() -> None:
    model, fused = pair(t5)
    inputs = inputs_of(model)
    output = fused(**inputs, label_smoothing=0.2, return_predicted_tokens=True)
    logits = model(**inputs).logits
    expected = F.cross_entropy(
        logits.flatten(0, 1), inputs["labels"].flatten(), label_smoothing=0.2
    )
    torch.testing.assert_close(output.loss, expected)
    assert_same_gradients(gradients(fused, output.loss), gradients(model, expected))
    assert torch.equal(output.predicted_tokens, logits.argmax(-1))
    kept = fused.eval()(**inputs, label_smoothing=0.2)
    torch.testing.assert_close(kept.loss, expected)
    assert torch.equal(kept.logits, logits)


class Written(Tiny):
    """The subclasses below each change one thing."""

    loss_function = None  # type: ignore[assignment]

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any) -> Any:
        hidden = self.body(input_ids)
        logits = self.logits(hidden if isinstance(hidden, Tensor) else hidden.last_hidden_state)
        if labels is None:
            return {"logits": logits}
        return self.result(self.value(self.function(CrossEntropyLoss), logits, labels), logits)

    def function(self, cls: Any) -> Any:
        return cls()

    def value(self, function: Any, logits: Any, labels: Tensor) -> Tensor:
        return function(logits.view(-1, VOCABULARY), labels.view(-1))


class Scaled(Written):
    def logits(self, hidden: Tensor) -> Tensor:
        return 2 * self.head(hidden)


class Shifted(Written):
    def value(self, function: Any, logits: Any, labels: Tensor) -> Tensor:
        flat = logits[:, :-1].contiguous().view(-1, VOCABULARY)
        return function(flat, labels[:, 1:].reshape(-1))


class Penalised(Written):
    def result(self, value: Tensor, logits: Any) -> Any:
        return super().result(value + 1e-2 * logits.float().square().sum(), logits)


class Detached(Written):
    def value(self, function: Any, logits: Any, labels: Tensor) -> Tensor:
        return super().value(function, logits, labels).detach()


class Smoothed(Written):
    def function(self, cls: Any) -> Any:
        return cls(label_smoothing=0.1, reduction="sum")


class OfTheModule(Written):
    """The class is that of torch.nn, not the one among the globals of the forward's file."""

    def function(self, cls: Any) -> Any:
        return nn.CrossEntropyLoss()


class ByPosition(Written):
    def value(self, function: Any, logits: Any, labels: Tensor) -> Tensor:
        return function(logits.transpose(1, 2), labels)


class Mean(Written):
    def result(self, value: Tensor, logits: Any) -> Any:
        return {**super().result(value, logits), "mean": logits.mean()}


@pytest.mark.parametrize("cls", [Written, Scaled, Shifted, Smoothed, OfTheModule])
def test_a_written_loss_is_found(cls: type[Written]) -> None:
    """Eager and compiled. Only the class's own name among a forward's globals can be replaced for
    torch.compile, which takes only tensors for a CrossEntropyLoss that is made in the graph."""
    model, fused = pair(cls)
    torch._dynamo.reset()
    for call in (fused, torch.compile(fused, fullgraph=True, backend="aot_eager")):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            output = call(**batch())
        left = call is not fused and cls is OfTheModule
        assert list(output) == ["loss", *(["logits"] if left else [])]
        assert [str(entry.message).rpartition(": ")[2] for entry in said] == (
            ["torch.compile traces the CrossEntropyLoss that its forward makes for tensors alone"]
            if left
            else []
        )
        expected = model(**batch())
        torch.testing.assert_close(output["loss"], expected["loss"])
        assert_same_gradients(gradients(fused, output["loss"]), gradients(model, expected["loss"]))


def test_a_detached_loss_stays_detached() -> None:
    model, fused = pair(Detached)
    output = fused(**batch())
    assert list(output) == ["loss"] and not output["loss"].requires_grad
    torch.testing.assert_close(output["loss"], model(**batch())["loss"])


@pytest.mark.parametrize(
    ("cls", "operation"), {Penalised: "square", ByPosition: "transpose", Mean: "mean"}.items()
)
def test_near_miss_is_left_with_the_reason(cls: type[nn.Module], operation: str) -> None:
    model = cls()
    report = loss.fuse(model)
    assert not report
    assert type(model) is cls
    assert report.left[0].reason == f"its forward applies {operation} to its logits"


class Rounded(Written):
    narrow = torch.float32

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden).to(self.narrow).to(hidden.dtype)


@pytest.mark.parametrize(
    ("dtype", "narrow"),
    [
        (torch.float32, torch.float8_e4m3fn),
        (torch.float32, torch.int8),
        (torch.float32, torch.bool),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float16),
    ],
)
def test_rounded_logits_are_left(dtype: torch.dtype, narrow: torch.dtype) -> None:
    model = Rounded().to(dtype)
    model.narrow = narrow
    report = loss.fuse(model)
    assert not report and report.left[0].reason == "its forward applies to to its logits"
