"""A sequence has the same logits and gradients alone, in a batch, padded, packed and cut, within
`liger_ops.invariant`; and its report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import liger_ops
from op_under_test import DEVICE

LENGTH, PADDING, V = 70, 23, 101
SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": V, "use_cache": False,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3": {},
    "Llama": {},
    "Gemma3Text": {"sliding_window": 8},
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}
# transformers does not read documents in the position_ids of this model.
WITHOUT_DOCUMENTS = {"GptOss"}


def model_of(family: str) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES | FAMILIES[family])
    return transformers.AutoModelForCausalLM.from_config(config).eval().to(DEVICE)


Batches = dict[str, tuple[dict[str, Tensor], int, int]]


def batches_of(sequence: Tensor) -> Batches:
    """Return batches that hold the sequence: the arguments, and its row and first token there."""
    generator = torch.Generator().manual_seed(1)

    def others(*shape: int) -> Tensor:
        return torch.randint(1, V, shape, generator=generator).to(DEVICE)

    pad = torch.zeros(1, PADDING, dtype=torch.int64, device=DEVICE)
    mask = torch.ones(2, LENGTH + PADDING, dtype=torch.int64, device=DEVICE)
    mask[0, LENGTH:] = 0
    left = torch.stack((mask[0].flip(0), mask[1]))
    long = others(1, LENGTH + PADDING)
    documents = [others(1, 13), sequence, others(1, 20)]
    positions = [torch.arange(x.shape[1], device=DEVICE) for x in documents]
    return {
        "among others": ({"input_ids": torch.cat((others(2, LENGTH), sequence))}, 2, 0),
        "padded on the right": (
            {
                "input_ids": torch.cat((torch.cat((sequence, pad), 1), long)),
                "attention_mask": mask,
            },
            0, 0,
        ),
        "padded on the left": (
            {
                "input_ids": torch.cat((torch.cat((pad, sequence), 1), long)),
                "attention_mask": left,
                "position_ids": (left.cumsum(1) - 1).clamp(min=0),
            },
            0, PADDING,
        ),
        "packed": (
            {"input_ids": torch.cat(documents, 1), "position_ids": torch.cat(positions)[None]},
            0, 13,
        ),
    }  # fmt: skip


def results(model: Any, batch: dict[str, Tensor], row: int, first: int) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities of a sequence, and the gradient of its embeddings."""
    given = dict(batch)
    tokens = given.pop("input_ids")
    embedded = model.get_input_embeddings()(tokens).detach().requires_grad_()
    span = slice(first, first + LENGTH)
    logits = model(inputs_embeds=embedded, **given).logits[row, span]
    log_prob = liger_ops.log_prob(logits[:-1], tokens[row, span][1:])[0]
    (gradient,) = torch.autograd.grad(log_prob.sum(), embedded)
    return log_prob.detach(), gradient[row, span]


def fused(model: Any) -> Any:
    liger_ops.fuse(model)
    return model


def compiled(model: Any) -> Any:
    torch.compiler.reset()
    # Of its forward, because get_input_embeddings is called of the model.
    model.forward = torch.compile(model.forward, backend="liger")
    return model


# Its graphs have windows, sinks and experts; each takes seconds to compile.
COMPILED = ("GptOss",) if DEVICE == "cpu" else tuple(FAMILIES)
DOORS = [(family, fused) for family in FAMILIES] + [(family, compiled) for family in COMPILED]


@pytest.mark.device_kernels
@pytest.mark.parametrize("family, door", DOORS)
def test_a_sequence_has_the_same_bits_in_every_batch(
    family: str, door: Callable[[Any], Any]
) -> None:
    model = model_of(family)
    sequence = torch.randint(1, V, (1, LENGTH), device=DEVICE)
    alone = {"input_ids": sequence}
    reference = results(model, alone, 0, 0)
    model = door(model)
    with liger_ops.invariant():
        expected = results(model, alone, 0, 0)
        for name, (batch, row, first) in batches_of(sequence).items():
            if name == "packed" and family in WITHOUT_DOCUMENTS:
                continue
            for found, of_sequence in zip(results(model, batch, row, first), expected, strict=True):
                assert torch.equal(found, of_sequence), name
        prefix = model(input_ids=sequence[:, :17]).logits
        assert torch.equal(prefix, model(input_ids=sequence).logits[:, :17])
    for found, of_sequence in zip(expected, reference, strict=True):
        torch.testing.assert_close(found, of_sequence, atol=2e-5, rtol=1e-4)


