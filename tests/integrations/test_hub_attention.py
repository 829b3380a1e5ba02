"""The attention of a build for the kernels hub gives models what their own attention gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="the models are those of transformers")
import transformers

from liger_ops.hub.attention import attention, attention_mask

NAME = "liger-hub-tested"
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "use_cache": False,
    "pad_token_id": 0, "eos_token_id": None, "attention_dropout": 0.0,
}  # fmt: skip
ROWS, LENGTH = 3, 20
# Name of a configuration -> its options, and the model's own attention.
MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "Llama": ({}, "sdpa"),
    "Mistral": ({"sliding_window": 7}, "sdpa"),
    "Gemma2": ({"sliding_window": 6, "attn_logit_softcapping": 2.0}, "eager"),
    "Gemma3Text": ({"sliding_window": 5}, "sdpa"),
    "GptOss": ({"sliding_window": 6, "num_local_experts": 2, "num_experts_per_tok": 1}, "eager"),
}
BATCHES = ("none", "ones", "right", "left", "packed")


@pytest.fixture(scope="module", autouse=True)
def registered() -> Any:
    transformers.AttentionInterface.register(NAME, attention)
    transformers.AttentionMaskInterface.register(NAME, attention_mask)
    yield
    for interface in (transformers.AttentionInterface, transformers.AttentionMaskInterface):
        interface._global_mapping.pop(NAME)


def make(name: str, **more: Any) -> Any:
    options, own = MODELS[name]
    config = getattr(transformers, f"{name}Config")(**SIZES, **options, **more)
    torch.manual_seed(0)
    # Larger weights than a new model's, so that attention is not nearly uniform.
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=own)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


def batch_of(kind: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, SIZES["vocab_size"], (ROWS, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    token = torch.arange(LENGTH)
    short = torch.tensor([0, 6, 13])[:, None]
    given = {"input_ids": ids, "labels": ids}
    if kind == "packed":
        return given | {"position_ids": torch.where(token < short, token, token - short)}
    if kind in ("right", "left"):
        mask = (token < LENGTH - short if kind == "right" else token >= short).long()
        # A token of the padding has no prediction, either.
        given["labels"] = torch.where(mask.bool() & (token > short), ids, -100)
    return given if kind == "none" else given | {"attention_mask": mask}


def trained(model: Any, batch: dict[str, Tensor]) -> list[Tensor]:
    out = model(**batch)
    is_seen = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    gradients = torch.autograd.grad(out.loss, list(model.parameters()), allow_unused=True)
    return [out.loss, out.logits[is_seen], *(g for g in gradients if g is not None)]


# GPT-OSS itself reads no documents in positions.
@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, kind) for name in MODELS for kind in BATCHES if (name, kind) != ("GptOss", "packed")],
)
def test_a_model_trains_as_with_its_own_attention(name: str, kind: str) -> None:
    model, batch = make(name), batch_of(kind)
    expected = trained(model, batch)
    model.set_attn_implementation(NAME)
    torch.testing.assert_close(trained(model, batch), expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("kind", BATCHES)
def test_it_compiles_in_one_graph(kind: str) -> None:
    model, batch = make("GptOss"), batch_of(kind)
    model.set_attn_implementation(NAME)
    expected = model(**batch).loss
    torch._dynamo.reset()
    compiled = torch.compile(lambda **given: model(**given).loss, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(**batch), expected)


@pytest.mark.parametrize("name", MODELS)
def test_one_row_is_packed_by_its_positions_or_by_cu_seq_lens(name: str) -> None:
    model = make(name)
    model.set_attn_implementation(NAME)
    ids, positions = (batch_of("packed")[name][2:] for name in ("input_ids", "position_ids"))
    expected = torch.cat([model(ids[:, :13]).logits, model(ids[:, 13:]).logits], 1)
    torch.testing.assert_close(model(ids, position_ids=positions).logits, expected)
    starts = {"cu_seq_lens_q": torch.tensor([0, 13, LENGTH], dtype=torch.int32)}
    given = {"position_ids": positions, **starts}
    torch.testing.assert_close(model(ids, **given).logits, expected)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", MODELS)
def test_generation_finds_the_same_words(name: str, cache: str) -> None:
    model = make(name).eval()
    batch = batch_of("left")
    given = {key: batch[key] for key in ("input_ids", "attention_mask")}
    more = {"max_new_tokens": 8, "use_cache": True, "do_sample": False}
    more |= {"cache_implementation": "static"} if cache == "static" else {}
    expected = model.generate(**given, **more)
    model.set_attn_implementation(NAME)
    assert torch.equal(model.generate(**given, **more), expected)


@pytest.mark.parametrize("width", [LENGTH - 5, LENGTH + 9])
@pytest.mark.parametrize("name", MODELS)
def test_a_mask_has_any_width(name: str, width: int) -> None:
    """No key beyond it is seen, and none that is not filled."""
    model = make(name).eval()
    ids = batch_of("none")["input_ids"]
    mask = torch.ones(ROWS, width, dtype=torch.long)

    def logits() -> Tensor:
        cache = transformers.StaticCache(config=model.config, max_cache_len=LENGTH + 9)
        out = model(ids, attention_mask=mask, past_key_values=cache, use_cache=True)
        return out.logits[:, : min(width, LENGTH)]

    expected = logits()
    model.set_attn_implementation(NAME)
    torch.testing.assert_close(logits(), expected, atol=2e-4, rtol=2e-4)


def test_a_decoder_sees_all_of_an_encoder() -> None:
    sizes = {"d_model": 32, "vocab_size": 64}
    layers = {f"{side}_layers": 1 for side in ("encoder", "decoder")}
    heads = {f"{side}_attention_heads": 4 for side in ("encoder", "decoder")}
    widths = {f"{side}_ffn_dim": 48 for side in ("encoder", "decoder")}
    config = transformers.BartConfig(**sizes, **layers, **heads, **widths)
    torch.manual_seed(0)
    model = transformers.BartModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    ids = batch_of("none")["input_ids"]
    for mask in (None, (torch.arange(LENGTH) < 15).long().expand(ROWS, LENGTH)):
        given = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": ids[:, :7]}
        model.set_attn_implementation("sdpa")
        expected = model(**given).last_hidden_state
        model.set_attn_implementation(NAME)
        torch.testing.assert_close(model(**given).last_hidden_state, expected)


def test_lengths_may_be_symbols() -> None:
    model = make("Llama")
    model.set_attn_implementation(NAME)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda ids: model(ids).logits, backend="eager", fullgraph=True, dynamic=True
    )
    for length in (LENGTH, 13, 9):
        ids = batch_of("none")["input_ids"][:, :length]
        torch.testing.assert_close(compiled(ids), model(ids).logits)


def test_a_mask_of_alternatives_is_refused() -> None:
    from transformers import masking_utils

    own = masking_utils.causal_mask_function
    blocks = masking_utils.or_masks(own, lambda b, h, q, k: k < 3)
    within = masking_utils.and_masks(blocks, own)
    for given in ({"mask_function": blocks}, {"mask_function": within}, {"use_vmap": True}):
        with pytest.raises(ValueError, match="attention_mask: the model shows other keys"):
            attention_mask(2, 6, 6, **given)
    assert attention_mask(2, 6, 6, mask_function=own) is None


@pytest.mark.parametrize("name", MODELS)
def test_a_cache_with_room_needs_no_mask(name: str) -> None:
    model = make(name).eval()
    ids = batch_of("none")["input_ids"]
    expected = [model(ids[:, :12]).logits, model(ids).logits[:, 12:]]
    model.set_attn_implementation(NAME)
    cache = transformers.StaticCache(config=model.config, max_cache_len=LENGTH + 9)
    first = model(ids[:, :12], past_key_values=cache, use_cache=True).logits
    rest = [
        model(ids[:, i : i + 1], past_key_values=cache, use_cache=True).logits
        for i in range(12, LENGTH)
    ]
    torch.testing.assert_close([first, torch.cat(rest, 1)], expected, atol=2e-4, rtol=2e-4)


class Module(torch.nn.Module):
    is_causal = True


def operands() -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(2, heads, 6, 8, generator=generator) for heads in (4, 2, 2)]


def test_scores_of_float64_are_float64() -> None:
    q, k, v = (x.double() for x in operands())
    y, _ = attention(Module(), q[:, :, 3:], k, v)
    whole, _ = attention(Module(), q, k, v)
    torch.testing.assert_close(y, whole[:, 3:], atol=1e-14, rtol=1e-14)


def test_dropout_of_a_packed_batch_hides_the_keys_of_others() -> None:
    q, k, v = operands()
    positions = torch.tensor([[0, 1, 2, 0, 1, 2]]).expand(2, 6)
    torch.manual_seed(3)
    y, _ = attention(Module(), q, k, v, dropout=0.5, position_ids=positions)
    v[:, :, :3] = 100.0
    torch.manual_seed(3)
    changed, _ = attention(Module(), q, k, v, dropout=0.5, position_ids=positions)
    assert torch.equal(y[:, 3:], changed[:, 3:]) and not torch.equal(y[:, :3], changed[:, :3])


@pytest.mark.parametrize("window", [None, 3])
def test_attention_that_is_not_causal_sees_both_sides(window: int | None) -> None:
    q, k, v = operands()
    mask = torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
    y, _ = attention(Module(), q, k, v, mask, is_causal=False, sliding_window=window)
    token = torch.arange(6)
    visible = mask.bool()[:, None, None].expand(2, 1, 6, 6)
    if window is not None:
        visible = visible & ((token[:, None] - token).abs() < window)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, visible, enable_gqa=True
    ).transpose(1, 2)
    is_seen = visible.any(-1)[:, 0]
    torch.testing.assert_close(y[is_seen], expected[is_seen])
    assert not y[~is_seen].any()


def test_what_it_cannot_compute_is_refused() -> None:
    module = Module()
    module.config = transformers.Llama4TextConfig(attention_chunk_size=4)
    with pytest.raises(ValueError, match="attention: a config with attention_chunk_size"):
        attention(module, *operands())
    with pytest.raises(ValueError, match=r"attention_mask must be \(B, K\).* got \(2, 1, 6, 6\)"):
        attention(Module(), *operands(), torch.ones(2, 1, 6, 6))
    starts = torch.tensor([0, 6, 12])
    mask = torch.ones(2, 6)
    for given in ({"dropout": 0.5}, {"is_causal": False}, {"attention_mask": mask}):
        with pytest.raises(ValueError, match="attention: with cu_seq_lens_q it is causal"):
            attention(Module(), *operands(), cu_seq_lens_q=starts, **given)
