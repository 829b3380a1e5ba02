"""Which repeated keys and values are replaced by grouped heads, and which are not."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attention_graphs import as_it_is, checked, compiled, heads, qkv, results
from fused_families import TEXT, VOCABULARY
from liger_ops.rewrites.attention import causal_attention, grouped_attention

OP = "grouped_attention"
LENGTH = 6
Repeat = Callable[[Tensor], Tensor]


def repeat_kv(x: Tensor, n: int = 2) -> Tensor:
    """As transformers does."""
    b, h, s, d = x.shape
    return x[:, :, None, :, :].expand(b, h, n, s, d).reshape(b, h * n, s, d)


def repeat_before_transposing(x: Tensor) -> Tensor:
    """As Llama's first code does, with heads behind positions."""
    x = x.transpose(1, 2)
    b, s, h, d = x.shape
    x = torch.unsqueeze(x, dim=3).expand(b, s, h, 2, d).reshape(b, s, h * 2, d)
    return x.transpose(1, 2)


REPEATS: dict[str, Repeat] = {
    "repeat_kv": repeat_kv,
    "repeat_interleave": lambda x: x.repeat_interleave(2, dim=1),
    "torch.repeat_interleave": lambda x: torch.repeat_interleave(x, repeats=2, dim=-3),
    "unsqueeze and repeat": lambda x: x.unsqueeze(2).repeat(1, 1, 2, 1, 1).flatten(1, 2),
    "view": lambda x: x.view(2, 2, 1, -1, 8).expand(-1, -1, 2, -1, -1).reshape(2, 4, -1, 8),
    "before transposing": repeat_before_transposing,
    "interleaved before transposing": (
        lambda x: x.transpose(1, 2).repeat_interleave(2, dim=2).transpose(1, 2).contiguous()
    ),
}
NEAR_MISSES: dict[str, Repeat] = {
    "the heads in turn": lambda x: x.repeat(1, 2, 1, 1),
    "the heads in turn, expanded": (
        lambda x: x[:, None].expand(2, 2, 2, -1, 8).reshape(2, 4, -1, 8)
    ),
    "two tensors": lambda x: torch.cat([x, x], 1),
    "by other numbers": lambda x: x.repeat_interleave(torch.tensor([1, 3]), dim=1, output_size=4),
    "changed afterwards": lambda x: repeat_kv(x).sin(),
    "some of the copies": lambda x: repeat_kv(x, 4)[:, :4],
}


def attention_of(repeat_key: Repeat, repeat_value: Repeat, **options) -> Callable[..., Tensor]:
    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key, value = repeat_key(key), repeat_value(value)
        return F.scaled_dot_product_attention(query, key, value, **options)

    return attention


def check(
    function: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    count: int,
    dynamic: bool = False,
    findings: int | None = None,
    gradients: bool | None = None,
) -> list[str | None]:
    gradients = bool(count) and not dynamic if gradients is None else gradients
    report, options = checked(function, grouped_attention.rewrite, inputs, dynamic, gradients)
    assert report.counts().get(OP, 0) == count
    assert len(report.findings) == (count if findings is None else findings)
    assert sum(option.get("enable_gqa", False) for option in options) == count
    return [finding.reason for finding in report.findings]


@pytest.mark.quick(rewrites=("grouped_attention",))
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", REPEATS)
def test_repeated_heads_are_found(name, dynamic):
    repeat = REPEATS[name]
    inputs = qkv(LENGTH, grouped=2)
    check(attention_of(repeat, repeat, is_causal=True), inputs, 1, dynamic)
    check(attention_of(repeat, repeat), inputs, 1, dynamic)
    check(attention_of(repeat, repeat_kv, is_causal=True, scale=0.2), inputs, 1, dynamic)


