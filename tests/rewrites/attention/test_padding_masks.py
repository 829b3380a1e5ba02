"""The backend looks at the attention_mask: a mask of ones costs nothing."""

from __future__ import annotations

import concurrent.futures
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager

import liger_ops
from attention_graphs import heads, results
from causal_models import gradients
from data_masks import MASKS, documents, right_padding
from liger_ops.rewrites.attention.runtime import padding

LENGTH = 12


class Compilations(list[str]):
    """An inner backend that records how attention is computed in each graph that it compiles."""

    def __call__(self, module: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        kinds = {
            "causal" if node.kwargs.get("is_causal") else "mask" if node.kwargs else "all"
            for part in module.modules()
            for node in part.graph.nodes
            if node.target is F.scaled_dot_product_attention
        }
        self.append(" ".join(sorted(kinds)))
        return aot_eager(module, inputs)


def compiled(function: Callable[..., Any], dynamic: bool | None = None, **options: Any) -> Any:
    torch._dynamo.reset()
    made = Compilations()
    options = {"inner_backend": made, "strict": True, **options}
    return torch.compile(
        function, backend=liger_ops.backend, dynamic=dynamic, options=options
    ), made


def attention(name: str) -> Callable[..., Tensor]:
    mask, _ = MASKS[name]

    def run(query: Tensor, key: Tensor, value: Tensor, data: Tensor) -> Tensor:
        seen = mask(query.shape[-2], key.shape[-2], data)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=seen)

    return run


def batch(data: Tensor) -> list[Tensor]:
    return [*(heads(2, 2, data.shape[1], 8, seed) for seed in range(3)), data]


def check(rewritten: Callable[..., Tensor], name: str, data: Tensor) -> None:
    pairs = zip(results(rewritten, batch(data)), results(attention(name), batch(data)), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one, other)


@pytest.mark.quick
def test_a_variant_is_compiled_when_it_is_first_needed():
    rewritten, made = compiled(attention("padding"))
    ones, padded = torch.ones(2, LENGTH, dtype=torch.int64), right_padding(LENGTH)
    for data, expected in (
        (ones, ["causal"]),
        (ones, ["causal"]),
        (padded, ["causal", "mask"]),
        (ones, ["causal", "mask"]),
        (padded.flip(-1), ["causal", "mask"]),
    ):
        check(rewritten, "padding", data)
        assert made == expected


def test_a_padded_first_batch_compiles_that_variant_alone():
    rewritten, made = compiled(attention("padding"))
    check(rewritten, "padding", right_padding(LENGTH))
    assert made == ["mask"]


def test_with_symbolic_sizes_both_are_compiled_at_once():
    rewritten, made = compiled(attention("padding"), dynamic=True)
    for length in (LENGTH, 19, 7):
        check(rewritten, "padding", torch.ones(2, length, dtype=torch.int64))
        assert made == ["causal", "mask"]
        check(rewritten, "padding", right_padding(length))
    assert made == ["causal", "mask"]


def test_both_masks_of_two_attentions_are_looked_at():
    def run(query: Tensor, key: Tensor, value: Tensor, data: Tensor, other: Tensor) -> Tensor:
        once = attention("padding")(query, key, value, data)
        return attention("padding")(once, key, value, other)

    rewritten, made = compiled(run)
    ones, padded = torch.ones(2, LENGTH, dtype=torch.int64), right_padding(LENGTH)
    for masks in ((ones, padded), (padded, ones), (ones, ones)):
        given = [*batch(masks[0]), masks[1]]
        torch.testing.assert_close(rewritten(*given), run(*given))
    assert made == ["mask", "causal"]


def test_threads_that_call_at_once_compile_a_variant_once():
    def slow(module: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        time.sleep(0.2)
        return made(module, inputs)

    made = Compilations()
    rewritten, _ = compiled(attention("padding"), inner_backend=slow)
    check(rewritten, "padding", torch.ones(2, LENGTH, dtype=torch.int64))
    data = right_padding(LENGTH)
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(check, rewritten, "padding", data) for _ in range(4)]:
            done.result()
    assert made == ["causal", "mask"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [("padding, no causal", "all"), ("bool", "causal"), ("padding by index", "causal")],
)
def test_masks_that_are_looked_at(name, expected):
    rewritten, made = compiled(attention(name))
    _, data = MASKS[name]
    check(rewritten, name, torch.ones_like(data(LENGTH)))
    check(rewritten, name, data(LENGTH))
    assert made == [expected, "mask"]


def test_a_mask_of_other_numbers_is_not_taken_for_ones():
    """Some collators number the documents of a row in the attention_mask."""
    rewritten, made = compiled(attention("padding"))
    check(rewritten, "padding", documents(LENGTH) + 1)
    assert made == ["mask"]


