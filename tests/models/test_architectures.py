"""`torch.compile(backend="liger")` on untouched transformers models."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import liger_ops
from architectures import ARCHITECTURES, BY_NAME, NEW, TOKENS, Architecture, text_batch
from architectures_report import DOCUMENT, document
from compiled_models import (
    Loss,
    aot_eager,
    as_it_is,
    assert_as_near_to_truth,
    compiled,
    loss_of,
    results,
    roundings,
    true_results,
)

ARCHITECTURE = pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda entry: entry.name)


@cache
def true_of(name: str) -> dict[str, Tensor]:
    architecture = BY_NAME[name]
    model = architecture.make(torch.float64)
    return true_results(model, loss_of(model), architecture.batch(torch.float64))


def rewritten(
    model: nn.Module,
    batches: list[dict[str, Any]],
    true: list[dict[str, Tensor]],
    loss: Loss | None = None,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> list[Counter[str]]:
    """Check that results do not change, and return the ops in each graph of `model`.

    `dtype` is the dtype of its arithmetic, if its parameters have another.
    """
    loss = loss_of(model) if loss is None else loss
    before = [results(model, loss, batch) for batch in batches]
    fused, inner = compiled(loss, "liger", **options)
    after = [results(model, fused, batch) for batch in batches]
    for run in zip(after, before, true, strict=True):
        assert_as_near_to_truth(*run, roundings(dtype or next(model.parameters()).dtype))
    return [Counter(graph) - own for graph, own in zip(inner.counts, inner.before, strict=True)]


def rewritten_variant(
    name: str,
    changes: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
    prepare: Callable[[nn.Module], None] = lambda model: None,
) -> Counter[str]:
    """The same for one batch of one architecture, with `changes` to the batch."""
    architecture = BY_NAME[name]
    batch = {**text_batch(), **(changes or {})}
    model, wide = architecture.make(dtype), architecture.make(torch.float64)
    prepare(model)
    true = true_results(wide, loss_of(wide), batch)
    return rewritten(model, [batch], [true])[0]


def found(name: str, **changes: int) -> dict[str, int]:
    """The places found in the architecture, with `changes`."""
    counts = {**BY_NAME[name].found, **changes}
    return {op: count for op, count in counts.items() if count}


@ARCHITECTURE
def test_rewritten_as_near_to_truth(architecture: Architecture) -> None:
    """Compare the loss and every gradient, and the ops in the graph with the table.

    This is in bfloat16, whose graphs have casts that float32 graphs do not have. In float32,
    test_explained counts the ops, and test_trained_models compares values.
    """
    model, batch = architecture.make(torch.bfloat16), architecture.batch(torch.bfloat16)
    # The graphs of these have every op.
    run = aot_eager if architecture in explained() else as_it_is
    (counts,) = rewritten(model, [batch], [true_of(architecture.name)], run=run)
    assert counts == architecture.found


@cache
def explained() -> list[Architecture]:
    """Architectures that together have every op, found and missed."""
    chosen, seen = [], set()
    for architecture in ARCHITECTURES:
        kinds = {(op, op in architecture.missed) for op, n in architecture.to_find.items() if n}
        if kinds - seen:
            chosen.append(architecture)
            seen |= kinds
    return chosen


@pytest.mark.parametrize("architecture", explained(), ids=lambda entry: entry.name)
def test_explained(architecture: Architecture) -> None:
    """`explain` counts the ops in the graph, and gives a reason and a line for other places."""
    model = architecture.make()
    explanation = liger_ops.explain(loss_of(model), **architecture.batch(torch.float32))
    assert explanation.counts() == architecture.found
    assert not explanation.graph_breaks
    for finding in explanation.findings:
        assert re.fullmatch(r"\w+\.py:\d+, \w+: .+", finding.where), finding
        assert finding.reason is None or finding.reason.strip(), finding


def test_table_is_consistent() -> None:
    for architecture in ARCHITECTURES:
        for op, missed in architecture.missed.items():
            assert 0 <= missed.found < architecture.to_find[op], (architecture.name, op)
            assert missed.reason


@pytest.mark.skipif(not NEW, reason="the document is of a newer transformers")
def test_document_is_of_this_table() -> None:
    assert DOCUMENT.read_text() == document(), (
        f"{DOCUMENT} is not of this table: python tests/support/architectures_report.py"
    )


# Variants.


@pytest.mark.parametrize(
    ("name", "dynamic"), [("Llama", None), ("Gemma2", True)], ids=["automatic", "dynamic"]
)
def test_dynamic_shapes(name: str, dynamic: bool | None) -> None:
    """Three lengths compile at most twice."""
    architecture = BY_NAME[name]
    batches = [text_batch(shape) for shape in ((2, 16), (2, 24), (2, 11))]
    wide = architecture.make(torch.float64)
    true = [true_results(wide, loss_of(wide), batch) for batch in batches]
    run = as_it_is if dynamic else aot_eager
    graphs = rewritten(architecture.make(), batches, true, run=run, dynamic=dynamic)
    assert len(graphs) <= 2
    assert all(counts == architecture.found for counts in graphs)


@pytest.mark.parametrize("name", ["Llama", "Gemma", "GPTNeoX"])
def test_autocast(name: str) -> None:
    """bfloat16 queries with float32 tables give float32 here: the op gets float32 queries."""
    architecture = BY_NAME[name]
    model, wide = architecture.make(), architecture.make(torch.float64)

    def loss(**batch: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(**batch).loss

    true = true_results(wide, loss_of(wide), text_batch())
    (counts,) = rewritten(model, [text_batch()], [true], loss, torch.bfloat16)
    assert counts == found(name)


@pytest.mark.parametrize("name", ["Llama", "Gemma2", "GPTNeoX"])
def test_gradient_checkpointing(name: str) -> None:
    """Each layer has its own graph, without the norm that follows its last residual sum."""

    def prepare(model: nn.Module) -> None:
        model.gradient_checkpointing_enable({"use_reentrant": False})

    expected = Counter(found(name))
    if "fused_add_rms_norm" in expected:
        expected.update(fused_add_rms_norm=-2, rms_norm=2)
    assert rewritten_variant(name, prepare=prepare) == expected


@pytest.mark.parametrize("name", ["Llama", "Granite"])
@pytest.mark.parametrize("items", [17, torch.tensor(17)], ids=["int", "tensor"])
def test_num_items_in_batch(name: str, items: int | Tensor) -> None:
    assert rewritten_variant(name, {"num_items_in_batch": items}) == found(name)


def test_ignored_labels() -> None:
    labels = text_batch()["labels"]
    labels[0, :9] = -100
    assert rewritten_variant("Llama", {"labels": labels}) == found("Llama")


@pytest.mark.parametrize("name", ["Llama", "Gemma3"])
def test_padding(name: str) -> None:
    """The mask is data, so attention keeps it."""
    mask = torch.ones(TOKENS, dtype=torch.long)
    mask[1, 11:] = 0
    assert rewritten_variant(name, {"attention_mask": mask}) == found(
        name, causal_attention=0, grouped_attention=0
    )


@pytest.mark.parametrize("name", ["Llama", "Gemma3"])
def test_packed_sequences(name: str) -> None:
    """Positions that may restart separate the sequences, so attention keeps its mask."""
    positions = torch.cat([torch.arange(9), torch.arange(7)]).expand(TOKENS)
    assert rewritten_variant(name, {"position_ids": positions}) == found(
        name, causal_attention=0, grouped_attention=0
    )


def test_tied_weights() -> None:
    """The head's weight is the embedding's, and gets the gradient of both."""
    model = BY_NAME["Gemma"].make()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert rewritten_variant("Gemma") == found("Gemma")


def test_untied_weights() -> None:
    model = BY_NAME["Llama"].make()
    assert model.lm_head.weight is not model.model.embed_tokens.weight


# How often attention is found, and its causal masks and repeated heads after that. The masks of
# T5's decoder are added to its biases. Gemma 2 and GPT-OSS are among the architectures above.
EAGER = {"Llama": (2, 2, 2), "T5": (6, 0, 0)}


@pytest.mark.parametrize("name", EAGER)
def test_eager_attention(name: str) -> None:
    """Attention that the model's own code computes."""
    architecture = BY_NAME[name]
    model, wide = architecture.make(), architecture.make(torch.float64)
    for one in (model, wide):
        one.set_attn_implementation("eager")
    batch = architecture.batch(torch.float32)
    (counts,) = rewritten(model, [batch], [true_results(wide, loss_of(wide), batch)])
    ops = ("attention", "causal_attention", "grouped_attention")
    assert tuple(counts[op] for op in ops) == EAGER[name]
    assert counts == found(name, **dict(zip(ops, EAGER[name], strict=True)))


