"""Train every model for one step with the `liger` backend, and write docs/models.md.

    python tests/support/trained_models_report.py                   # all: an hour of one core
    python tests/support/trained_models_report.py --missing         # those not in the document
    python tests/support/trained_models_report.py LlamaForCausalLM  # some of them, by name

The document keeps its rows of other models, and is written after each model.
"""

from __future__ import annotations

import argparse
import logging
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

from trained_models import LEFT_OUT, MODELS
from training_steps import MODES, NEAR, CannotTrain, Model, check, own_results

DOCUMENT = Path(__file__).parents[2] / "docs" / "models.md"
EQUAL = "equal"

INTRODUCTION = """\
# Models of transformers, trained for one step with `backend="liger"`

Written by `python tests/support/trained_models_report.py`:
torch {torch}, transformers {transformers}.

The models are every causal language model and encoder-decoder in transformers' auto classes, and
models of images and sound. They are made small (one layer of each kind) with random weights in
float32, and run on the CPU. Except for sizes and dropout, a model has its default configuration,
including `use_cache`. A batch is what a collator makes: labels, and an `attention_mask` with
padding in one row.

Each model takes one training step in three ways. "plain" compiles a function,
`torch.compile(lambda **batch: model(**batch).loss)`. "checkpointed" compiles the model itself
after `gradient_checkpointing_enable({{"use_reentrant": False}})`, and "reentrant" the same with
`True`. All rewrites are on (`options={{"rewrites": "all"}}`), and the graphs run without Inductor
(`aot_eager`).
"{equal}" means that the loss and the gradient of every parameter differ from those of the model
without rewrites by at most {near:.0e}, as a relative norm; sums have another order.

{summary}

The column "ops" counts the ops in the graphs, the maximum over the three ways.
`tests/models/test_trained_models.py` checks some of these rows.

| model | ops | {modes} |
| --- | --- | {dashes} |
"""

LEFT = """
## Not trained

"""


@dataclass(frozen=True)
class Row:
    """The ops of a model, and the outcome of each mode."""

    ops: Counter[str]
    results: tuple[str, ...]

    def __str__(self) -> str:
        ops = ", ".join(f"{count} {op}" for op, count in sorted(self.ops.items()))
        return " | ".join((ops or "none", *self.results))

    @property
    def equal(self) -> bool:
        return set(self.results) == {EQUAL}


def rows() -> dict[str, Row]:
    """The rows of the document."""
    found = {}
    for line in DOCUMENT.read_text().splitlines() if DOCUMENT.exists() else ():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| ") and len(cells) == 2 + len(MODES) and cells[0] in MODELS:
            ops = Counter({op: int(count) for count, op in re.findall(r"(\d+) (\w+)", cells[1])})
            found[cells[0]] = Row(ops, tuple(cells[2:]))
    return found


def trained(model: Model) -> Row:
    ops: Counter[str] = Counter()
    results = []
    try:
        own = own_results(model)
    except CannotTrain as reason:
        return Row(ops, tuple(f"not without rewrites: {cell(reason)}" for _ in MODES))
    for mode in MODES:
        try:
            ops |= check(model, mode, own).ops
            results.append(EQUAL)
        except CannotTrain as reason:
            results.append(f"not without rewrites: {cell(reason)}")
        except AssertionError as problem:
            results.append(f"**wrong**: {cell(problem)}")
    return Row(ops, tuple(results))


def cell(text: object) -> str:
    return str(text).replace("|", "/")


def document(known: dict[str, Row]) -> str:
    known = {name: known[name] for name in sorted(known)}
    equal = sum(row.equal for row in known.values())
    wrong = sum("**wrong**" in str(row) for row in known.values())
    summary = (
        f"{len(known)} of {len(MODELS)} models were trained. {equal} are equal in all three ways;"
        f"\n{wrong} are wrong in at least one way; {len(known) - equal - wrong} cannot be trained"
        "\nor compiled in at least one way, with or without rewrites."
    )
    introduction = INTRODUCTION.format(
        torch=torch.__version__.split("+")[0],
        transformers=transformers.__version__,
        equal=EQUAL,
        near=NEAR,
        summary=summary,
        modes=" | ".join(MODES),
        dashes=" | ".join("---" for _ in MODES),
    )
    table = "".join(f"| {name} | {row} |\n" for name, row in known.items())
    left = "".join(f"- {name}: {reason}.\n" for name, reason in sorted(LEFT_OUT.items()))
    return introduction + table + LEFT + left


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="MODEL", help="by default all")
    parser.add_argument("--missing", action="store_true", help="those that the document has not")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    known = rows()
    names = arguments.names or [
        name for name in MODELS if not (arguments.missing and name in known)
    ]
    for name in names:
        known[name] = trained(MODELS[name])
        print(name, known[name], sep=" | ", flush=True)
        DOCUMENT.write_text(document(known))


if __name__ == "__main__":
    main()
