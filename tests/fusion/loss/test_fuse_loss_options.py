"""Options that a call of a fused model adds to those of transformers' losses."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import liger_ops
from causal_models import (
    LLAMA,
    Tiny,
    assert_same_gradients,
    assert_same_output,
    batch,
    causal_loss,
    gradients,
    pair,
    with_fused_loss,
)
from cross_entropy_cases import TERMS
from fused_families import VOCABULARY, text
from graphs import Recorder
from liger_ops.fusion import loss

SOFTCAPPED = text("Gemma2", 5, num_hidden_layers=1, final_logit_softcapping=2.0)
ONE_LAYER = text("Llama", 3, num_hidden_layers=1)


def tokens(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The log-probabilities of all classes, the labels, and which labels count, by position."""
    labels = F.pad(labels, (0, 1), value=-100)[:, 1:]
    return logits.log_softmax(-1), labels.clamp(min=0), labels != -100


def smoothed(logits: Tensor, labels: Tensor) -> Tensor:
    labels = F.pad(labels, (0, 1), value=-100)[:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.2)


def with_terms(logits: Tensor, labels: Tensor) -> Tensor:
    return liger_ops.cross_entropy(logits[:, :-1], labels[:, 1:], **TERMS)


def scaled(logits: Tensor, labels: Tensor) -> Tensor:
    scores, labels, kept = tokens(logits, labels)
    of_label = scores.gather(-1, labels[..., None])[..., 0]
    return (-of_label * of_label.exp().detach())[kept].mean()


def of_each_token(logits: Tensor, labels: Tensor) -> Tensor:
    scores, labels, kept = tokens(logits, labels)
    return -scores.gather(-1, labels[..., None])[..., 0] * kept


OPTIONS: dict[str, tuple[dict[str, Any], Callable[[Tensor, Tensor], Tensor]]] = {
    "label smoothing": ({"label_smoothing": 0.2}, smoothed),
    "terms": (TERMS, with_terms),
    "token scaling": ({"use_token_scaling": True}, scaled),
    "token scaling of a sum": (
        {"use_token_scaling": True, "num_items_in_batch": 7},
        lambda logits, labels: scaled(logits, labels) * (labels[:, 1:] != -100).sum() / 7,
    ),
    "sum": (
        {"reduction": "sum"},
        lambda logits, labels: causal_loss(logits, labels, VOCABULARY, num_items_in_batch=1),
    ),
    "none": ({"reduction": "none"}, of_each_token),
    "several chunks": (
        {"chunk_bytes": 4 * VOCABULARY * 4, "accum_dtype": torch.float32},
        lambda logits, labels: causal_loss(logits, labels, VOCABULARY),
    ),
}
EACH_OPTION = pytest.mark.parametrize(("options", "expected"), OPTIONS.values(), ids=OPTIONS.keys())


@EACH_OPTION
@pytest.mark.parametrize("skip", [True, False], ids=["no logits", "logits"])
@pytest.mark.parametrize("family", [ONE_LAYER, SOFTCAPPED], ids=lambda family: family.name)
def test_options_of_the_loss(
    family: Any, skip: bool, options: dict[str, Any], expected: Callable[[Tensor, Tensor], Tensor]
) -> None:
    """The loss and every gradient, compared with those from the untouched model's logits."""
    model, fused = pair(family)
    inputs = batch()
    output = fused(**inputs, **options, skip_logits=skip)
    assert (output.logits is None) == skip
    value = expected(model(inputs["input_ids"]).logits, inputs["labels"])
    torch.testing.assert_close(output.loss, value)
    weights = torch.linspace(0.5, 2, value.numel()).reshape(value.shape)
    assert_same_gradients(
        gradients(fused, output.loss * weights), gradients(model, value * weights), bound=1e-4
    )


