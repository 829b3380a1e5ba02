"""Write docs/reports/architectures.md: what the `liger` backend finds in each architecture.

    python tests/support/architectures_report.py

The table is in architectures.py; tests/models/test_architectures.py checks it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import paths  # noqa: F401
from architectures import ARCHITECTURES, Architecture
from liger_ops.rewrites import REWRITES
from liger_ops.rewrites.default_rewrites import KEPT_BY_INDUCTOR

DOCUMENT = Path(__file__).parents[2] / "docs" / "reports" / "architectures.md"

INTRODUCTION = """\
# What `backend="liger"` finds in models of transformers

Written by `python tests/support/architectures_report.py`, and checked by
`tests/models/test_architectures.py`.

Each model is transformers' own, made small (two layers) with random weights. It is compiled as one
training step, `torch.compile(lambda **batch: model(**batch).loss, backend="liger")`, on sequences
without padding. The numbers count places in the code: "4" means that all 4 are found, "3 of 4" that
three are. The places to find were counted by reading the models' code.

The test checks these numbers in bfloat16, and for some models in float32. It also checks that in
bfloat16 the errors of the loss and of every gradient against float64 are at most twice those of the
same model compiled without the rewrites, plus a rounding. [models.md](models.md) has the results in
float32.

With Inductor as the inner backend, these rewrites are off by default, because Inductor is as fast;
`options={{"rewrites": "all"}}` turns them on:
{left}.

Not counted: attention that is not causal (a sliding window shorter than the sequence, chunks,
encoders), and attention that the model writes out with what `scaled_dot_product_attention` does
not take: a soft cap (Gemma 2) or sinks (GPT-OSS).

[models.md](models.md) compares a training step of every causal language model of transformers, in
its default configuration, with and without checkpointing.
"""

COLUMNS = {
    "RMS norm": ("rms_norm",),
    "gated RMS norm": ("gated_rms_norm",),
    "after a residual": ("fused_add_rms_norm",),
    "layer norm": ("layer_norm",),
    "gated MLP": ("swiglu", "geglu", "clamped_swiglu"),
    "squared ReLU": ("relu_squared",),
    "experts": ("moe_experts",),
    "RoPE": ("rope",),
    "head norms and RoPE": ("rms_norm_rope",),
    "head and loss": ("linear_cross_entropy",),
    "attention written out": ("attention",),
    "causal attention": ("causal_attention",),
    "grouped heads": ("grouped_attention",),
}

MISSED = """
## What is not found, and why
"""


def cell(architecture: Architecture, ops: Iterable[str]) -> str:
    """Return how many places of these ops are found, "" if there are none."""
    to_find = sum(architecture.to_find.get(op, 0) for op in ops)
    found = sum(architecture.found.get(op, 0) for op in ops)
    if not to_find:
        return ""
    return str(found) if found == to_find else f"**{found} of {to_find}**"


def row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def table() -> Iterator[str]:
    yield row(["", *COLUMNS])
    yield row(["---"] * (len(COLUMNS) + 1))
    for architecture in ARCHITECTURES:
        yield row([architecture.name, *(cell(architecture, ops) for ops in COLUMNS.values())])


def missed() -> Iterator[str]:
    for architecture in ARCHITECTURES:
        for op, why in architecture.missed.items():
            counted = f"{why.found} of {architecture.to_find[op]}"
            yield f"- {architecture.name}, `{op}`, {counted}: {why.reason}."


def document() -> str:
    left = ", ".join(f"`{name}`" for name in REWRITES if name in KEPT_BY_INDUCTOR)
    lines = [INTRODUCTION.format(left=left), *table()]
    if why := list(missed()):
        lines += [MISSED, *why]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    DOCUMENT.write_text(document())
