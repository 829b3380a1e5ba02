"""Which masks become is_causal, which do not, and that what was proved holds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
import transformers
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

from attention_graphs import aot_eager, as_it_is, attention_options, compiled, heads, qkv, results
from families import TEXT, VOCABULARY
from index_programs import conditions, masks, value_at
from liger_ops.lowering.passes import causal_mask
from liger_ops.lowering.passes.index_algebra import Unknown, everywhere, is_condition
from liger_ops.lowering.passes.index_functions import IndexFunctions

OP = "causal_attention"
LENGTH = 6
Mask = Callable[[int, int], Tensor]


def rows(n: int) -> Tensor:
    return torch.arange(n)[:, None]


def columns(n: int) -> Tensor:
    return torch.arange(n)[None, :]


def causal(q: int, k: int) -> Tensor:
    return columns(k) <= rows(q)


def transformers_packed(q: int, k: int) -> Tensor:
    """As transformers makes it without a cache: positions that it numbered itself may be packed."""
    positions = torch.arange(q)[None].expand(2, -1)
    first = positions[:, :1] - 1
    sequence = (torch.diff(positions, prepend=first, dim=-1) != 1).cumsum(-1)
    b = torch.arange(2)[:, None, None, None]
    i, j = torch.arange(q)[None, None, :, None], torch.arange(k)[None, None, None, :]
    mask = i.new_ones((), dtype=torch.bool) & (sequence[b, i] == sequence[b, j])
    return (mask & (positions[b, j] <= positions[b, i])).expand(2, -1, q, k)


def float_mask(kept: Callable[[int, int], Tensor], low: float) -> Mask:
    return lambda q, k: torch.zeros(q, k).masked_fill(~kept(q, k), low)


def least() -> float:
    """In place of a global number, which under dynamic shapes is an input of the graph."""
    return torch.finfo(torch.float32).min


CAUSAL: dict[str, Mask] = {
    "arange": causal,
    "arange, reversed": lambda q, k: torch.ge(torch.arange(q).unsqueeze(-1), torch.arange(k)),
    "not later": lambda q, k: ~(columns(k) > rows(q)),
    "difference": lambda q, k: (rows(q) - columns(k)) >= 0,
    "as methods": lambda q, k: (rows(q) - columns(k)).__abs__().__eq__(rows(q) - columns(k)),
    "strict": lambda q, k: columns(k).lt(rows(q) + 1),
    "before or at": lambda q, k: (columns(k) < rows(q)) | columns(k).eq(rows(q)),
    "tril": lambda q, k: torch.tril(torch.ones(q, k, dtype=torch.bool)),
    "tril of floats": lambda q, k: torch.ones(q, k).tril().view(1, 1, q, k).bool(),
    "triu": lambda q, k: torch.triu(torch.ones(q, k), diagonal=1) == 0,
    "transposed": lambda q, k: torch.ones(k, q, dtype=torch.bool).triu().T,
    "slice of a longer": lambda q, k: torch.ones(64, 64, dtype=torch.bool).tril()[:q, :k],
    "both shifted": lambda q, k: (torch.arange(k) + 3)[None] <= (torch.arange(q) + 3)[:, None],
    "arange with a start": lambda q, k: torch.arange(2, k + 2) <= torch.arange(2, q + 2)[:, None],
    "where": lambda q, k: torch.where(causal(q, k), True, False),
    "expanded": lambda q, k: causal(q, k)[None, None].expand(2, 4, q, k),
    "no padding": lambda q, k: causal(q, k) & torch.ones(2, k).bool()[:, None, None, :],
    "transformers": transformers_packed,
    "minus infinity": lambda q, k: torch.full((q, k), float("-inf")).triu(1),
    "least number": lambda q, k: torch.where(causal(q, k), torch.zeros(()), least()),
    "masked_fill": float_mask(causal, float("-inf")),
    "product": lambda q, k: (1.0 - causal(q, k).float()) * least(),
    "int32": lambda q, k: (
        torch.arange(k, dtype=torch.int32) <= torch.arange(q, dtype=torch.int32)[:, None]
    ),
}
# Causal at the traced sizes, but not at every size.
CAUSAL_AT_THIS_SIZE: dict[str, Mask] = {
    "wide window": lambda q, k: causal(q, k) & (columns(k) > rows(q) - LENGTH),
    "one chunk": lambda q, k: causal(q, k) & (columns(k) // LENGTH == rows(q) // LENGTH),
    "one window": lambda q, k: torch.ones(q, k).tril().triu(1 - LENGTH) == 1,
}
NEAR_MISSES: dict[str, Mask] = {
    "shifted later": lambda q, k: columns(k) <= rows(q) + 1,
    "strictly earlier, with key 0": lambda q, k: (columns(k) < rows(q)) | (columns(k) == 0),
    "both directions": lambda q, k: torch.ones(q, k, dtype=torch.bool),
    "anticausal": lambda q, k: columns(k) >= rows(q),
    "window": lambda q, k: causal(q, k) & (columns(k) > rows(q) - (LENGTH - 1)),
    "chunks": lambda q, k: causal(q, k) & (columns(k) // 3 == rows(q) // 3),
    "one key hidden": lambda q, k: causal(q, k) & ((columns(k) != 2) | (rows(q) == 2)),
    "one key shown": lambda q, k: causal(q, k) | (columns(k) == 4),
    "every second": lambda q, k: columns(k) <= rows(q) * 2,
    "prefix": lambda q, k: causal(q, k) | (columns(k) < 2),
    "the last first": lambda q, k: columns(k) <= q - 1 - rows(q),
    "one row for all": lambda q, k: (columns(k) <= 3).expand(1, k),
    "tril of the wrong diagonal": lambda q, k: torch.ones(q, k, dtype=torch.bool).tril(1),
    "packed in two": lambda q, k: causal(q, k) & ((columns(k) < 3) == (rows(q) < 3)),
    "written in place": lambda q, k: causal(q, k).fill_(True),
    "a view written in place": lambda q, k: _written(causal(q, k)),
    "not low enough": float_mask(causal, -10000.0),
    "a bias of distances": lambda q, k: (
        (columns(k) - rows(q)).float().masked_fill(~causal(q, k), least())
    ),
    "random": lambda q, k: causal(q, k) & (torch.rand(q, k) < 2.0),
    "a bias of one": lambda q, k: torch.where(causal(q, k), 1.0, least()),
    "bytes that wrap": lambda q, k: (
        (torch.arange(k) * 43).to(torch.uint8) <= (torch.arange(q) * 43).to(torch.uint8)[:, None]
    ),
}


def _written(mask: Tensor) -> Tensor:
    mask[:, 2].fill_(True)
    return mask


def with_mask(mask: Mask) -> Callable[..., Tensor]:
    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        made = mask(query.shape[-2], key.shape[-2])
        return F.scaled_dot_product_attention(query, key, value, attn_mask=made)

    return attention


def check(
    function: Callable[..., Tensor],
    inputs: list[Tensor],
    count: int,
    dynamic: bool = False,
    attentions: int = 1,
) -> list[str | None]:
    """The number of calls rewritten, and the results; what the report says of the others.

    Gradients are looked at where a call is rewritten, at fixed sizes.
    """
    gradients = bool(count) and not dynamic
    rewritten, report, graphs = compiled(
        function, [causal_mask.rewrite], dynamic, aot_eager if gradients else as_it_is
    )
    actual, expected = (results(f, inputs, gradients) for f in (rewritten, function))
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other)
    assert report.counts().get(OP, 0) == count
    assert len(report.findings) == attentions
    options = attention_options(graphs)
    assert sum(option.get("is_causal", False) for option in options) == count
    assert sum("attn_mask" in option for option in options) == attentions - count
    return [finding.reason for finding in report.findings]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", CAUSAL)
def test_a_causal_mask_is_found(name, dynamic):
    check(with_mask(CAUSAL[name]), qkv(LENGTH), 1, dynamic)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", CAUSAL_AT_THIS_SIZE)
def test_a_window_as_long_as_the_sequence_is_none_where_the_size_is_fixed(name, dynamic):
    check(with_mask(CAUSAL_AT_THIS_SIZE[name]), qkv(LENGTH), 0 if dynamic else 1, dynamic)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", NEAR_MISSES)
def test_a_near_miss_is_left_alone(name, dynamic):
    (reason,) = check(with_mask(NEAR_MISSES[name]), qkv(LENGTH), 0, dynamic)
    assert reason


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(6, 9), (9, 6), (2, 5)])
def test_is_causal_counts_queries_and_keys_from_0(queries, keys, dynamic):
    inputs = qkv(queries, keys)
    check(with_mask(causal), inputs, 1, dynamic)
    check(with_mask(CAUSAL["tril"]), inputs, 1, dynamic)
    check(with_mask(lambda q, k: columns(k) <= rows(q) + (k - q) + 4), inputs, 0, dynamic)


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 5), (5, 1)])
def test_one_query_or_one_key(queries, keys):
    check(with_mask(causal), qkv(queries, keys), 1)


def test_one_query_of_a_cache_sees_all_keys():
    check(with_mask(lambda q, k: columns(k) <= rows(q) + 4), qkv(1, 5), 0)
    everything = with_mask(lambda q, k: torch.ones(q, k, dtype=torch.bool))
    check(everything, qkv(1, 5), 0)
    check(everything, qkv(1, 1), 1)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    ("extra", "combine"),
    [
        ((LENGTH, LENGTH), lambda given, mask, q: given > 0),
        ((2, LENGTH), lambda given, mask, q: mask & (given > -9)[:, None, None, :]),
        ((2, LENGTH), lambda given, mask, q: transformers_positions(given.argsort(-1))),
        ((), lambda given, mask, q: columns(q) <= rows(q) + (given > 9).long()),
        ((LENGTH, LENGTH), lambda given, mask, q: torch.where(mask, given, least())),
    ],
    ids=["mask", "padding", "positions", "offset", "bias"],
)
def test_a_mask_of_inputs_is_left_alone(extra, combine, dynamic):
    def attention(query: Tensor, key: Tensor, value: Tensor, given: Tensor) -> Tensor:
        length = query.shape[-2]
        mask = combine(given.detach(), causal(length, length), length)
        # Each query sees a key, whatever the input.
        if mask.dtype == torch.bool:
            mask = mask | (columns(length) == 0)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)

    given = torch.randn(extra, generator=torch.Generator().manual_seed(3))
    (reason,) = check(attention, [*qkv(LENGTH), given], 0, dynamic)
    assert "depends on" in reason


def transformers_positions(positions: Tensor) -> Tensor:
    b = torch.arange(2)[:, None, None, None]
    i = torch.arange(LENGTH)[None, None, :, None]
    j = torch.arange(LENGTH)[None, None, None, :]
    return positions[b, j] <= positions[b, i]


def test_an_offset_that_is_an_input_is_left_alone():
    def attention(query: Tensor, key: Tensor, value: Tensor, offset: int) -> Tensor:
        mask = columns(key.shape[-2]) <= rows(query.shape[-2]) + offset
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)

    for dynamic, offset, count in ((False, 1, 0), (True, 2, 0), (False, 0, 1)):
        rewritten, report, _ = compiled(attention, [causal_mask.rewrite], dynamic)
        inputs = qkv(LENGTH)
        torch.testing.assert_close(rewritten(*inputs, offset), attention(*inputs, offset))
        assert report.counts().get(OP, 0) == count


def test_a_mask_with_another_use_stays():
    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mask = causal(query.shape[-2], key.shape[-2])
        y = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return torch.cat([y, mask.float().expand(2, 4, -1, -1)], -1)

    check(attention, qkv(LENGTH), 1)


def test_the_mask_is_dropped_from_the_graph():
    rewritten, _, graphs = compiled(with_mask(transformers_packed), [causal_mask.rewrite])
    rewritten(*qkv(LENGTH))
    (graph,) = graphs
    assert [node.op for node in graph.graph.nodes] == 3 * ["placeholder"] + [
        "call_function",
        "output",
    ]


def test_one_mask_for_several_calls():
    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mask = causal(LENGTH, LENGTH)
        window = mask & (columns(LENGTH) > rows(LENGTH) - 2)
        y = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.3)
        y = F.scaled_dot_product_attention(y, key, value, window)
        y = F.scaled_dot_product_attention(y, key, value, mask, 0.0, False)
        y = F.scaled_dot_product_attention(y, key, value, is_causal=True)
        return y

    rewritten, report, graphs = compiled(attention, [causal_mask.rewrite])
    for one, other in zip(
        results(rewritten, qkv(LENGTH)), results(attention, qkv(LENGTH)), strict=True
    ):
        torch.testing.assert_close(one, other)
    assert [finding.used for finding in report.findings] == [True, False, True]
    options = attention_options(graphs)
    assert [option.get("is_causal", False) for option in options] == [True, False, True, True]
    assert options[0]["scale"] == 0.3


def test_under_autocast():
    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return with_mask(causal)(query, key, value)

    check(attention, qkv(LENGTH), 1)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_mask_from_outside_a_checkpointed_block(dynamic):
    def block(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask).sin()

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mask = causal(query.shape[-2], key.shape[-2])
        narrow = mask & (columns(key.shape[-2]) > rows(query.shape[-2]) - 2)
        for one in (mask, narrow, mask):
            query = torch.utils.checkpoint.checkpoint(
                block, query, key, value, one, use_reentrant=False
            )
        return query

    check(attention, qkv(LENGTH), 2, dynamic, attentions=3)


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


@pytest.mark.parametrize(("name", "options", "arguments", "dynamic", "count"), MODELS)
def test_models(name, options, arguments, dynamic, count):
    llm = model(name, **options)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, VOCABULARY, (2, TOKENS), generator=generator)

    def loss(tokens: Tensor) -> Tensor:
        return llm(input_ids=tokens, labels=tokens, **arguments).loss

    expected = losses_and_gradients(loss, llm, tokens)
    # Dynamic shapes are slow to compile: there the graph is only rewritten.
    inner = as_it_is if dynamic else aot_eager
    rewritten, report, _ = compiled(loss, [causal_mask.rewrite], dynamic, inner)
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

    rewritten, report, graphs = compiled(loss, [causal_mask.rewrite], dynamic, as_it_is)
    torch.testing.assert_close(rewritten(tokens), loss(tokens))
    assert report.counts() == {OP: 2}
    assert all(option["is_causal"] for option in attention_options(graphs))


def losses_and_gradients(
    loss: Callable[[Tensor], Tensor], llm: torch.nn.Module, tokens: Tensor
) -> list[Tensor]:
    llm.zero_grad()
    value = loss(tokens)
    value.backward()
    return [value.detach()] + [p.grad.clone() for p in llm.parameters() if p.grad is not None]


def test_a_checkpointed_model():
    llm = model("Llama")
    llm.gradient_checkpointing_enable()
    tokens = torch.arange(1, 2 * TOKENS + 1).view(2, TOKENS)

    def loss(tokens: Tensor) -> Tensor:
        return llm(input_ids=tokens, labels=tokens).loss

    expected = losses_and_gradients(loss, llm, tokens)
    rewritten, report, _ = compiled(loss, [causal_mask.rewrite])
    actual = losses_and_gradients(rewritten, llm, tokens)
    assert report.counts() == {OP: 2}
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


# Whatever program makes the mask


@settings(max_examples=40)
@given(masks(), st.integers(2, 5), st.integers(2, 5), st.booleans())
def test_a_mask_is_judged_causal_only_if_it_is(program, queries, keys, dynamic):
    """Under dynamic shapes, also at the sizes that were not traced."""

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mask = program(query.shape[-2], key.shape[-2])
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)

    rewritten, report, _ = compiled(attention, [causal_mask.rewrite], dynamic, as_it_is)
    with torch.no_grad():
        rewritten(*(heads(2, 3, n, size=4) for n in (queries, keys, keys)))
    if report.counts().get(OP):
        sizes = [(queries, keys)]
        if dynamic:
            sizes += [(queries + n, keys + n) for n in (1, 3, 12)]
        for q, k in sizes:
            torch.testing.assert_close(program(q, k).expand(q, k), causal(q, k))


@settings(max_examples=500)
@given(conditions(), st.integers(1, 6), st.integers(1, 6))
def test_what_is_proved_holds_at_every_index(condition, queries, keys):
    seen = [[value_at(condition, (i, j)) for j in range(keys)] for i in range(queries)]
    is_causal = seen == [[j <= i for j in range(keys)] for i in range(queries)]
    proved = causal_mask.departure(condition, (2, 3, queries, keys)) is None
    assert is_causal or not proved
    event(f"causal: {is_causal}, proved: {proved}")


@settings(max_examples=60)
@given(masks(), st.integers(1, 4), st.integers(1, 4))
def test_a_function_of_indices_is_what_the_graph_computes(program, queries, keys):
    """Every node that is known, at every index; and every decision about it."""
    captured: list[fx.GraphModule] = []

    def backend(module: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        captured.append(module)
        return module.forward

    torch._dynamo.reset()
    torch.compile(program, backend=backend)(queries, keys)
    functions = IndexFunctions()

    class Comparison(fx.Interpreter):
        def run_node(self, node: fx.Node) -> object:
            actual = super().run_node(node)
            if node.op.startswith("call_") and isinstance(actual, Tensor):
                try:
                    value = functions.value(node)
                except Unknown:
                    return actual
                places = torch.cartesian_prod(*(torch.arange(n) for n in actual.shape))
                for place in places.reshape(actual.numel(), actual.dim()).tolist():
                    assert value_at(value, place) == actual[tuple(place)].item()
                if is_condition(value):
                    decision = everywhere(actual.shape).decide(value)
                    assert decision is None or bool((actual == decision).all())
            return actual

    for module in captured:
        Comparison(module).run()
