"""Models whose head is not a direct child, and losses of labels that are not shifted."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from causal_models import Tiny, assert_trains_alike, batch
from fused_families import TEXT, VOCABULARY
from liger_ops.fusion import loss, unfuse

SMALL = {**TEXT, "num_hidden_layers": 1, "layer_types": ["full_attention"]}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def roberta() -> nn.Module:
    """The head has a layer, an activation and a norm before the projection."""
    sizes = {name: SMALL[name] for name in list(SMALL)[:5]}
    config = transformers.RobertaConfig(**sizes, **NO_DROPOUT, is_decoder=True)
    return transformers.RobertaForCausalLM(config)


def llama4() -> nn.Module:
    """A causal language model inside another model, which computes the loss."""
    options = {"intermediate_size_mlp": 48, "num_local_experts": 2, "no_rope_layers": [1]}
    config = transformers.Llama4TextConfig(**SMALL, **options)
    vision = transformers.Llama4VisionConfig(
        hidden_size=32, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
        vision_output_dim=32, image_size=28, patch_size=14, projector_input_dim=32,
        projector_output_dim=32,
    )  # fmt: skip
    whole = transformers.Llama4Config(text_config=config, vision_config=vision)
    return transformers.Llama4ForConditionalGeneration(whole)


def t5gemma() -> nn.Module:
    """An encoder-decoder: the decoder's inputs are made from the labels, which are not shifted."""
    part = transformers.T5GemmaModuleConfig(
        **SMALL, dropout_rate=0.0, attention_dropout=0.0, bos_token_id=1
    )
    config = transformers.T5GemmaConfig(
        encoder=part, decoder=copy.deepcopy(part), vocab_size=VOCABULARY, dropout_rate=0.0
    )
    return transformers.T5GemmaForConditionalGeneration(config)


def modernbert() -> nn.Module:
    """A masked language model, whose labels belong to the tokens themselves."""
    config = transformers.ModernBertConfig(**{**SMALL, "global_attn_every_n_layers": 1})
    return transformers.ModernBertForMaskedLM(config)


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "Roberta": (roberta, "lm_head.decoder"),
    "Llama4": (llama4, "language_model.lm_head"),
    "T5Gemma": (t5gemma, "lm_head.out_proj"),
    "ModernBert": (modernbert, "decoder"),
}


def built(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build().train()


def skip_where_the_model_fails_itself(model: nn.Module) -> None:
    """transformers 5.24 reads `image_outputs` of a result that has none."""
    ids = torch.ones(1, 4, dtype=torch.int64)
    try:
        model(input_ids=ids, labels=ids)
    except AttributeError as error:
        pytest.skip(f"the untouched model fails with this transformers: {error}")


@pytest.mark.parametrize(("build", "path"), MODELS.values(), ids=MODELS.keys())
def test_trains_as_before(build: Callable[[], nn.Module], path: str) -> None:
    model = built(build)
    if build is llama4:
        skip_where_the_model_fails_itself(model)
    fused = copy.deepcopy(model)
    report = loss.fuse(fused)
    assert report.fused[0].where == ""
    assert not report.left
    assert loss.classes.overrides(fused)["loss"].head == path
    output = assert_trains_alike(fused, model, **batch(), use_cache=False)
    torch._dynamo.reset()
    compiled = torch.compile(fused, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(**batch(), use_cache=False).loss, output.loss)
    copied = pickle.loads(pickle.dumps(fused))
    torch.testing.assert_close(copied(**batch(), use_cache=False).loss, output.loss)
    assert unfuse(fused) == len(report)
    assert type(fused) is type(model)


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.Linear(8, VOCABULARY)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.decoder(hidden)


class Held(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.head = Holder()  # type: ignore[assignment]

    def get_output_embeddings(self) -> nn.Module:
        return self.head.decoder


def hooked(model: Any) -> None:
    model.head.register_forward_hook(lambda module, args, y: 2 * y)


def with_own_forward(model: Any) -> None:
    model.head.forward = model.head.decoder.forward


@pytest.mark.parametrize(
    ("reason", "change"),
    {"its head has hooks": hooked, "its head has a forward of its own": with_own_forward}.items(),
)
def test_what_holds_the_head_has_to_be_called(
    reason: str, change: Callable[[nn.Module], None]
) -> None:
    model, fused = Held(), Held()
    fused.load_state_dict(model.state_dict())
    assert loss.fuse(fused)
    assert list(fused(**batch())) == ["loss"]
    change(model), change(fused)
    with pytest.warns(UserWarning, match=reason):
        output = fused(**batch())
    assert torch.equal(output["loss"], model(**batch())["loss"])
    assert [entry.reason for entry in loss.fuse(model).left] == [reason]


def test_classifiers_are_left() -> None:
    config = transformers.LlamaConfig(**TEXT, num_labels=3)
    report = loss.fuse(transformers.LlamaForSequenceClassification(config))
    assert not report
    assert [(entry.class_name, entry.reason) for entry in report.left] == [
        ("LlamaForSequenceClassification", "its loss is a classifier's, of no vocabulary")
    ]
