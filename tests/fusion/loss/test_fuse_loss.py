"""The fused loss of every family of models: trained, evaluated, compiled, unfused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import liger_ops.lowering.npu  # noqa: F401
from causal_models import (
    CAUSAL,
    assert_same_gradients,
    assert_same_output,
    assert_trains_alike,
    batch,
    gradients,
    pair,
)
from fused_families import VOCABULARY, Family, text
from graphs import Recorder, liger_ops_of
from liger_ops.fusion import fuse, loss

OPTIONS = {
    "Gemma2": {"logit_scale": 1.0, "softcap": 2.0},
    "Granite": {"logit_scale": pytest.approx(1 / 12), "softcap": None},
    "Cohere": {"logit_scale": 0.25, "softcap": None},
}
FAMILY = pytest.mark.parametrize("family", CAUSAL, ids=lambda family: family.name)


@FAMILY
def test_trains_as_before(family: Family) -> None:
    model = family.model()
    fused = copy.deepcopy(model)
    report = fuse(fused)
    (entry,) = [entry for entry in report.fused if entry.kind == "loss"]
    assert (entry.where, entry.class_name) == ("", type(model).__name__)
    assert entry.op == "linear_cross_entropy"
    assert entry.options == OPTIONS.get(family.name, {"logit_scale": 1.0, "softcap": None})
    assert "1 x linear_cross_entropy(" in str(report)
    output = assert_trains_alike(fused, model, **batch())
    assert ("aux_loss" in output) == (family.name == "GptOss")


@FAMILY
def test_evaluation_is_as_before(family: Family) -> None:
    """Evaluation is bitwise equal, and so is training without labels."""
    model, fused = pair(family)
    inputs = batch()
    ids = {"input_ids": inputs["input_ids"]}
    assert_same_output(fused(**ids), model(**ids))
    model.eval(), fused.eval()
    assert_same_output(fused(**ids), model(**ids))
    assert_same_output(fused(**inputs), model(**inputs))


def test_compiles_whole() -> None:
    """One graph for every batch size, with the op's parts in it and without logits. Models with a
    cap and other code between are compiled in test_fuse_loss_between.py."""
    model, fused = pair(text("Llama", 3, num_hidden_layers=1))
    torch._dynamo.reset()
    recorder = Recorder()
    compiled = torch.compile(fused, fullgraph=True, dynamic=True, backend=recorder.backend())
    for inputs in (batch(), batch(3, 11)):
        expected = model(**inputs)
        actual = compiled(**inputs)
        assert actual.logits is None
        torch.testing.assert_close(actual.loss, expected.loss, rtol=1e-6, atol=1e-6)
        assert_same_gradients(
            gradients(fused, actual.loss), gradients(model, expected.loss), bound=1e-4
        )
    assert len(recorder.forwards) == len(recorder.backwards) == 1
    assert liger_ops_of(recorder.forwards) == {"linear_cross_entropy_forward": 1}
    for graph in recorder.forwards + recorder.backwards:
        for node in graph.graph.nodes:
            value = node.meta.get("val")
            if isinstance(value, Tensor) and VOCABULARY in value.shape:
                # Only weights of the head and the embedding, and their gradients, have this size.
                assert sorted(value.shape) == [32, VOCABULARY], f"{node}: {tuple(value.shape)}"


def test_dynamo_sees_one_op() -> None:
    _, fused = pair(text("Llama", 3, num_hidden_layers=1))
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(fused, fullgraph=True, backend=keep)
    assert compiled(**batch(), skip_logits=True).logits is None
    assert liger_ops_of(graphs) == {"linear_cross_entropy": 1}
    assert compiled(**batch(), skip_logits=False).logits is not None
    assert liger_ops_of(graphs[1:]) == {}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Llama", {"vocab_size": 128256}),
        ("Cohere", {"vocab_size": 256000}),
        ("Gemma2", {"vocab_size": 262144, "final_logit_softcapping": 30.0}),
    ],
)
def test_large_vocabularies(name: str, options: dict[str, Any]) -> None:
    """The loss is found although its sums round. Only the probe's stand-in allocates memory."""
    with torch.device("meta"):
        model = text(name, 5, **options).build()
    report = loss.fuse(model)
    assert not report.left
    assert report.fused[0].options["softcap"] == options.get("final_logit_softcapping")
