"""Attention in graphs that the backend compiles for a GPU, where its engines run: small models."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest
import torch
from torch._higher_order_ops.flex_attention import flex_attention

from attention_models import batch, model, step
from liger_ops.rewrites import backend as liger_backend

pytestmark = [
    pytest.mark.device_kernels,
    pytest.mark.skipif(
        os.environ.get("LIGER_OPS_TEST_DEVICE") != "cuda",
        reason="the engines run on CUDA devices; test_masked_attention.py runs on the CPU",
    ),
]

FLEX, VARLEN = "flex_attention", "varlen_attention"
# The model, its batch, the length, the size of heads, and the engine of each of the two layers;
# None is causal attention. 1280 tokens are 10 blocks, and 1300 end within a block.
CASES: list[tuple[str, str, int, int, tuple[str | None, str | None]]] = [
    ("llama", "packed", 1280, 64, (VARLEN, VARLEN)),
    ("llama", "packed", 2048, 128, (VARLEN, VARLEN)),
    ("llama", "right", 1300, 128, (VARLEN, VARLEN)),
    ("llama", "left", 2048, 64, (VARLEN, VARLEN)),
    ("llama", "ones", 1280, 64, (None, None)),
    ("llama-eager", "right", 1300, 128, (FLEX, FLEX)),
    ("llama-eager", "left", 1280, 64, (FLEX, FLEX)),
    ("mistral", "bare", 2048, 128, (VARLEN, VARLEN)),
    ("mistral", "bare", 1280, 256, (VARLEN, VARLEN)),
    ("mistral", "left", 1280, 64, (VARLEN, VARLEN)),
    ("gemma3", "bare", 1300, 256, (VARLEN, None)),
    ("gemma3", "packed", 1280, 128, (VARLEN, VARLEN)),
    ("gemma2", "bare", 1300, 64, (VARLEN, VARLEN)),
    ("gemma2", "bare", 2048, 128, (VARLEN, VARLEN)),
    ("gemma2", "packed", 1280, 256, (VARLEN, VARLEN)),
    ("gemma2", "left", 1280, 64, (FLEX, FLEX)),
    ("gemma2", "right", 1300, 128, (FLEX, FLEX)),
    ("gpt_oss", "bare", 2048, 64, (VARLEN, VARLEN)),
    ("gpt_oss", "right", 1280, 128, (VARLEN, VARLEN)),
    ("gpt_oss", "left", 1300, 64, (VARLEN, VARLEN)),
    # It does not look for documents in position_ids.
    ("gpt_oss", "packed", 1280, 64, (VARLEN, VARLEN)),
]
# Their code says what a query gets that sees no key. With the others it depends on the kernel, so
# that padded tokens have no label.
DEFINED = ("llama-eager", "gemma2", "gpt_oss")
# A sum of a few hundred bfloat16 numbers in another order.
NEAR = 0.01
# A gradient that bfloat16 computes with a larger error would hide a wrong one.
LARGEST_LIMIT = 0.2
# The gradient of a router of two experts is a difference of nearly equal sums, and is left out.
# With these weights the attention of a token is far from the mean, so that its gradients are larger
# than the rounding of the scores.
OPTIONS: dict[str, Any] = {"max_position_embeddings": 4096, "initializer_range": 0.15}


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the calls of each engine in the rewritten graphs."""
    found: Counter[str] = Counter()
    rewrite = liger_backend.rewrite
    varlen = torch.ops.liger.varlen_attention.default

    def recorded(module: Any, *args: Any, **options: Any) -> Any:
        report = rewrite(module, *args, **options)
        targets = [node.target for node in module.graph.nodes]
        found.update({FLEX: targets.count(flex_attention), VARLEN: targets.count(varlen)})
        return report

    monkeypatch.setattr(liger_backend, "rewrite", recorded)
    return found


@pytest.mark.parametrize(
    ("name", "kind", "length", "head_dim", "layers"),
    CASES,
    ids=[f"{name}-{kind}-{length}-{size}" for name, kind, length, size, _ in CASES],
)
def test_as_near_to_truth_as_eager(
    name: str, kind: str, length: int, head_dim: int, layers: Any, engines: Counter[str]
) -> None:
    """The loss and every gradient in bfloat16, against the same weights in float32."""
    compare(name, kind, length, head_dim, "cuda", {"backend": "liger"})
    assert engines == {engine: layers.count(engine) for engine in (FLEX, VARLEN)}


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_other_documents_by_one_compilation(mode: str | None) -> None:
    """Documents are data: two batches in one graph, which may share memory, have their own, and so
    have later calls, also where a part of the graph is recorded."""
    length, counts = 1280, torch._dynamo.utils.counters["stats"]

    def attend(x: torch.Tensor, *batches: torch.Tensor) -> torch.Tensor:
        for positions in batches:
            numbers = (positions.diff(prepend=positions[:, :1] - 1) != 1).cumsum(-1)
            shown = numbers[:, None, :, None] == numbers[:, None, None, :]
            order = torch.arange(length, device=x.device)
            shown = shown & (order <= order[:, None])
            x = torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=shown)
        return x

    def batches(*lengths: int) -> list[torch.Tensor]:
        rows = [
            torch.cat([torch.arange(n) for n in (size, 1, length - size - 1)]) for size in lengths
        ]
        return [row.expand(2, -1).contiguous().cuda() for row in rows]

    torch._dynamo.reset()
    compiled = torch.compile(attend, backend="liger", fullgraph=True, mode=mode)
    x = torch.randn(2, 4, length, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    before = counts["unique_graphs"]
    for lengths in ((400, 3), (7, 1000), (640, 640), (1, 1200), (900, 20)):
        torch.compiler.cudagraph_mark_step_begin()
        documents = batches(*lengths)
        found, expected = compiled(x, *documents), attend(x, *documents)
        gradients = [torch.autograd.grad(y.float().square().sum(), x)[0] for y in (found, expected)]
        assert relative(found, expected) < NEAR
        assert relative(*gradients) < NEAR
    assert counts["unique_graphs"] - before == 1


def compare(
    name: str, kind: str, length: int, head_dim: int, device: str, options: dict[str, Any]
) -> None:
    inputs = batch(kind, length, device)
    if "attention_mask" in inputs and name not in DEFINED:
        inputs["labels"] = inputs["labels"].masked_fill(inputs["attention_mask"] == 0, -100)
    made = model(name, torch.bfloat16, head_dim=head_dim, **OPTIONS).to(device)
    truth = step(made.float(), inputs)
    made.bfloat16()
    before = step(made, inputs)
    torch._dynamo.reset()
    found = step(made, inputs, torch.compile(made, **options))
    for key in truth:
        if key != "logits" and "router" not in key:
            error, limit = (relative(one[key], truth[key]) for one in (found, before))
            assert limit <= LARGEST_LIMIT, key
            assert error <= 2 * limit + NEAR, key


def relative(x: torch.Tensor, truth: torch.Tensor) -> float:
    return ((x.float() - truth.float()).norm() / truth.float().norm().clamp(min=1e-9)).item()
