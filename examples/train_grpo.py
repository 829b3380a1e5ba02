"""Train with GRPO, and compare the trainer's log-probabilities with the sampler's, in every step.

    python examples/train_grpo.py [--help]

TRL samples completions with a cache, token by token, from prompts that are padded on the left. Its
training step computes the log-probabilities of the same tokens again: in one pass over the whole
sequences, with gradient checkpointing and a fused head. The two are the same function of the same
weights, but their sums have other orders. Both runs train a model after `liger_ops.fuse`; one of
them within `liger_ops.invariant()`, where every difference must be 0, or the exit status is 1. The
reward is the share of even words.

Each run prints its largest difference of a log-probability, and of the KL divergence that is
estimated from a step's tokens as the mean of exp(d) - 1 - d. `grpo.png` plots every step.

Needs transformers, trl, datasets, tokenizers and matplotlib beside liger_ops.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import matplotlib.pyplot as plt
import tokenizers
import torch
import transformers
import trl
from torch import Tensor

import liger_ops
from liger_ops.bench.command_line import Parser, integer
from liger_ops.integrations import trl as integration

WORDS = 64
PROMPTS, LONGEST, COMPLETION = 256, 24, 16
# The rows of a batch, and how many of them continue one prompt.
ROWS, GENERATIONS = 16, 8


class Run(NamedTuple):
    """Each step's largest difference of a log-probability, KL divergence and mean reward."""

    differences: list[float]
    divergences: list[float]
    rewards: list[float]


class ObservedTrainer(trl.GRPOTrainer):
    """TRL's trainer, which keeps the sampler's log-probabilities and compares the trainer's."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.run = Run([], [], [])
        self.log_probs: Tensor | None = None

    def _generate_single_turn(self, *args: Any, **options: Any) -> Any:
        with _sampling(self.model) as sampled:
            completions, _ = super()._generate_single_turn(*args, **options)
        (log_probs,) = sampled
        rows = zip(log_probs.tolist(), completions, strict=True)
        return completions, [row[: len(words)] for row, words in rows]

    def _get_per_token_logps_and_entropies(self, *args: Any, **options: Any) -> Any:
        results = super()._get_per_token_logps_and_entropies(*args, **options)
        self.log_probs = results[0].detach()
        return results

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        loss = super()._compute_loss(model, inputs)
        kept = inputs["completion_mask"] != 0
        d = (self.log_probs - inputs["sampling_per_token_logps"])[kept].double()
        self.run.differences.append(d.abs().max().item())
        self.run.divergences.append((torch.expm1(d) - d).mean().item())
        self.run.rewards.append(_even(inputs["completion_ids"])[kept].mean().item())
        return loss


@contextmanager
def _sampling(model: Any) -> Iterator[list[Tensor]]:
    """Within the context, `generate` also records the log-probabilities of what it samples."""
    generate, sampled = model.generate, []

    def recording(*args: Any, **options: Any) -> Tensor:
        options |= {"return_dict_in_generate": True, "output_logits": True}
        output = generate(*args, **options)
        logits = torch.stack(output.logits, 1)
        words = output.sequences[:, -logits.shape[1] :]
        sampled.append(liger_ops.log_prob(logits, words)[0])
        return output.sequences

    model.generate = recording
    try:
        yield sampled
    finally:
        del model.generate


def _with_positions(model: Any, args: Any, given: dict[str, Any]) -> Any:
    """Count positions from a row's first word, as `generate` does. In its training step TRL passes
    none, so padding on the left would move all words, whose rotations are then rounded otherwise.
    """
    mask = given.get("attention_mask")
    if given.get("position_ids") is None and mask is not None:
        given["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    return args, given


def _even(words: Tensor) -> Tensor:
    return (words % 2 == 0).float()


def train(options: argparse.Namespace, context: Any) -> Run:
    """Train within a context."""
    transformers.set_seed(options.seed)
    words = {f"word{i}": i for i in range(WORDS)}
    split = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="word0"))
    split.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=split, pad_token="word0", eos_token="word1"
    )
    config = transformers.Qwen3Config(
        vocab_size=WORDS, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, pad_token_id=0, eos_token_id=1,
        tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device(options.device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=options.dtype)
    integration.install()
    liger_ops.fuse(model)
    model.register_forward_pre_hook(_with_positions, with_kwargs=True)
    generator = torch.Generator().manual_seed(options.seed)

    def prompt() -> str:
        length = int(torch.randint(3, LONGEST, (), generator=generator))
        drawn = torch.randint(2, WORDS, (length,), generator=generator)
        return " ".join(f"word{int(word)}" for word in drawn)

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [_even(torch.tensor(words)).mean().item() for words in completion_ids]

    with tempfile.TemporaryDirectory() as folder, context:
        arguments = trl.GRPOConfig(
            output_dir=folder, use_cpu=options.device == "cpu", bf16=False, seed=options.seed,
            max_steps=options.steps, learning_rate=1e-3, per_device_train_batch_size=ROWS,
            num_generations=GENERATIONS, max_completion_length=COMPLETION,
            gradient_checkpointing=True, report_to=[], save_strategy="no", logging_steps=50,
        )  # fmt: skip
        prompts = datasets.Dataset.from_list([{"prompt": prompt()} for _ in range(PROMPTS)])
        trainer = ObservedTrainer(
            model, args=arguments, reward_funcs=reward, processing_class=tokenizer,
            train_dataset=prompts,
        )  # fmt: skip
        trainer.train()
    return trainer.run


def plot(runs: dict[str, Run], path: Path) -> None:
    figure, (upper, lower) = plt.subplots(2, sharex=True, figsize=(7, 6), layout="constrained")
    for name, run in runs.items():
        upper.plot(run.divergences, label=name)
        lower.plot(run.rewards, label=name)
    # Zeros are drawn on the axis.
    smallest = min(filter(None, runs["default"].divergences), default=1e-12)
    upper.set_yscale("symlog", linthresh=smallest)
    upper.set(ylabel="KL of the sampler from the trainer", title="GRPO, sampled with a cache")
    lower.set(xlabel="step", ylabel="mean reward")
    upper.legend()
    figure.savefig(path, dpi=150)


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=integer(1), default=200)
    parser.add_argument("--device", default="cpu", help="cpu or cuda; default: %(default)s")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--seed", type=integer(0), default=0)
    parser.add_argument("--output", type=Path, default=Path("runs/train_grpo"))
    options = parser.parse_args(arguments)
    options.dtype = getattr(torch, options.dtype)
    options.output.mkdir(parents=True, exist_ok=True)
    contexts = {"default": nullcontext(), "liger_ops.invariant()": liger_ops.invariant()}
    runs = {name: train(options, context) for name, context in contexts.items()}
    for name, (differences, divergences, rewards) in runs.items():
        found = f"largest difference {max(differences):.3g}, largest KL {max(divergences):.3g}"
        print(f"{name}: {found}; reward {rewards[0]:.3f} to {rewards[-1]:.3f}")
    plot(runs, options.output / "grpo.png")
    print(f"wrote {options.output / 'grpo.png'}")
    return int(max(runs["liger_ops.invariant()"].differences) > 0)


if __name__ == "__main__":
    raise SystemExit(main())