def test_the_copies_are_dropped_from_the_graph():
    function = attention_of(repeat_kv, repeat_kv, is_causal=True)
    rewritten, _, graphs = compiled(function, [grouped_attention.rewrite])
    rewritten(*qkv(LENGTH, grouped=2))
    (graph,) = graphs
    assert len(graph.graph.nodes) == 5


def test_one_head_for_all():
    one = lambda x: x.expand(-1, 4, -1, -1)
    inputs = [heads(2, 4, LENGTH), heads(2, 1, LENGTH, seed=1), heads(2, 1, LENGTH, seed=2)]
    check(attention_of(one, one, is_causal=True), inputs, 1)
    check(attention_of(lambda x: repeat_kv(x, 4), one, is_causal=True), inputs, 1)


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_another_repeat_is_left_alone(name):
    repeat = NEAR_MISSES[name]
    check(attention_of(repeat, repeat, is_causal=True), qkv(LENGTH, grouped=2), 0)


@pytest.mark.parametrize("dim", [0, 2])
def test_what_is_repeated_but_the_heads_is_left_alone(dim):
    """The same sizes of heads before and after, as where one head is for one."""
    query = heads(4 if dim == 0 else 2, 2, LENGTH)
    repeat = lambda x: x.repeat_interleave(2, dim=dim)
    inputs = [query, heads(2, 2, LENGTH, seed=1), heads(2, 2, LENGTH, seed=2)]
    check(attention_of(repeat, repeat), inputs, 0)


def test_repeats_that_differ_are_refused():
    inputs = [heads(2, 4, LENGTH), heads(2, 2, LENGTH, seed=1), heads(2, 1, LENGTH, seed=2)]
    four = lambda x: repeat_kv(x, 4)
    assert check(attention_of(repeat_kv, four, is_causal=True), inputs, 0, findings=1) == [
        "its keys and values are not repeated the same number of times"
    ]
    unrepeated = attention_of(repeat_kv, lambda x: torch.cat([x, x], 1))
    check(unrepeated, qkv(LENGTH, grouped=2), 0, findings=1)


def test_with_a_mask_the_copies_stay():
    mask = torch.ones(LENGTH, LENGTH).tril().bool()
    function = attention_of(repeat_kv, repeat_kv, attn_mask=mask)
    (reason,) = check(function, qkv(LENGTH, grouped=2), 0, findings=1)
    assert "mask" in reason


@pytest.mark.parametrize("written", ["source", "copies", "view"])
def test_a_write_between_is_refused(written):
    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key = key * 1.0
        repeated = repeat_kv(key)
        target = {"source": key, "copies": repeated, "view": key[:, 0]}[written]
        target.mul_(2.0)
        return F.scaled_dot_product_attention(query, repeated, repeat_kv(value), is_causal=True)

    (reason,) = check(attention, qkv(LENGTH, grouped=2), 0, findings=1)
    assert "written in place" in reason


def test_a_write_before_is_no_matter():
    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key = (key * 1.0).mul_(2.0)
        copies = repeat_kv(key), repeat_kv(value)
        return F.scaled_dot_product_attention(query, *copies, is_causal=True)

    check(attention, qkv(LENGTH, grouped=2), 1)


def test_copies_without_a_gradient_are_refused():
    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with torch.no_grad():
            copies = repeat_kv(key), repeat_kv(value)
        return F.scaled_dot_product_attention(query, *copies, is_causal=True)

    (reason,) = check(attention, qkv(LENGTH, grouped=2), 0, findings=1, gradients=True)
    assert "mode" in reason


def test_copies_with_another_use_stay_for_it():
    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        copies = repeat_kv(key), repeat_kv(value)
        return F.scaled_dot_product_attention(query, *copies, is_causal=True) + copies[0]

    check(attention, qkv(LENGTH, grouped=2), 1)