@pytest.mark.parametrize("name", ["packed", "packed by positions"])
def test_documents_are_not_looked_at(name):
    _, data = MASKS[name]
    rewritten, made = compiled(attention(name))
    check(rewritten, name, data(LENGTH))
    ones = torch.ones(2, LENGTH, dtype=torch.int64)
    check(rewritten, name, ones if name == "packed" else torch.arange(LENGTH).expand(2, -1))
    assert made == ["mask"]


def test_no_batch_is_kept_for_a_later_compilation():
    rewritten, made = compiled(attention("padding"))
    inputs = batch(torch.ones(2, LENGTH, dtype=torch.int64))
    alive = [weakref.ref(one) for one in inputs]
    rewritten(*inputs)
    del inputs
    assert [one() for one in alive] == [None] * 4
    check(rewritten, "padding", right_padding(LENGTH))
    assert made == ["causal", "mask"]


def test_a_promise_is_checked():
    rewritten, made = compiled(attention("padding"), padding=False)
    check(rewritten, "padding", torch.ones(2, LENGTH, dtype=torch.int64))
    with pytest.raises(RuntimeError, match="a promise that no token is padding"):
        results(rewritten, batch(right_padding(LENGTH)))
    assert made == ["causal"]


def test_with_padding_nothing_is_looked_at():
    rewritten, made = compiled(attention("padding"), padding=True)
    check(rewritten, "padding", torch.ones(2, LENGTH, dtype=torch.int64))
    assert made == ["mask"]


def test_an_error_while_masks_are_looked_for_leaves_the_graph(monkeypatch):
    def broken(*_: Any) -> None:
        raise ZeroDivisionError("broken")

    monkeypatch.setattr(padding, "_conditions", broken)
    data = right_padding(LENGTH)
    rewritten, made = compiled(attention("padding"), strict=False)
    with pytest.warns(UserWarning, match="'padding' failed .ZeroDivisionError: broken"):
        check(rewritten, "padding", data)
    assert made == ["mask"]
    rewritten, _ = compiled(attention("padding"))
    with pytest.raises(Exception, match="broken"):
        rewritten(*batch(data))


def test_padding_is_a_bool():
    rewritten, _ = compiled(attention("padding"), padding="no")
    with pytest.raises(Exception, match=r"options\['padding'\] must be a bool or None, got str"):
        rewritten(*batch(right_padding(LENGTH)))


def test_a_mask_that_is_written_in_place_is_not_looked_at():
    def run(query: Tensor, key: Tensor, value: Tensor, data: Tensor) -> Tensor:
        y = attention("padding")(query, key, value, data)
        data.mul_(2)
        return y

    rewritten, made = compiled(run)
    inputs, others = (batch(torch.ones(2, LENGTH, dtype=torch.int64)) for _ in range(2))
    torch.testing.assert_close(rewritten(*inputs), run(*others))
    assert made == ["mask"]
    assert torch.equal(inputs[3], others[3])


def test_another_use_of_the_mask_sees_ones():
    def run(query: Tensor, key: Tensor, value: Tensor, data: Tensor) -> Tensor:
        y = attention("padding")(query, key, value, data)
        return y * data[:, None, :, None] / data.sum()

    rewritten, made = compiled(run)
    for data in (torch.ones(2, LENGTH, dtype=torch.int64), right_padding(LENGTH)):
        torch.testing.assert_close(rewritten(*batch(data)), run(*batch(data)))
    assert made == ["causal", "mask"]


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_checkpointed_model_with_the_mask_of_a_collator(implementation):
    llm = tiny_llama(implementation)
    llm.gradient_checkpointing_enable()
    tokens = torch.arange(1, 2 * LENGTH + 1).view(2, LENGTH)

    def loss(mask: Tensor) -> Tensor:
        labels = tokens.masked_fill(mask == 0, -100)
        return llm(input_ids=tokens, labels=labels, attention_mask=mask).loss

    rewritten, made = compiled(loss)
    for mask in (torch.ones_like(tokens), right_padding(LENGTH)):
        actual, expected = gradients(llm, rewritten(mask)), gradients(llm, loss(mask))
        for name, grad in actual.items():
            torch.testing.assert_close(grad, expected[name], rtol=1e-4, atol=1e-6)
    assert made == ["causal", "mask" if implementation == "sdpa" else ""]


def test_explain_looks_too():
    ones, padded = torch.ones(2, LENGTH, dtype=torch.int64), right_padding(LENGTH)
    for data, count in ((ones, 1), (padded, 0)):
        explanation = liger_ops.explain(attention("padding"), *batch(data))
        assert explanation.counts().get("causal_attention", 0) == count


def tiny_llama(implementation: str) -> transformers.PreTrainedModel:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "vocab_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**sizes, **heads, use_cache=False)
    return transformers.LlamaForCausalLM._from_config(
        config, attn_implementation=implementation
    ).train()
