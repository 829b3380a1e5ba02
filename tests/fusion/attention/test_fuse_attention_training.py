"""Fused attention in the loops that train models: FSDP2, adapters, Trainer with its collators."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from attention_models import SIZES, batch, blocks_everywhere, fuse_attention, model, step

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")

KEPT = "attention_mask"


def assert_trains_like(fused: nn.Module, original: nn.Module, inputs: dict[str, Tensor]) -> None:
    """The same loss, logits and gradients, with block masks, also of gathered shards.

    A query that is padding sees no key, for which there is no one answer.
    """
    expected = step(original, inputs)
    with blocks_everywhere():
        found = step(fused, inputs)
    for results in (found, expected):
        results["logits"] = results["logits"][inputs[KEPT] == 1]
    assert found.keys() == expected.keys()
    for name, x in found.items():
        whole = x.full_tensor() if isinstance(x, dist.tensor.DTensor) else x
        torch.testing.assert_close(whole, expected[name], msg=lambda text, name=name: name + text)


def padded() -> dict[str, Tensor]:
    inputs = batch("left")
    return {**inputs, "labels": inputs["labels"].masked_fill(inputs[KEPT] == 0, -100)}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", ["mistral", "gpt_oss"])
def test_sharded(mesh: Any, name: str, when: str) -> None:
    """A layer's sinks are gathered with its other parameters."""
    original, fused = model(name), model(name)
    if when == "before":
        assert fuse_attention(fused).fused
    for part in (*fused.model.layers, fused):
        fully_shard(part, mesh=mesh)
    if when == "after":
        assert fuse_attention(fused).fused
    assert_trains_like(fused, original, padded())


@pytest.mark.parametrize("when", ["before", "after"])
def test_adapters(when: str) -> None:
    peft = pytest.importorskip("peft", reason="the adapters are peft's")
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    original, fused = model("llama"), model("llama")
    if when == "before":
        assert fuse_attention(fused).fused
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        original = peft.get_peft_model(original, config)
        torch.manual_seed(3)
        fused = peft.get_peft_model(fused, config)
    if when == "after":
        assert fuse_attention(fused).fused
    assert_trains_like(fused, original, padded())


class Documents(torch.utils.data.Dataset[dict[str, Any]]):
    """Texts of different lengths, as lists of tokens."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, i: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(i)
        ids = torch.randint(1, SIZES["vocab_size"], (20 + 7 * i,), generator=generator).tolist()
        return {"input_ids": ids, "labels": ids}


def right_padding(texts: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Return a batch as DataCollatorForSeq2Seq makes it: padded tokens, labels and a mask."""
    length = max(len(text["labels"]) for text in texts)
    rows = {"input_ids": 0, "labels": -100, KEPT: 0}
    filled = [{**text, KEPT: [1] * len(text["labels"])} for text in texts]
    return {
        name: torch.tensor([text[name] + [fill] * (length - len(text[name])) for text in filled])
        for name, fill in rows.items()
    }


COLLATORS = {"padding": right_padding, "flattening": transformers.DataCollatorWithFlattening()}


@pytest.mark.parametrize("collator", COLLATORS)
def test_trainer(collator: str, tmp_path: Path) -> None:
    """With accumulation, gradient checkpointing and texts of every length."""
    pytest.importorskip("accelerate", reason="Trainer needs accelerate")
    original = model("llama", torch.float32)
    fused = copy.deepcopy(original)
    assert fuse_attention(fused).fused
    expected = losses(original, COLLATORS[collator], tmp_path / "original")
    with blocks_everywhere():
        found = losses(fused, COLLATORS[collator], tmp_path / "fused")
    assert len(found) == 3
    assert found == pytest.approx(expected, rel=1e-4)


def losses(made: nn.Module, collator: Any, path: Path) -> list[float]:
    arguments = transformers.TrainingArguments(
        output_dir=str(path), use_cpu=True, max_steps=3, per_device_train_batch_size=2,
        gradient_accumulation_steps=2, gradient_checkpointing=True, learning_rate=1e-2,
        logging_steps=1, report_to=[], save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = transformers.Trainer(
        made, arguments, train_dataset=Documents(), data_collator=collator
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