@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
def test_without_labels(name: str) -> None:
    """Without a loss the logits are the result, and their gradient comes from outside."""
    architecture = BY_NAME[name]
    batch = text_batch()
    del batch["labels"]

    def loss_by(logits_of: Loss) -> Loss:
        return lambda **batch: logits_of(**batch).square().mean()

    def logits_of(model: nn.Module) -> Loss:
        return lambda **batch: model(**batch).logits

    wide = architecture.make(torch.float64)
    true = true_results(wide, loss_by(logits_of(wide)), batch)
    model = architecture.make()
    runs = {}
    for backend in ("none", "liger"):
        function, inner = compiled(logits_of(model), backend)
        runs[backend] = results(model, loss_by(function), batch)
    assert_as_near_to_truth(runs["liger"], runs["none"], true, roundings(torch.float32))
    assert inner.counts == [found(name, linear_cross_entropy=0)]


@pytest.mark.parametrize("name", ["Llama", "Gemma2", "Granite"])
def test_returned_logits_are_kept(name: str) -> None:
    """The compiled model returns its logits, so they are computed, and the loss uses them."""
    architecture = BY_NAME[name]
    wide, model = architecture.make(torch.float64), architecture.make()
    batch = text_batch()
    true = true_results(wide, loss_of(wide), batch)
    logits, runs = {}, {}

    def step(output_of: Any, backend: str) -> Loss:
        def loss(**batch: Tensor) -> Tensor:
            output = output_of(**batch)
            logits[backend] = output.logits.detach()
            return output.loss

        return loss

    for backend in ("none", "liger"):
        function, inner = compiled(model, backend)
        runs[backend] = results(model, step(function, backend), batch)
    assert_as_near_to_truth(runs["liger"], runs["none"], true, roundings(torch.float32))
    torch.testing.assert_close(logits["liger"], logits["none"])
    assert inner.counts == [found(name, linear_cross_entropy=0, cross_entropy=1)]


