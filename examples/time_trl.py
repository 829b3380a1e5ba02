"""Time the steps of TRL's DPO and GRPO trainers, with TRL's own functions and with liger_ops.

    python examples/time_trl.py dpo trl
    python examples/time_trl.py dpo fuse
    python examples/time_trl.py grpo fuse --shape tiny    # no times on a CPU

The ways are `trl`, nothing changed; `install`, liger_ops behind TRL's functions; and `fuse`, that
and `liger_ops.fuse` of the model and of the reference model. A step is a forward and a backward
under bfloat16 autocast with TRL's defaults, gradient checkpointing among them: DPO with 8 pairs of
random words, GRPO with 16 completions that are generated once. The median of the steps after the
third, the peak of the memory and the first losses are printed. Each way needs a process of its own.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import datasets
import tokenizers
import torch
import transformers
import trl

import liger_ops
from liger_ops.bench.steps.models import config_of
from liger_ops.device import MeasuredDevice, spread
from liger_ops.integrations import trl as integration

WORDS = 64
UNTIMED = 3
# Shape -> the words of a prompt and of a completion, the rows of a batch, and the steps.
SHAPES = {"llama-3.2-1b": (512, 8, 12), "tiny": (8, 2, 5)}


def tokenizer() -> Any:
    words = {f"word{i}": i for i in range(WORDS)}
    split = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="word0"))
    split.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=split, pad_token="word0", eos_token="word1"
    )


def saved_model(shape: str, folder: Path, device: str) -> None:
    """Save a model with random weights: DPOTrainer loads its reference model from a folder."""
    last = config_of(shape).vocab_size - 1
    config = config_of(shape, pad_token_id=0, bos_token_id=1, eos_token_id=last)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)


def trainer(kind: str, shape: str, model: Any, folder: Path, on_gpu: bool) -> Any:
    length, rows, steps = SHAPES[shape]
    generator = torch.Generator().manual_seed(0)

    def words() -> str:
        drawn = torch.randint(2, WORDS, (length,), generator=generator)
        return " ".join(f"word{int(i)}" for i in drawn)

    options: dict[str, Any] = {
        "output_dir": str(folder), "bf16": on_gpu, "use_cpu": not on_gpu, "max_steps": steps,
        "learning_rate": 1e-5, "logging_steps": 1, "report_to": [], "save_strategy": "no",
        "disable_tqdm": True,
    }  # fmt: skip
    if kind == "dpo":
        pairs = [
            {"prompt": words(), "chosen": " " + words(), "rejected": " " + words()}
            for _ in range(4 * rows)
        ]
        return trl.DPOTrainer(
            model,
            args=trl.DPOConfig(per_device_train_batch_size=rows, max_length=None, **options),
            train_dataset=datasets.Dataset.from_list(pairs),
            processing_class=tokenizer(),
        )
    return trl.GRPOTrainer(
        model,
        args=trl.GRPOConfig(
            num_generations=2 * rows,
            per_device_train_batch_size=2 * rows,
            num_iterations=steps,
            max_completion_length=length,
            temperature=0.9,
            **options,
        ),  # fmt: skip
        reward_funcs=lambda completions, **_: [float(len(text) % 5) for text in completions],
        train_dataset=datasets.Dataset.from_list([{"prompt": words()} for _ in range(2 * rows)]),
        processing_class=tokenizer(),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("kind", choices=("dpo", "grpo"))
    parser.add_argument("way", choices=("trl", "install", "fuse"))
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.2-1b" if on_gpu else "tiny")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.set_seed(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        saved_model(options.shape, folder, "cuda" if on_gpu else "cpu")
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        if options.way != "trl":
            integration.install()
        if options.way == "fuse":
            liger_ops.fuse(model)
        training = trainer(options.kind, options.shape, model, folder, on_gpu)
        if options.way == "fuse" and getattr(training, "ref_model", None) is not None:
            liger_ops.fuse(training.ref_model)
        milliseconds, peaks = timed(training, on_gpu)
    losses = [round(log["loss"], 5) for log in training.state.log_history if "loss" in log]
    measured = "not timed on a CPU"
    if on_gpu:
        median = spread(milliseconds[UNTIMED:]).p50
        measured = f"{median:.1f} ms, {max(peaks[UNTIMED:]) / 2**30:.2f} GiB"
    print(f"{options.kind} {options.way}: {measured}; losses {losses[:5]}")


def timed(training: Any, on_gpu: bool) -> tuple[list[float], list[int]]:
    """Train, and return each step's milliseconds without the optimizer, and its peak memory."""
    prepare, step = training._prepare_inputs, training.training_step
    device = MeasuredDevice("cuda" if on_gpu else "cpu")
    milliseconds: list[float] = []
    peaks: list[int] = []
    begin: Any = None

    def prepared(*args: Any, **others: Any) -> Any:
        nonlocal begin
        result = prepare(*args, **others)
        device.synchronize()
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        begin = device.recorded()
        return result

    def stepped(*args: Any, **others: Any) -> Any:
        result = step(*args, **others)
        end = device.recorded()
        device.synchronize()
        milliseconds.append(begin.elapsed_time(end))
        peaks.append(torch.cuda.max_memory_allocated() if on_gpu else 0)
        return result

    training._prepare_inputs, training.training_step = prepared, stepped
    training.train()
    return milliseconds, peaks


if __name__ == "__main__":
    main()
