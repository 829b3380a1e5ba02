"""Causal language models with and without a fused loss, and comparisons of the two."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fused_families import EXPERTS, FAMILIES, VOCABULARY, Family, text
from liger_ops.fusion import loss

LLAMA = FAMILIES[0]
CAUSAL = [
    *[family for family in FAMILIES if family.name not in ("Bert", "ViT", "diffusion", "GptOss")],
    text("GptOss", 5, num_local_experts=4, output_router_logits=True, **EXPERTS),
    text("Gemma2", 9, final_logit_softcapping=2.0),
    text("Granite", 5, logits_scaling=12.0),
    text("Cohere", 5, logit_scale=0.25),
]


def with_fused_loss(model: nn.Module) -> nn.Module:
    """Return a copy of the model in which only the loss is fused."""
    copied = copy.deepcopy(model)
    report = loss.fuse(copied)
    assert [entry.op for entry in report.fused] == ["linear_cross_entropy"]
    assert not report.left
    return copied


def pair(family: Family = LLAMA) -> tuple[nn.Module, nn.Module]:
    model = family.model()
    return model, with_fused_loss(model)


def batch(rows: int = 2, columns: int = 7) -> dict[str, Tensor]:
    """Draw token ids and labels, some of them ignored."""
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(1, VOCABULARY, (rows, columns), generator=generator)
    labels = torch.randint(1, VOCABULARY, (rows, columns), generator=generator)
    labels[0, :3] = -100
    return {"input_ids": ids, "labels": labels}


def gradients(model: nn.Module, value: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    value.sum().backward()
    named = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {
        name: grad.full_tensor() if isinstance(grad, DTensor) else grad
        for name, grad in named.items()
        if grad is not None
    }


def assert_same_gradients(
    actual: dict[str, Tensor], expected: dict[str, Tensor], bound: float = 1e-5
) -> None:
    """Compare norms over tensors, relative, or to a thousandth of the whole model's gradient."""
    assert actual.keys() == expected.keys()
    whole = torch.stack([grad.norm() for grad in expected.values()]).norm()
    assert whole > 0
    for name, grad in expected.items():
        error = (actual[name] - grad).norm() / max(grad.norm(), 1e-3 * whole)
        assert error <= bound, f"{name}: {error:.1e}"


def assert_trains_alike(fused: nn.Module, model: nn.Module, **inputs: Any) -> Any:
    """Check that loss and gradients are equal up to rounding, without logits and warnings."""
    expected = model(**inputs)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="liger_ops")
        actual = fused(**inputs)
    assert actual.logits is None
    assert expected.logits is not None
    assert actual.loss.shape == expected.loss.shape
    assert actual.loss.dtype is expected.loss.dtype
    torch.testing.assert_close(actual.loss, expected.loss, rtol=1e-6, atol=1e-6)
    assert_same_gradients(gradients(fused, actual.loss), gradients(model, expected.loss))
    return actual


def assert_same_output(actual: Any, expected: Any) -> None:
    assert type(actual) is type(expected)
    assert list(actual) == list(expected)
    assert torch.equal(actual.logits, expected.logits)
    if expected.loss is not None:
        assert torch.equal(actual.loss, expected.loss)


def causal_loss(
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: Any = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
) -> Tensor:
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    reduction = "mean" if num_items_in_batch is None else "sum"
    value = F.cross_entropy(
        logits.float().reshape(-1, vocab_size), shift_labels.reshape(-1), ignore_index=ignore_index,
        reduction=reduction,
    )  # fmt: skip
    return value if num_items_in_batch is None else value / num_items_in_batch


class Tiny(nn.Module):
    """A causal language model that is not from transformers."""

    loss_function = staticmethod(causal_loss)

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Embedding(VOCABULARY, 8)
        self.head = nn.Linear(8, VOCABULARY)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any) -> Any:
        hidden = self.body(input_ids)
        # A stub for the body may return an output object instead of a tensor.
        logits = self.logits(hidden if isinstance(hidden, Tensor) else hidden.last_hidden_state)
        if labels is None:
            return {"logits": logits}
        return self.result(self.loss_function(logits, labels, VOCABULARY, **kwargs), logits)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)

    def result(self, value: Tensor, logits: Tensor) -> Any:
        return {"loss": value, "logits": logits}