@pytest.mark.parametrize("mode", ["training", "evaluation", "compiled"])
def test_accuracy_and_predictions(mode: str) -> None:
    model, fused = pair(ONE_LAYER)
    inputs = batch()
    asked: dict[str, Any] = {"return_token_accuracy": True, "return_predicted_tokens": True}
    expected = model(**inputs)
    predicted = expected.logits.argmax(-1)
    # Make two of the labels equal to the prediction.
    inputs["labels"][0, 5], inputs["labels"][1, 2] = predicted[0, 4], predicted[1, 1]
    expected = model(**inputs)
    call: Any = fused
    if mode == "compiled":
        torch._dynamo.reset()
        call = torch.compile(fused, fullgraph=True, backend=Recorder().backend())
    fused.train(mode != "evaluation")
    output = call(**inputs, **asked)
    names = ["loss", *(["logits"] if mode == "evaluation" else [])]
    assert list(output) == [*names, "token_accuracy", "predicted_tokens"]
    assert isinstance(output, type(expected))
    torch.testing.assert_close(output.loss, expected.loss)
    assert torch.equal(output.predicted_tokens, predicted)
    labels = inputs["labels"][:, 1:]
    right = (predicted[:, :-1] == labels).sum() / (labels != -100).sum()
    assert right > 0
    torch.testing.assert_close(output.token_accuracy, right)
    assert_same_gradients(gradients(fused, output.loss), gradients(model, expected.loss))


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("skip", [True, False], ids=["no logits", "logits"])
@pytest.mark.parametrize("family", [ONE_LAYER, SOFTCAPPED], ids=lambda family: family.name)
def test_the_z_loss(family: Any, skip: bool, reduction: str) -> None:
    """It is a part of the loss, and has a gradient of its own."""
    model, fused = pair(family)
    inputs = batch()
    options: dict[str, Any] = {"lse_square_scale": 0.1, "reduction": reduction}
    output = fused(**inputs, **options, return_z_loss=True, skip_logits=skip)
    assert list(output) == ["loss", *([] if skip else ["logits"]), "z_loss"]
    torch.testing.assert_close(output.loss, fused(**inputs, **options).loss)
    labels = F.pad(inputs["labels"], (0, 1), value=-100)[:, 1:]
    squares = 0.1 * model(inputs["input_ids"]).logits.logsumexp(-1) ** 2 * (labels != -100)
    expected = squares if reduction == "none" else squares.sum() / (labels != -100).sum()
    torch.testing.assert_close(output.z_loss, expected)
    weights = torch.linspace(0.5, 2, expected.numel()).reshape(expected.shape)
    assert_same_gradients(
        gradients(fused, output.z_loss * weights), gradients(model, expected * weights), bound=1e-4
    )


@pytest.mark.parametrize("items", (20, torch.tensor(20)))
@pytest.mark.parametrize("scaled", (False, True))
def test_the_z_loss_is_the_part_of_a_loss_divided_by_items(items: Any, scaled: bool) -> None:
    fused, inputs = pair(ONE_LAYER)[1], batch()
    more = {"num_items_in_batch": items, "use_token_scaling": scaled, "return_z_loss": True}
    output = fused(**inputs, **more, lse_square_scale=0.1)
    without = fused(**inputs, **more)
    torch.testing.assert_close(output.z_loss, output.loss - without.loss, rtol=1e-4, atol=1e-5)
    assert output.z_loss > 0 and without.z_loss == 0


def test_extended_outputs() -> None:
    """Only requested values are added: at the end of a tuple, by name in a dict. They pickle."""
    _, fused = pair(ONE_LAYER)
    asked = fused(**batch(), return_predicted_tokens=True)
    assert asked.token_accuracy is None
    copied = pickle.loads(pickle.dumps(asked))
    assert type(copied) is type(asked)
    assert torch.equal(copied.predicted_tokens, asked.predicted_tokens)
    loss_value, accuracy, predicted = fused(
        **batch(), return_predicted_tokens=True, return_token_accuracy=True, return_dict=False
    )
    torch.testing.assert_close(loss_value, asked.loss)
    assert accuracy.shape == ()
    assert torch.equal(predicted, asked.predicted_tokens)
    plain = fused(**batch(), return_predicted_tokens=False, label_smoothing=None)
    assert isinstance(plain, type(LLAMA.model()(**batch())))
    tiny = with_fused_loss(Tiny())(**batch(), return_token_accuracy=True)
    assert list(tiny) == ["loss", "token_accuracy"]


@pytest.mark.parametrize("skip", [None, False], ids=["no logits", "logits"])
def test_shifted_labels_alone(skip: bool | None) -> None:
    """shift_labels also stand for labels, as with collators that return no labels."""
    model, fused = pair(ONE_LAYER)
    inputs = batch()
    shifted = F.pad(inputs["labels"], (0, 1), value=-100)[:, 1:].contiguous()
    output = fused(inputs["input_ids"], shift_labels=shifted, skip_logits=skip)
    assert (output.logits is None) == (skip is None)
    torch.testing.assert_close(output.loss, model(**inputs).loss)
    positional = fused(inputs["input_ids"], None, None, None, None, None, shift_labels=shifted)
    torch.testing.assert_close(positional.loss, output.loss)
    compared = fused.eval()(inputs["input_ids"], shift_labels=shifted)
    torch.testing.assert_close(compared.loss, output.loss)
    assert compared.logits is not None


