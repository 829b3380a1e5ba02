"""A `transformers.Trainer` trains a fused model like the original."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
import transformers
from torch import Tensor, nn

import liger_ops
from backends import needs_compiler, without_caches
from fused_families import FAMILIES, VOCABULARY, text
from liger_ops.fusion import fuse
from liger_ops.rewrites import enable as pass_module

pytest.importorskip("accelerate", reason="Trainer needs accelerate")

STEPS = 3


class Sentences(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Sentences with different numbers of labels: a batch's mean is not its parts' mean."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(4)
        self.ids = torch.randint(1, VOCABULARY, (4 * STEPS, 9), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        labels = self.ids[i].clone()
        labels[: i % 7] = -100
        return {"input_ids": self.ids[i], "labels": labels}


def train(model: nn.Module, path: Path, **options: Any) -> tuple[list[float], dict[str, float]]:
    """The loss of each step, and the results of an evaluation after the last."""
    arguments = transformers.TrainingArguments(
        output_dir=str(path),
        use_cpu=True,
        max_steps=STEPS,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        **options,
    )
    accuracies: list[tuple[int, ...]] = []

    def shapes(prediction: Any) -> dict[str, float]:
        accuracies.append(prediction.predictions.shape)
        return {}

    trainer = transformers.Trainer(
        model,
        arguments,
        train_dataset=Sentences(),
        eval_dataset=Sentences(),
        compute_metrics=shapes,
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    evaluation = trainer.evaluate()
    # Evaluation computes logits, as before.
    assert accuracies == [(4 * STEPS, 9, VOCABULARY)]
    return losses, {"eval_loss": evaluation["eval_loss"]}


AOT_EAGER = {"torch_compile": True, "torch_compile_backend": "aot_eager"}


@pytest.mark.parametrize(
    "options", [{}, {"bf16": True}, {"gradient_checkpointing": True}], ids=lambda o: "".join(o)
)
def test_losses_are_those_of_the_model(options: dict[str, Any], tmp_path: Path) -> None:
    model = FAMILIES[0].model()
    fused = copy.deepcopy(model)
    assert "loss" in {entry.kind for entry in fuse(fused).fused}
    logits = []
    fused.register_forward_hook(lambda module, args, output: logits.append(output.logits))
    losses, evaluation = train(model, tmp_path / "model", **options)
    fused_losses, fused_evaluation = train(fused, tmp_path / "fused", **options)
    assert len(losses) == STEPS
    assert logits[: 2 * STEPS] == [None] * 2 * STEPS
    bound = 1e-2 if "bf16" in options else 1e-4
    assert fused_losses == pytest.approx(losses, rel=bound)
    assert fused_evaluation == pytest.approx(evaluation, rel=bound)


@pytest.mark.parametrize(
    "options",
    [AOT_EAGER, {**AOT_EAGER, "bf16": True, "gradient_checkpointing": True}],
    ids=["float32", "bfloat16 and checkpointed"],
)
def test_compiled_by_trainer(options: dict[str, Any], tmp_path: Path) -> None:
    """A fused model compiled by Trainer's own option: same steps, without logits."""
    fused = text("Llama", 3, num_hidden_layers=1).model()
    model = copy.deepcopy(fused)
    fuse(fused)
    seen: list[Any] = []
    fused.register_forward_hook(lambda module, args, output: seen.append(output.logits))
    plain = {name: value for name, value in options.items() if not name.startswith("torch_compile")}
    losses, evaluation = train(model, tmp_path / "model", **plain)
    torch._dynamo.reset()
    fused_losses, fused_evaluation = train(fused, tmp_path / "fused", **options)
    assert seen and seen[0] is None
    bound = 1e-2 if "bf16" in options else 1e-4
    assert fused_losses == pytest.approx(losses, rel=bound)
    assert fused_evaluation == pytest.approx(evaluation, rel=bound)


def test_compiled_before_trainer(tmp_path: Path) -> None:
    """`model.compile(backend="liger")`, after which Trainer still recognises the model."""
    model = text("Llama", 3, num_hidden_layers=1).model()
    rewritten = copy.deepcopy(model)
    torch._dynamo.reset()
    rewritten.compile(backend=liger_ops.backend, options={"inner_backend": "aot_eager"})
    expected = train(model, tmp_path / "model")
    losses, evaluation = train(rewritten, tmp_path / "compiled")
    assert losses == pytest.approx(expected[0], rel=1e-4)
    assert evaluation == pytest.approx(expected[1], rel=1e-4)


def test_label_smoothing_of_trainer(tmp_path: Path) -> None:
    """Trainer computes this loss itself, from the logits of a call without labels."""
    model = text("Llama", 3, num_hidden_layers=1).model()
    fused = copy.deepcopy(model)
    fuse(fused)
    options = {"label_smoothing_factor": 0.1}
    losses, evaluation = train(model, tmp_path / "model", **options)
    fused_losses, fused_evaluation = train(fused, tmp_path / "fused", **options)
    assert fused_losses == pytest.approx(losses, rel=1e-4)
    assert fused_evaluation == pytest.approx(evaluation, rel=1e-4)


@needs_compiler
def test_enabled_before_trainer(tmp_path: Path) -> None:
    """`liger_ops.enable()` and Trainer's own option: an untouched model, compiled by Inductor."""
    model = text("Llama", 3, num_hidden_layers=1).model()
    expected = train(copy.deepcopy(model), tmp_path / "model")
    torch._dynamo.reset()
    # Calls in place of its C++, which takes half a minute to compile.
    calls = inductor_config.patch(fallback_by_default=True)
    with liger_ops.enable(["rms_norm", "rope", "swiglu"]), counted() as ops, calls:
        losses, evaluation = train(model, tmp_path / "enabled", torch_compile=True)
    assert {"rms_norm", "rope", "swiglu"} <= ops
    assert losses == pytest.approx(expected[0], rel=1e-4)
    assert evaluation == pytest.approx(expected[1], rel=1e-4)


@contextlib.contextmanager
def counted() -> Iterator[set[str]]:
    """The ops found by Inductor's passes before autograd, with its caches disabled."""
    found: set[str] = set()
    rewrite = pass_module.rewrite

    def recorded(*args: Any, **options: Any) -> Any:
        report = rewrite(*args, **options)
        found.update(report.counts())
        return report

    with pytest.MonkeyPatch.context() as patch, without_caches():
        patch.setattr(pass_module, "rewrite", recorded)
        yield found


def test_accelerate_takes_no_other_backend(tmp_path: Path) -> None:
    """accelerate checks a fixed list of backends first, so the README recommends `enable`."""
    model = text("Llama", 3, num_hidden_layers=1).model()
    options = {"torch_compile": True, "torch_compile_backend": "liger"}
    with pytest.raises(ValueError, match="'LIGER' is not a valid DynamoBackend"):
        train(model, tmp_path, **options)
