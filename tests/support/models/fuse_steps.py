"""Compare training steps of a fused model with those of the untouched one, by kinds of batches."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from liger_ops import fuse
from liger_ops.rewrites.verify import CannotVerify, verify_changes
from training_steps import Model, one_line, randomized

Batch = dict[str, Any]

EQUAL, LEFT, NOT_TAKEN = "equal", "left", "not without fuse"
WRONG, FAILS, UNVERIFIED = "**wrong**", "**fails**", "not verified"
OUTCOMES = (EQUAL, LEFT, NOT_TAKEN, UNVERIFIED, FAILS, WRONG)

# The length of the first of two documents in a packed row.
FIRST = 10


def text(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
    return batch["input_ids"], batch["labels"], mask


def unmasked(batch: Batch) -> Batch:
    return {name: x for name, x in batch.items() if name != "attention_mask"}


def of_ones(batch: Batch) -> Batch:
    return {**batch, "attention_mask": torch.ones_like(text(batch)[2])}


def left_padded(batch: Batch) -> Batch:
    """Rotate the rows, so that their padding comes first."""
    names = ("input_ids", "labels", "attention_mask", "token_type_ids", "mm_token_type_ids")
    padding = (text(batch)[2] == 0).sum(-1).tolist()

    def turned(x: Tensor) -> Tensor:
        return torch.stack([row.roll(n) for row, n in zip(x, padding, strict=True)])

    tokens = text(batch)[0].shape
    return batch | {
        name: turned(batch[name]) for name in names if name in batch and batch[name].shape == tokens
    }


def in_four_dimensions(batch: Batch) -> Batch:
    """Replace the mask by the one that is added to scores: causal, and without padding."""
    mask = text(batch)[2].bool()
    seen = torch.ones(2 * mask.shape[-1:], dtype=torch.bool).tril() & mask[:, None, None, :]
    # A token of padding sees itself, because a softmax needs a key.
    seen = seen | torch.eye(mask.shape[-1], dtype=torch.bool)
    hidden = torch.finfo(torch.float32).min
    return {**batch, "attention_mask": torch.zeros(seen.shape).masked_fill(~seen, hidden)}


def packed(batch: Batch) -> Batch:
    """Make two documents of each row, told apart by their positions alone."""
    tokens, labels, _ = text(batch)
    positions = torch.cat([torch.arange(FIRST), torch.arange(tokens.shape[-1] - FIRST)])
    labels = labels.clone()
    labels[:, FIRST] = -100
    return {**unmasked(batch), "labels": labels, "position_ids": positions.expand_as(tokens)}


def few_logits(batch: Batch) -> Batch:
    return {**batch, "labels": batch["labels"][:, -4:], "logits_to_keep": 4}


def counted(batch: Batch) -> Batch:
    return {**batch, "num_items_in_batch": torch.tensor(9)}


BATCHES: dict[str, Callable[[Batch], Batch]] = {
    "no mask": unmasked, "ones": of_ones, "right padding": dict, "left padding": left_padded,
    "4-D mask": in_four_dimensions, "packed": packed,
}  # fmt: skip
COMBINATIONS: dict[str, tuple[Callable[[Batch], Batch], bool]] = {
    **{name: (batch, False) for name, batch in BATCHES.items()},
    **{f"{name} checkpointed": (batch, True) for name, batch in BATCHES.items()},
    "logits_to_keep": (few_logits, False),
    "num_items_in_batch": (counted, False),
}
# Combinations of a model with a LoRA.
ADAPTED = ("right padding", "no mask checkpointed")


def outcomes(model: Model, lora: bool = False) -> dict[str, str]:
    """Return the outcome of each combination: one of OUTCOMES, and the reason.

    With `lora`, every linear layer has a LoRA, and is fused with it.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        names = ADAPTED if lora else tuple(COMBINATIONS)
        module = model.build()
        try:
            module = randomized(adapted(module) if lora else module)
        except Exception as error:
            return dict.fromkeys(names, f"{NOT_TAKEN}: {one_line(error)}")
        try:
            report = fuse(module, lora=lora)
        except Exception as error:
            return dict.fromkeys(names, f"{FAILS}: {one_line(error)}")
        if not len(report):
            return dict.fromkeys(names, LEFT)
        results = {}
        for name in names:
            batch, checkpointed = COMBINATIONS[name]
            torch.manual_seed(0)
            results[name] = _outcome(module, checkpointed, batch, model.batch())
        return results


def adapted(model: Any) -> Any:
    import peft

    # A larger LoRA makes softmax so steep that it magnifies every rounding.
    config = peft.LoraConfig(r=4, lora_alpha=1, lora_dropout=0.0, target_modules="all-linear")
    return peft.get_peft_model(model, config)


def _outcome(
    model: Any, checkpointed: bool, changed: Callable[[Batch], Batch], batch: Batch
) -> str:
    """Compare a fused model with itself unfused on a changed batch; return the outcome."""
    try:
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        else:
            for module in model.modules():
                if getattr(module, "gradient_checkpointing", False):
                    module.gradient_checkpointing = False
        result = verify_changes(model, (), changed(batch))
        if not result.agrees and all(value.agrees for value in result.wide):
            # The model's own rounding may be small by luck, but hardly so for two sets of weights.
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1 + 0.1 * torch.rand_like(parameter))
            result = verify_changes(model, (), changed(batch))
    except CannotVerify as reason:
        ours = "the changed model raises" in str(reason)
        return f"{FAILS if ours else UNVERIFIED}: {str(reason)[:200]}"
    except Exception as error:
        return f"{NOT_TAKEN}: {one_line(error)}"
    if result.agrees:
        return EQUAL
    worst = result.wrong[0]
    apart = worst.missing or f"{worst.difference:.1e}"
    return f"{WRONG}: {len(result.wrong)} values, {worst.name} {apart}"


def summary(found: dict[str, str]) -> str:
    """Return a cell of the document: the combinations by outcome, or the only outcome of all."""
    by_outcome: dict[str, list[str]] = {}
    for name, outcome in found.items():
        by_outcome.setdefault(outcome, []).append(name)
    if len(by_outcome) == 1:
        return next(iter(by_outcome))
    others = [item for item in by_outcome.items() if item[0] != EQUAL]
    return "; ".join(f"{outcome} [{', '.join(names)}]" for outcome, names in others)


def read(cell: str) -> dict[str, str]:
    """Read the outcomes, without their reasons, from a cell of the document."""
    parts = re.findall(r"(.*?) \[([^]]*)\](?:; |$)", cell)
    if not all(set(names.split(", ")) <= COMBINATIONS.keys() for _, names in parts) or not parts:
        return dict.fromkeys(COMBINATIONS, cell.partition(":")[0])
    result = dict.fromkeys(COMBINATIONS, EQUAL)
    for outcome, names in parts:
        result |= dict.fromkeys(names.split(", "), outcome.partition(":")[0])
    return result


def counts(found: list[dict[str, str]]) -> dict[str, Counter[str]]:
    """Count, for each combination, the models with each outcome."""
    return {name: Counter(outcomes[name] for outcomes in found) for name in COMBINATIONS}
