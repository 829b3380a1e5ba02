"""Models with fused attention in use: reported, copied, saved, checkpointed, generating."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Iterator
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, create_causal_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from attention_models import SIZES, batch, blocks_everywhere, fuse_attention, model, step
from liger_ops import fuse, unfuse
from liger_ops.fusion import classes
from liger_ops.fusion.attention import attention, attention_positions
from liger_ops.fusion.probing import NotAnOp

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")

GPT_OSS_CODE = transformers.models.gpt_oss.modeling_gpt_oss
GEMMA2_CODE = transformers.models.gemma2.modeling_gemma2
LLAMA_CODE = transformers.models.llama.modeling_llama


@pytest.mark.parametrize(("name", "original"), [("llama", "sdpa"), ("gpt_oss", "eager")])
def test_report_and_unfuse(name: str, original: str) -> None:
    made = model(name)
    cls = type(made.model)
    (entry,) = fuse_attention(made).fused
    assert (entry.where, entry.kind, entry.op) == ("model", "attention", "attention")
    adds = {"sdpa": "", "eager": "sinks"}[original]
    assert entry.options == {"implementation": original, "adds": adds}
    assert made.config._attn_implementation.startswith("liger")
    assert not fuse_attention(made)
    assert unfuse(made) == 1
    assert made.config._attn_implementation == original
    assert type(made.model) is cls
    assert not fuse(made, attention=False, norms=False, activations=False, rope=False, loss=False)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Let one thread sum the gradients of experts, which several sum in any order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
def test_the_cpu_computes_what_it_did() -> None:
    """Without a fast engine, the masks and functions are the model's own, to the last bit."""
    for name, kind in (("mistral", "left"), ("gpt_oss", "packed")):
        made = model(name, torch.float32)
        expected = step(made, batch(kind))
        fuse_attention(made)
        found = step(made, batch(kind))
        assert all(torch.equal(found[key], expected[key]) for key in expected)


REASONS: dict[str, tuple[Any, str]] = {
    "flex_attention": (
        lambda: chosen("flex_attention"),
        "its attention implementation is 'flex_attention'",
    ),
    "eager": (
        lambda: chosen("eager"),
        "its attention implementation is 'eager', which is not its default",
    ),
    "dropout": (
        lambda: model("llama", attention_dropout=0.1),
        "its configuration has attention_dropout=0.1",
    ),
    "small heads": (
        lambda: model("llama", head_dim=8),
        "the heads of its attention have 8 numbers, and those of flex_attention 16 to 256",
    ),
    "softcap": (
        lambda: model("gemma3", attn_logit_softcapping=50.0),
        "its configuration has attn_logit_softcapping=50.0, which SDPA leaves out",
    ),
    "small values": (
        lambda: model("deepseek_v3", v_head_dim=8),
        "the heads of its attention have 8 numbers, and those of flex_attention 16 to 256",
    ),
}


def chosen(implementation: str) -> nn.Module:
    config = transformers.LlamaConfig(**SIZES)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation)


@pytest.mark.parametrize("name", REASONS)
def test_left_with_a_reason(name: str) -> None:
    build, reason = REASONS[name]
    made = build()
    implementation = made.config._attn_implementation
    report = fuse_attention(made)
    assert not report.fused
    assert [entry.reason for entry in report.left if entry.kind == "attention"] == [reason]
    assert made.config._attn_implementation == implementation


def test_layers_may_differ_in_their_heads() -> None:
    """transformers raises for a size that the layers of a configuration do not share."""
    sizes = {"num_hidden_layers": 2, "head_dim": 16}
    kinds = ["sliding_attention", "full_attention"]
    for size in (32, 512):
        config = transformers.Gemma4TextConfig(**sizes, layer_types=kinds, global_head_dim=size)
        assert config.is_heterogeneous
        if size == 512:
            with pytest.raises(NotAnOp, match="have 512 numbers"):
                attention._check_config(config)
        else:
            attention._check_config(config)


def test_sinks_and_caps_are_recognised_by_what_is_computed() -> None:
    sinks = GPT_OSS_CODE.eager_attention_forward

    def doubled(*args: Any, **options: Any) -> Any:
        y, weights = sinks(*args, **options)
        return 2 * y, weights

    def wider(module: Any, query: Tensor, key: Tensor, *others: Any, **options: Any) -> Any:
        """Scores in float32, in autocast too."""
        with torch.autocast("cpu", enabled=False):
            return sinks(module, query, key, *others, **options)

    capped = GEMMA2_CODE.eager_attention_forward

    def always_capped(*args: Any, softcap: float | None, **options: Any) -> Any:
        return capped(*args, softcap=softcap or 30.0, **options)

    assert attention.addition(sinks) == "sinks"
    assert attention.addition(capped) == "softcap"
    for other in (wider, doubled, always_capped, LLAMA_CODE.eager_attention_forward, lambda: None):
        assert attention.addition(other) is None