@pytest.mark.device_kernels
@pytest.mark.parametrize("family", FAMILIES)
def test_a_token_after_a_cache_has_the_bits_of_the_whole_sequence(family: str) -> None:
    model = model_of(family)
    model.generation_config.update(pad_token_id=0, eos_token_id=None)
    model = fused(model)
    tokens = torch.randint(1, V, (2, 11), device=DEVICE)
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    options: dict[str, Any] = {"do_sample": True, "max_new_tokens": 7, "use_cache": True}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    with liger_ops.invariant(), torch.no_grad():
        sampled = model.generate(tokens, attention_mask=mask, **options)
        logits = torch.stack(sampled.logits, 1)
        for row, first in ((0, 4), (1, 0)):
            whole = model(input_ids=sampled.sequences[row : row + 1, first:]).logits
            assert torch.equal(whole[0, -8:-1], logits[row])


@pytest.mark.parametrize("family", ["Qwen3", "GptOss"])
def test_a_static_cache_is_refused(family: str) -> None:
    model = fused(model_of(family))
    tokens = torch.randint(1, V, (2, 11), device=DEVICE)
    refused = pytest.raises(liger_ops.invariance.NotInvariantError, match="attention")
    with liger_ops.invariant(), torch.no_grad(), refused:
        model.generate(tokens, max_new_tokens=3, cache_implementation="static", use_cache=True)


HIDDEN: dict[str, dict[str, Any]] = {
    "a cache": {"use_cache": True},
    "a mask": {"attention_mask": torch.ones(1, 9, dtype=torch.int64, device=DEVICE)},
}


@pytest.mark.parametrize("name", HIDDEN)
def test_packed_documents_that_the_model_does_not_separate_are_refused(name: str) -> None:
    model = fused(model_of("Qwen3"))
    tokens = torch.randint(1, V, (1, 9), device=DEVICE)
    positions = torch.cat((torch.arange(4), torch.arange(5)))[None].to(DEVICE)
    refused = pytest.raises(liger_ops.invariance.NotInvariantError, match="packed documents")
    with torch.no_grad(), liger_ops.invariant():
        with refused:
            model(input_ids=tokens, position_ids=positions, **HIDDEN[name])
        # The positions of padding are not those of documents.
        mask = torch.cat((torch.zeros(1, 4), torch.ones(1, 5)), 1).to(DEVICE)
        model(input_ids=tokens, position_ids=positions, attention_mask=mask, use_cache=True)


def test_the_report_names_the_modules_that_are_not_covered() -> None:
    model = model_of("GptOss")
    report = liger_ops.invariant(model)
    assert not report
    assert set(report.reasons) == {"model.layers.0.self_attn", "model.layers.1.self_attn"}
    assert "it sums as many numbers as there are tokens: a matrix product" in str(report)
    liger_ops.fuse(model)
    report = liger_ops.invariant(model)
    assert report and str(report) == "every module is covered"


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Conv1d(8, 8, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner[1](self.inner[0](x).mT)


def test_the_report_of_what_is_refused() -> None:
    model = Convolved().train()
    report = liger_ops.invariant(model, inputs=lambda length: {"x": torch.randn(1, length, 8)})
    assert report.reasons == {"inner.1": "aten.convolution.default is not covered"}
    assert model.training


WRONG: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "no module": (lambda: liger_ops.invariant(3), TypeError, "model must be a torch.nn.Module"),
    "no vocabulary": (lambda: liger_ops.invariant(Convolved()), ValueError, "needs inputs"),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors(name: str) -> None:
    call, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        call()
