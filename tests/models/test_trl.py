"""TRL's SFTTrainer trains a fused model like the original, and its trainers with the ops behind
them like without."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from fused_families import VOCABULARY, text
from liger_ops.fusion import fuse
from liger_ops.integrations import trl as integration
from liger_ops.integrations.trl_reference import fused_parts

trl = pytest.importorskip("trl", reason="the trainer is TRL's")
datasets = pytest.importorskip("datasets", reason="TRL's trainer takes its datasets")

COLUMNS = ("loss", "grad_norm", "entropy", "mean_token_accuracy")


def tokenizer() -> Any:
    tokenizers = pytest.importorskip("tokenizers")
    words = {f"word{i}": i for i in range(VOCABULARY)}
    split = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="word0"))
    split.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=split, pad_token="word0", eos_token="word1"
    )


def options_of(path: Path, steps: int) -> dict[str, Any]:
    """Options of every trainer."""
    return {
        "output_dir": str(path),
        "use_cpu": True,
        "bf16": False,
        "max_steps": steps,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
    }


def train(model: Any, path: Path, **options: Any) -> list[float]:
    """The loss logged in each step, and the loss of an evaluation."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(2, VOCABULARY, (n,), generator=generator) for n in (5, 9, 7, 12)]
    dataset = datasets.Dataset.from_list([{"input_ids": row.tolist()} for row in rows])
    arguments = trl.SFTConfig(**options_of(path, 2), **options)
    trainer = trl.SFTTrainer(
        model, arguments, train_dataset=dataset, eval_dataset=dataset, processing_class=tokenizer()
    )
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(steps) == 2
    logged = [step[column] for step in steps for column in COLUMNS]
    return [*logged, trainer.evaluate()["eval_loss"]]


@pytest.mark.parametrize(
    "options",
    [{}, {"packing": True, "max_length": 16}, {"label_smoothing_factor": 0.1}],
    ids=["padded", "packed", "smoothed"],
)
def test_steps_are_those_of_the_model(options: dict[str, Any], tmp_path: Path) -> None:
    model = text("Llama", 3, num_hidden_layers=1).model()
    fused = copy.deepcopy(model)
    assert "loss" in {entry.kind for entry in fuse(fused).fused}
    expected = train(model, tmp_path / "model", **options)
    assert train(fused, tmp_path / "fused", **options) == pytest.approx(expected, rel=1e-4)


def pairs() -> Any:
    generator = torch.Generator().manual_seed(0)

    def words(n: int) -> str:
        ids = torch.randint(2, VOCABULARY, (n,), generator=generator)
        return " ".join(f"word{i}" for i in ids.tolist())

    names = ("prompt", "chosen", "rejected")
    rows = [dict(zip(names, map(words, (3, n, 9 - n)), strict=True)) for n in (4, 6, 3, 5)]
    return datasets.Dataset.from_list(rows)


def train_pairs(model: Any, path: Path) -> list[float]:
    """Return DPOTrainer's logs of each step, without times, with every result of the head."""
    trainer = trl.DPOTrainer(
        model,
        ref_model=copy.deepcopy(model),
        args=trl.DPOConfig(**options_of(path, 3), use_weighting=True),
        train_dataset=pairs(),
        processing_class=tokenizer(),
    )
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(steps) == 3
    parts = ("loss", "grad_norm", "entropy", "mean_token_accuracy", "logits/", "logps/", "rewards/")
    return [step[name] for step in steps for name in step if name.startswith(parts)]


def train_distilled(model: Any, path: Path, steps: int = 2) -> list[float]:
    """Return DistillationTrainer's logs of each step, without times. The student samples the
    completions, and the teacher has another hidden size."""
    teacher = text("Qwen2", 4, num_hidden_layers=1, hidden_size=48).model()
    rows = [{"prompt": f"word{i} word{i + 1}"} for i in range(2, 10)]
    trainer = trl.DistillationTrainer(
        model,
        teacher,
        args=trl.DistillationConfig(
            **options_of(path, steps), max_completion_length=6, beta=0.5, temperature=0.9
        ),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer(),
    )
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logged) == steps
    return [entry[name] for entry in logged for name in ("loss", "grad_norm", "entropy")]


@pytest.mark.parametrize(
    "train, op",
    [
        (train, "linear_log_prob_forward"),
        (train_pairs, "linear_log_prob_forward"),
        (train_distilled, "linear_divergence_forward"),
    ],
)
def test_steps_with_the_ops_behind_the_trainer(
    train: Callable[[Any, Path], list[float]], op: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The losses and their metrics come from the op."""
    model = text("Llama", 3, num_hidden_layers=1).model()
    other = copy.deepcopy(model)
    expected = train(model, tmp_path / "trl")
    calls = []
    ours = getattr(integration, op)

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(args)
        return ours(*args, **options)

    monkeypatch.setattr(integration, op, counted)
    integration.install()
    try:
        found = train(other, tmp_path / "liger")
    finally:
        integration.uninstall()
    assert len(calls) >= 2
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("is_given", [False, True])
def test_the_reference_begins_as_the_fused_policy(is_given: bool, tmp_path: Path) -> None:
    """DPO's loss is log 2 before the first step; a reference of the user's own gets a warning."""
    path = tmp_path / "saved"
    text("Llama", 3, num_hidden_layers=2).model().to(torch.bfloat16).save_pretrained(path)
    policy, reference = (
        transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
        for _ in range(2)
    )
    fuse(policy, norms=False)
    integration.install()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer = trl.DPOTrainer(
                policy,
                ref_model=reference if is_given else None,
                args=trl.DPOConfig(**options_of(tmp_path, 1)),
                train_dataset=pairs(),
                processing_class=tokenizer(),
            )
    finally:
        integration.uninstall()
    warned = [str(one.message) for one in caught if "ref_model is not fused" in str(one.message)]
    assert len(warned) == is_given
    if is_given:
        return
    assert fused_parts(trainer.ref_model) == fused_parts(policy)
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