def test_logits_used_beside_the_loss() -> None:
    """A second loss uses the logits in the same function, so they are computed once."""
    architecture = BY_NAME["Llama"]
    model, wide = architecture.make(), architecture.make(torch.float64)

    def loss_of_both(model: nn.Module) -> Loss:
        def loss(**batch: Tensor) -> Tensor:
            output = model(**batch)
            return output.loss + 1e-3 * output.logits.float().square().mean()

        return loss

    true = true_results(wide, loss_of_both(wide), text_batch())
    (counts,) = rewritten(model, [text_batch()], [true], loss_of_both(model))
    assert counts == found("Llama", linear_cross_entropy=0, cross_entropy=1)


def test_inference() -> None:
    """Evaluation mode without gradients."""
    model = BY_NAME["Llama"].make().eval()
    batch = text_batch()
    losses = []
    for backend in ("none", "liger"):
        function, inner = compiled(loss_of(model), backend)
        with torch.no_grad():
            losses.append(function(**batch))
    torch.testing.assert_close(losses[1], losses[0])
    assert inner.counts == [found("Llama")]


def test_several_steps() -> None:
    """Weights change between calls of a compiled step; losses equal the untouched model's."""
    losses = []
    for backend in ("none", "liger"):
        model = BY_NAME["Llama"].make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step, inner = compiled(loss_of(model), backend)
        run = []
        for _ in range(4):
            optimizer.zero_grad()
            loss = step(**text_batch())
            loss.backward()
            optimizer.step()
            run.append(loss.detach())
        losses.append(torch.stack(run))
    assert len(inner.counts) == 1
    torch.testing.assert_close(losses[1], losses[0])
    assert losses[0][-1] < losses[0][0]


def test_inductor() -> None:
    """All rewrites before Inductor, including those that are off by default, in one layer."""
    model, wide = (BY_NAME["Llama"].make(dtype) for dtype in (torch.float32, torch.float64))
    for one in (model, wide):
        one.model.layers = one.model.layers[:1]
    batch = text_batch()
    true = true_results(wide, loss_of(wide), batch)
    before = results(model, loss_of(model), batch)
    torch._dynamo.reset()
    function = torch.compile(
        loss_of(model), backend=liger_ops.backend, options={"rewrites": "all"}, fullgraph=True
    )
    after = results(model, function, batch)
    assert_as_near_to_truth(after, before, true, roundings(torch.float32))
