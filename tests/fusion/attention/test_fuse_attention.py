"""Attention of fused models, by documents and block masks, against the untouched model with its
dense masks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from attention_models import (
    LENGTH,
    NAMES,
    OWN_CAPS,
    WINDOW,
    batch,
    blocks_everywhere,
    fuse_attention,
    model,
    step,
)
from graphs import Recorder
from liger_ops.fusion import unfuse
from liger_ops.fusion.attention import attention_function

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls of varlen_attention and of flex_attention."""
    found: list[Any] = []
    for name in ("attend", "flex_attention"):
        engine = getattr(attention_function, name)

        def recorded(*args: Any, engine: Any = engine, **options: Any) -> Any:
            found.append(engine)
            return engine(*args, **options)

        monkeypatch.setattr(attention_function, name, recorded)
    return found


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """In float64: sums in another order, and no more."""
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


# Layers of two that varlen_attention or flex_attention computes. The others are causal, by SDPA;
# GPT-OSS has sinks.
LAYERS = {
    "llama": (0, 2),
    "mistral": (2, 2),
    "gemma3": (1, 2),
    "llama4": (1, 2),
    "deepseek_v3": (0, 2),
}


CASES = [(name, kind) for name in NAMES for kind in ("bare", "left", "packed")]


@pytest.mark.parametrize(("name", "kind"), [*CASES, ("llama", "ones"), ("llama", "right")])
def test_eager(name: str, kind: str, calls: list[Any]) -> None:
    """Every logit, of padding too, and every gradient."""
    made, inputs = model(name), batch(kind)
    expected = step(made, inputs)
    fuse_attention(made)
    with blocks_everywhere():
        found = step(made, inputs)
    assert_same(found, expected)
    hides = kind not in ("bare", "ones")
    assert len(calls) == LAYERS.get(name, (2, 2))[hides]
    assert unfuse(made) == 1
    assert torch.equal(step(made, inputs)["logits"], expected["logits"])


@pytest.mark.parametrize("scaling", [-0.3, 0.0, torch.tensor(0.3, dtype=torch.float64)])
def test_a_scaling_that_engines_do_not_take(scaling: Any, calls: list[Any]) -> None:
    """A negative one would turn minus infinity into infinity in flash attention."""
    made, inputs = model("mistral"), batch("left")
    for layer in made.model.layers:
        layer.self_attn.scaling = scaling
    expected = step(made, inputs)
    fuse_attention(made)
    with blocks_everywhere():
        assert_same(step(made, inputs), expected)
    assert calls == []


@pytest.mark.skipif(not OWN_CAPS, reason="the default of Gemma 2 is SDPA")
@pytest.mark.parametrize("cap", [-1.5, 0.0])
def test_soft_caps_that_engines_do_not_take(cap: float, calls: list[Any]) -> None:
    made, inputs = model("gemma2", torch.float32), batch("left")
    fuse_attention(made)
    for layer in made.model.layers:
        layer.self_attn.attn_logit_softcapping = cap
    with blocks_everywhere():
        found = step(made, inputs)
    assert unfuse(made) == 1 and calls == []
    torch.testing.assert_close(found, step(made, inputs), equal_nan=True, rtol=1e-3, atol=1e-5)


@pytest.mark.skipif(
    not OWN_CAPS,
    reason="SDPA is the default of Gemma 2 in an older transformers, and leaves the cap out",
)
@pytest.mark.parametrize(
    ("kind", "compiled"),
    [("bare", False), ("left", False), ("right", False), ("packed", False), ("left", True)],
)
def test_soft_caps(kind: str, compiled: bool) -> None:
    """Every logit, of padding too: a query that sees no key gets the mean of all values.

    In float32: Gemma 2 computes its softmax in it, and the lowest float64 is infinite there.
    """
    made, inputs = model("gemma2", torch.float32), batch(kind)
    expected = step(made, inputs)
    fuse_attention(made)
    torch._dynamo.reset()
    with blocks_everywhere():
        call = torch.compile(made, fullgraph=True, backend="aot_eager") if compiled else made
        found = step(made, inputs, call)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
    if kind == "left":
        set_dropout(made, 0.5)
        torch.manual_seed(1)
        with blocks_everywhere():
            found = step(made, inputs)
        assert unfuse(made) == 1
        torch.manual_seed(1)
        assert_same(found, step(made, inputs))


@pytest.mark.parametrize(
    ("name", "kind"),
    [("llama", "bare"), ("llama", "left"), ("gemma3", "packed"), ("gpt_oss", "left")],
)
def test_compiled(name: str, kind: str) -> None:
    """One graph, without a dense mask, and no mask at all where the model makes its positions."""
    made, inputs = model(name), batch(kind)
    expected = step(made, inputs)
    fuse_attention(made)
    torch._dynamo.reset()
    recorder = Recorder()
    with blocks_everywhere():
        compiled = torch.compile(made, fullgraph=True, backend=recorder.backend(), dynamic=False)
        assert_same(step(made, inputs, compiled), expected)
    (graph,) = recorder.forwards
    targets = [str(node.target) for node in graph.graph.nodes]
    count = sum("varlen_attention_forward" in target for target in targets)
    assert count == (2 if name == "gpt_oss" else LAYERS[name][kind != "bare"])
    sdpa = "scaled_dot_product" in " ".join(targets)
    assert sdpa is (count < 2)


