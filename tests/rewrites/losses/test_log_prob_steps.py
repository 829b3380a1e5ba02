"""Steps of preference and policy training, written without this package, by the backend liger."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd

import liger_ops
from token_spellings import entropy_from_logits, selective_log_softmax, utils

B, S, D, V = 2, 6, 16, 61


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(V, D)
        self.mix = nn.Linear(D, D)
        self.head = nn.Linear(D, V, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.embed(ids))))


def dpo(model: Model, reference: Model, batch: dict[str, Tensor]) -> Tensor:
    """Chosen and rejected answers in one batch, as TRL's DPO has them."""
    ids, labels = batch["ids"], batch["labels"]

    def of(one: Model) -> Tensor:
        logits = one(ids)[:, :-1]
        targets = labels[:, 1:].clone()
        mask = targets != -100
        targets[~mask] = 0
        per_token = selective_log_softmax(logits, targets)
        per_token[~mask] = 0
        return per_token.sum(-1)

    with torch.no_grad():
        before = of(reference)
    ratio = of(model) - before
    chosen, rejected = ratio.chunk(2)
    return -F.logsigmoid(0.1 * (chosen - rejected)).mean()


def grpo(model: Model, reference: Model, batch: dict[str, Tensor]) -> Tensor:
    """With a bonus for the entropy, whose gradient comes from the same call."""
    ids, mask = batch["ids"], batch["labels"][:, 1:] != -100
    logits = model(ids)[:, :-1] / 0.9
    log_prob, entropy = utils.selective_log_softmax_and_entropy(logits, ids[:, 1:])
    ratio = torch.exp(log_prob - batch["old"])
    clipped = torch.clamp(ratio, 0.8, 1.2)
    advantages = batch["advantages"].unsqueeze(1)
    loss = -torch.min(ratio * advantages, clipped * advantages) - 0.01 * entropy
    return (loss * mask).sum() / mask.sum()


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(V, (B, S), generator=generator)
    labels = ids.masked_fill(torch.arange(S) < torch.tensor([[2], [3]]), -100)
    old = torch.full((B, S - 1), -4.0)
    return {"ids": ids, "labels": labels, "old": old, "advantages": torch.tensor([1.0, -0.5])}


def trained(step: Callable[..., Tensor], compiled: Callable[..., Tensor]) -> list[Tensor]:
    """The losses and the gradients of three steps."""
    model, reference = Model(), Model().requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    seen: list[Tensor] = []
    for _ in range(3):
        loss = compiled(model, reference, batch())
        loss.backward()
        seen += [loss.detach(), *(one.grad.clone() for one in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return seen


def check_steps(step: Callable[..., Tensor], calls: int) -> None:
    graphs: list[fx.Graph] = []

    def inner(module: fx.GraphModule, inputs: Any) -> Any:
        graphs.append(copy.deepcopy(module.graph))

        def keep(part: fx.GraphModule, inputs: Any) -> Any:
            graphs.append(part.graph)
            return part.forward

        return aot_autograd(fw_compiler=keep, bw_compiler=keep)(module, inputs)

    torch._dynamo.reset()
    options = {"inner_backend": inner, "strict": True}
    compiled = torch.compile(step, backend=liger_ops.backend, fullgraph=True, options=options)
    for ours, theirs in zip(trained(step, compiled), trained(step, step), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=1e-6)
    names = [str(node.target) for graph in graphs for node in graph.nodes]
    forward, backward = "liger.linear_log_prob_forward", "liger.linear_log_prob_backward"
    # In Dynamo's graph and in the forward; then in the backward.
    assert sum(name.startswith(forward) for name in names) == 2 * calls
    assert sum(name.startswith(backward) for name in names) == 1
    for graph in graphs:
        for node in graph.nodes:
            made = node.meta.get("val", node.meta.get("example_value"))
            for one in made if isinstance(made, (tuple, list)) else [made]:
                if isinstance(one, Tensor) and V in one.shape:
                    # The head's weight, the embedding, and their gradients.
                    assert one.shape in ((V, D), (D, V)), (node, one.shape)


def test_a_dpo_step():
    check_steps(dpo, calls=2)


def test_a_grpo_step():
    check_steps(grpo, calls=1)


def test_what_is_explained():
    def metric(logits: Tensor) -> Tensor:
        return entropy_from_logits(logits).mean()

    model = Model()
    explanation = liger_ops.explain(lambda ids: metric(model(ids)), batch()["ids"], verify=True)
    assert explanation.counts() == {"linear_log_prob": 1}
    assert explanation.verification is not None and explanation.verification.agrees
    assert "linear_log_prob" in str(explanation)

    def and_logits(ids: Tensor) -> Any:
        logits = model(ids)
        return metric(logits), logits

    explanation = liger_ops.explain(and_logits, batch()["ids"])
    assert explanation.counts() == {"log_prob": 1}
    assert [one.reason for one in explanation.left] == ["the logits are returned"]