class _Gpu:
    """The properties of a tensor that select a kernel."""

    def __init__(self, length: int = 64, size: int = 64, dtype: torch.dtype = torch.bfloat16):
        self.shape, self.dtype = torch.Size((2, 8, length, size)), dtype
        self.device = torch.device("cuda")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, None),
        ({"result": _Gpu(dtype=torch.float32)}, "does not run in torch.float32"),
        ({"key": _Gpu(size=512), "value": _Gpu(size=512)}, "takes heads of 256 numbers at most"),
        ({"value": _Gpu(size=32)}, "wants keys and values of one size"),
        ({"query": _Gpu(length=32)}, "is causal only for as many queries as keys"),
        ({"query": _Gpu(length=32), "is_causal": False}, None),
        ({"capability": (7, 5)}, "needs compute capability 8.0"),
        ({"enabled": False}, "is turned off"),
    ],
)
def test_what_flash_attention_does_not_run_keeps_its_copies(options, reason, monkeypatch):
    capability = options.pop("capability", (9, 0))
    enabled = options.pop("enabled", True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.backends.cuda, "flash_sdp_enabled", lambda: enabled)
    given = {name: _Gpu() for name in ("query", "key", "value", "result")}
    given.update({"is_causal": True, **options})
    assert grouped_attention.not_flash(**given) == reason


@settings(max_examples=20)
@given(
    st.integers(1, 3),
    st.integers(2, 3),
    st.lists(st.sampled_from(["merge", "swap", "contiguous", "turn", "narrow"]), max_size=4),
)
def test_random_programs_give_equal_results(groups, times, steps):
    """Attention is the same for copies that are made and transposed in any way."""

    def moved(x: Tensor) -> Tensor:
        heads_at = 1
        x = x[:, :, None].expand(-1, -1, times, -1, -1)
        x = x.transpose(1, 2) if "turn" in steps else x
        x = x.flatten(1, 2)
        for step in steps:
            if step == "swap":
                x, heads_at = x.transpose(1, 2), 3 - heads_at
            elif step == "contiguous":
                x = x.contiguous()
            elif step == "narrow":
                x = x[:, :, :, :-1]
        return x.transpose(1, 2) if heads_at == 2 else x

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key, value = moved(key), moved(value)
        return F.scaled_dot_product_attention(query[..., : key.shape[-1]], key, value)

    inputs = [heads(2, n, LENGTH, seed=n) for n in (groups * times, groups, groups)]
    rewritten, report, _ = compiled(attention, [grouped_attention.rewrite])
    for one, other in zip(results(rewritten, inputs), results(attention, inputs), strict=True):
        torch.testing.assert_close(one, other)
    plain = not {"turn", "narrow"} & set(steps)
    assert report.counts().get(OP, 0) == (1 if plain else report.counts().get(OP, 0))


@pytest.mark.parametrize("name", ["Llama", "Qwen2"])
def test_models(name):
    """transformers repeats heads only with a mask, so the mask is replaced first."""
    config = getattr(transformers, f"{name}Config")(**TEXT)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        llm = getattr(transformers, f"{name}ForCausalLM")._from_config(
            config, attn_implementation="sdpa"
        )
    tokens = torch.randint(1, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(1))

    def loss(tokens: Tensor) -> Tensor:
        return llm.train()(input_ids=tokens, labels=tokens).loss

    def gradients(function: Callable[[Tensor], Tensor]) -> list[Tensor]:
        llm.zero_grad()
        value = function(tokens)
        value.backward()
        return [value.detach()] + [p.grad.clone() for p in llm.parameters() if p.grad is not None]

    masked, report, _ = compiled(loss, [grouped_attention.rewrite], inner=as_it_is)
    masked(tokens)
    assert report.counts() == {}
    assert ["mask" in finding.reason for finding in report.findings] == [True, True]

    rewritten, report, _ = compiled(loss, [causal_attention.rewrite, grouped_attention.rewrite])
    actual = gradients(rewritten)
    assert report.counts() == {"causal_attention": 2, OP: 2}
    for one, other in zip(actual, gradients(loss), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