def test_copies() -> None:
    made, inputs = model("gpt_oss"), batch("left")
    expected = step(made, inputs)
    fuse_attention(made)
    name = made.config._attn_implementation
    pickled = pickle.dumps(made)
    for copied in (copy.deepcopy(made), pickle.loads(pickled)):
        with blocks_everywhere():
            torch.testing.assert_close(step(copied, inputs), expected, rtol=1e-6, atol=1e-9)
        assert unfuse(copied) == 1
        assert copied.config._attn_implementation == "eager"
    assert made.config._attn_implementation == name


def test_unpickling_registers_the_names_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in another process, which has not called fuse."""
    made = model("gpt_oss", num_experts_per_tok=1)
    fuse_attention(made)
    pickled = pickle.dumps(made)
    for registry in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
        monkeypatch.delitem(registry._global_mapping, made.config._attn_implementation)
    classes._subclasses.clear()
    loaded = pickle.loads(pickled)
    assert loaded(**batch("left")).loss.isfinite()


def test_saved_models_do_not_name_it(tmp_path: Path) -> None:
    made = model("llama", torch.float32)
    fuse_attention(made)
    made.save_pretrained(tmp_path)
    assert "liger" not in json.dumps(json.loads((tmp_path / "config.json").read_text()))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config._attn_implementation == "sdpa"


def test_an_exception_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made = model("llama")
    cls = type(made.model)

    def fail(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr("liger_ops.fusion.losses.fuse", fail)
    with pytest.raises(MemoryError):
        fuse(made)
    assert made.config._attn_implementation == "sdpa"
    assert type(made.model) is cls


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["gemma3", "gpt_oss"])
def test_generation(name: str, cache: str) -> None:
    """Queries that follow a cache have the model's own masks, and prompts block masks."""
    made = model(name).eval()
    inputs = {key: x for key, x in batch("left", 50).items() if key != "labels"}
    options = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": cache}
    options["disable_compile"] = True
    expected = made.generate(**inputs, **options)
    fuse_attention(made)
    with blocks_everywhere():
        assert torch.equal(made.generate(**inputs, **options), expected)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing(use_reentrant: bool) -> None:
    made, inputs = model("mistral"), batch("packed")
    expected = step(made, inputs)
    fuse_attention(made)
    made.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    with blocks_everywhere():
        torch.testing.assert_close(step(made, inputs), expected, rtol=1e-6, atol=1e-9)


def test_attention_weights_are_those_of_the_model() -> None:
    made, inputs = model("gpt_oss").eval(), batch("left")
    expected = made(**inputs, output_attentions=True).attentions
    fuse_attention(made)
    with blocks_everywhere():
        found = made(**inputs, output_attentions=True).attentions
    assert len(found) == 2
    torch.testing.assert_close(found, expected)


def test_names_of_two_codes_differ() -> None:
    names = {
        attention.AttentionFacts(source, "", False, ()).name for source in ("", "a.flash", "b")
    }
    assert len(names) == 3
    assert not any("flash" in name for name in names)


# transformers 5.24 gave the argument another name.
CACHE = "cache" if "cache" in signature(create_causal_mask).parameters else "past_key_values"
POSITIONS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "consecutive": (lambda x: torch.arange(x.shape[1])[None], ("input_ids", "inputs_embeds")),
    "after a prompt": (lambda x: torch.arange(x.shape[1])[None] + 7, attention_positions.INPUTS),
    "documents": (lambda x: torch.arange(x.shape[1])[None] % 5, ()),
    "of long texts": (lambda x: torch.arange(x.shape[1])[None] // (1 + (x.shape[1] > 6)), ()),
    "of tokens": (lambda x: (x != 0).long().cumsum(1), ()),
    "of none": (lambda x: None, ()),
}


@pytest.mark.parametrize("name", POSITIONS)
def test_positions_that_a_model_makes(name: str) -> None:
    """Masks of which no documents are to be found are those of positions that are consecutive."""
    make, inputs = POSITIONS[name]

    def forward(
        self: Any, input_ids: Any = None, inputs_embeds: Any = None, position_ids: Any = None,
        token_types: Any = None, use_cache: bool = False,
    ) -> Any:  # fmt: skip
        embeds = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if position_ids is None:
            position_ids = make(embeds[..., 0] if input_ids is None else input_ids)
        options = {"attention_mask": None, CACHE: None}
        return create_causal_mask(self.config, embeds, position_ids=position_ids, **options)

    body = model("llama").model
    assert attention_positions.makes_positions(body, forward) == inputs