def test_shifted_labels_that_a_model_does_not_take() -> None:
    class Ignoring(Tiny):
        @staticmethod
        def loss_function(
            logits: Tensor, labels: Tensor, vocab_size: int, shift_labels: Any = None, **kwargs: Any
        ) -> Tensor:
            return causal_loss(logits, labels, vocab_size, **kwargs)

    fused = with_fused_loss(Ignoring())
    assert list(fused(batch()["input_ids"], shift_labels=batch()["labels"])) == ["logits"]


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "type of a number": ({"label_smoothing": "0.1"}, TypeError, "label_smoothing must be a number"),
    "value of a number": ({"label_smoothing": 2}, ValueError, "from 0 to 1, got 2"),
    "negative": ({"lse_square_scale": -1.0}, ValueError, "at least 0, got -1.0"),
    "flag": ({"return_token_accuracy": 1}, TypeError, "must be True or False, got int"),
    "scaling": ({"use_token_scaling": "yes"}, TypeError, "must be True or False, got str"),
    "dtype": ({"accum_dtype": "float32"}, TypeError, "accum_dtype must be torch.float32"),
    "integers": ({"accum_dtype": torch.int8}, ValueError, "accum_dtype must be torch.float32"),
    "chunk": ({"chunk_bytes": 0}, ValueError, "chunk_bytes must be a number of bytes above 0"),
    "reduction": ({"reduction": "batchmean"}, ValueError, "'mean', 'sum' or 'none', got"),
    "sum and count": (
        {"reduction": "sum", "num_items_in_batch": 3},
        ValueError,
        "num_items_in_batch is what the reduction 'mean' divides by",
    ),
    "no labels": (
        {"labels": None, "label_smoothing": 0.1},
        ValueError,
        "label_smoothing needs labels, and no labels were given",
    ),
}


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize(
    ("options", "error", "message"), REFUSED.values(), ids=list(REFUSED.keys())
)
def test_what_is_refused(
    options: dict[str, Any], error: type[Exception], message: str, training: bool
) -> None:
    fused = with_fused_loss(Tiny()).train(training)
    with pytest.raises(error, match=f"Tiny: .*{message}"):
        fused(**{**batch(), **options})


def test_unknown_arguments_go_where_they_went() -> None:
    model, fused = pair(ONE_LAYER)
    torch.testing.assert_close(fused(**batch(), nothing=3).loss, model(**batch(), nothing=3).loss)
    for one in (Tiny(), with_fused_loss(Tiny())):
        # The model's loss function takes no other arguments.
        with pytest.raises(TypeError, match=r"causal_loss\(\) got an unexpected .* 'nothing'"):
            one(**batch(), nothing=3)


class Tempered(Tiny):
    """A model whose loss function has its own argument, and one with the name of an option."""

    @staticmethod
    def loss_function(
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        temperature: float = 1.0,
        reduction: float = 1.0,
        **kwargs: Any,
    ) -> Tensor:
        return causal_loss(logits / temperature, labels, vocab_size, **kwargs) * reduction


@pytest.mark.parametrize("name", ["temperature", "reduction"])
def test_arguments_of_the_loss_function(name: str) -> None:
    model = Tempered()
    fused = with_fused_loss(model)
    output, expected = fused(**batch(), **{name: 2.0}), model(**batch(), **{name: 2.0})
    assert list(output) == ["loss"]
    torch.testing.assert_close(output["loss"], expected["loss"])
    assert_same_gradients(gradients(fused, output["loss"]), gradients(model, expected["loss"]))


def test_options_of_heads_and_losses_changed_since() -> None:
    """Options still apply to a replaced head's logits, but not without a cross_entropy of them."""
    model, fused = pair(ONE_LAYER)
    for one in (model, fused):
        one.lm_head = nn.Sequential(one.lm_head, nn.Tanh())
    with pytest.warns(UserWarning, match="its head is a torch.nn.modules.container.Sequential"):
        output = fused(**batch(), label_smoothing=0.2)
    torch.testing.assert_close(output.loss, smoothed(output.logits, batch()["labels"]))
    fused.loss_function = model.loss_function = lambda logits, labels, **kwargs: logits.mean()
    assert_same_output(fused.eval()(**batch()), model.eval()(**batch()))
    with pytest.raises(ValueError, match="label_smoothing is computed by the cross_entropy"):
        fused(**batch(), label_smoothing=0.2)


def test_one_warning_for_a_model_and_reason() -> None:
    first, second = with_fused_loss(Tiny()), with_fused_loss(Tiny())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for model in (first, first, second):
            model.head.register_forward_hook(lambda module, args, y: None)
            model(**batch()), model(**batch())
            model.eval()(**batch()), model.train()
        first.loss_function = lambda logits, *args, **kwargs: logits.mean()
        first.head = nn.Linear(8, VOCABULARY)
        first(**batch())
    texts = [str(entry.message) for entry in said]
    assert [text.rpartition(": ")[2] for text in texts] == [
        "its head has hooks",
        "its head has hooks",
        "its forward applies mean to its logits",
    ]
    assert texts[0].startswith("liger_ops: Tiny computes its loss from all logits")


def test_warning_of_a_compiled_step() -> None:
    """The warning is given while the graph is traced, and does not break it."""
    _, fused = pair(ONE_LAYER)
    fused.lm_head = nn.Sequential(fused.lm_head)
    torch._dynamo.reset()
    compiled = torch.compile(fused, fullgraph=True, backend="eager")
    with pytest.warns(UserWarning, match="LlamaForCausalLM computes its loss from all logits"):
        compiled(**batch())


def test_fused_heads_say_nothing(recwarn: pytest.WarningsRecorder) -> None:
    assert loss.fuse(model := Tiny())
    model(**batch()), model.eval()(**batch())
    model.train()(**batch(), skip_logits=False)
    assert not list(recwarn)