POSITIONS = {
    "one document": torch.arange(LENGTH).expand(2, -1) + 3,
    "all alone": torch.arange(LENGTH).flip(0).expand(2, -1),
    "gaps": torch.arange(LENGTH).expand(2, -1) + (torch.arange(LENGTH) > 60),
    "one row": torch.arange(LENGTH)[None] % 70,
    "int32": (torch.arange(LENGTH) % 70).expand(2, -1).int(),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.parametrize("kind", POSITIONS)
def test_positions(name: str, kind: str, compiled: bool, calls: list[Any]) -> None:
    """Documents are those that transformers finds; eagerly a single one is causal attention."""
    made, inputs = model(name), batch("bare") | {"position_ids": POSITIONS[kind]}
    expected = step(made, inputs)
    fuse_attention(made)
    torch._dynamo.reset()
    with blocks_everywhere():
        call = torch.compile(made, fullgraph=True, backend="aot_eager") if compiled else made
        assert_same(step(made, inputs, call), expected)
    engine = attention_function.flex_attention if kind == "int32" else attention_function.attend
    if not compiled:
        is_causal = name == "llama" and kind == "one document"
        assert [one.__name__ for one in calls] == [] if is_causal else [engine.__name__] * 2


@pytest.mark.parametrize("starts", [(110, 0), (0, 35)])
def test_chunks_by_positions(starts: tuple[int, int]) -> None:
    """Documents that cross the end of a chunk, in rows that are shorter than one."""
    made = model("llama4")
    inputs = {key: x[:, :30] for key, x in batch("bare").items()}
    inputs["position_ids"] = torch.cat(
        [torch.arange(n) + first for first, n in zip(starts, (20, 10), strict=True)]
    ).expand(2, -1)
    expected = step(made, inputs)
    fuse_attention(made)
    with blocks_everywhere():
        assert_same(step(made, inputs), expected)


def test_another_implementation_that_is_chosen_after_fuse(calls: list[Any]) -> None:
    made, untouched, inputs = model("mistral"), model("mistral"), batch("packed")
    fuse_attention(made)
    for name in ("sdpa", "eager"):
        for one in (made, untouched):
            one.set_attn_implementation(name)
        with blocks_everywhere():
            assert_same(step(made, inputs), step(untouched, inputs))
    assert not calls


def test_lengths_change_without_recompiling() -> None:
    made = model("llama", num_hidden_layers=1)
    lengths = (LENGTH, 233)
    expected = [step(made, batch("right", length)) for length in lengths]
    fuse_attention(made)
    torch._dynamo.reset()
    recorder = Recorder()
    with blocks_everywhere():
        compiled = torch.compile(made, fullgraph=True, backend=recorder.backend(), dynamic=True)
        for length, one in zip(lengths, expected, strict=True):
            assert_same(step(made, batch("right", length), compiled), one)
    assert len(recorder.forwards) == 1


def test_layers_compiled_one_by_one() -> None:
    """A new mask, with a function of its own, does not compile a layer again."""
    made = model("gemma3")
    inputs = [batch("right"), batch("left")]
    expected = [step(made, one) for one in inputs]
    fuse_attention(made)
    torch._dynamo.reset()
    recorder = Recorder()
    for layer in made.model.layers:
        layer.compile(fullgraph=True, backend=recorder.backend())
    with blocks_everywhere():
        for one, result in zip(inputs, expected, strict=True):
            assert_same(step(made, one), result)
    assert len(recorder.forwards) == 2


@pytest.mark.parametrize("length", [1, 2, WINDOW, WINDOW + 1, 129])
@pytest.mark.parametrize("name", ["mistral", "gpt_oss", "llama4"])
def test_lengths(name: str, length: int) -> None:
    """Shorter than a window, as long, and longer; shorter than a block, and longer; one row."""
    made = model(name)
    inputs = {key: x[:1] for key, x in batch("bare", length).items()}
    del inputs["labels"]
    with torch.no_grad():
        expected = made(**inputs).logits
        fuse_attention(made)
        with blocks_everywhere():
            torch.testing.assert_close(made(**inputs).logits, expected, rtol=1e-6, atol=1e-9)


def test_in_autocast() -> None:
    """SDPA casts its arguments to autocast's dtype; varlen_attention does, too."""
    made, inputs = model("llama", torch.float32), batch("left")
    logits = []
    for _ in range(2):
        with torch.no_grad(), blocks_everywhere(), torch.autocast("cpu", dtype=torch.bfloat16):
            logits.append(made(**inputs).logits)
        fuse_attention(made)
    assert logits[0].dtype is logits[1].dtype is torch.bfloat16
    torch.testing.assert_close(logits[1], logits[0], rtol=2**-5, atol=2**-5)


@pytest.mark.parametrize("kind", ["left", "packed"])
@pytest.mark.parametrize("name", ["llama", "gpt_oss", "mistral"])
def test_dropout_takes_the_dense_mask(name: str, kind: str, calls: list[Any]) -> None:
    """Dropout that is turned on after fuse runs in the model's own function."""
    made, inputs = model(name), batch(kind)
    fuse_attention(made)

    def run() -> dict[str, Any]:
        torch.manual_seed(1)
        return step(made, inputs)

    set_dropout(made, 0.5)
    expected = run()
    with blocks_everywhere():
        assert_same(run(), expected)
    assert not calls


def set_dropout(made: nn.Module, p: float) -> None:
    for module in made.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = p
