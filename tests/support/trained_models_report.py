"""Train every model for one step with the `liger` backend, and write docs/models.md.

    python tests/support/trained_models_report.py                   # all: an hour of one core
    python tests/support/trained_models_report.py --missing         # those not in the document
    python tests/support/trained_models_report.py LlamaForCausalLM  # some of them, by name

The document keeps what it has of the others, and is written after each model.
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

Every causal language model and encoder-decoder that transformers' auto classes list, and models of
images and sound: made small (a layer of each kind), with random weights in float32, on the CPU. A
model keeps its default configuration but for its sizes and for dropout; `use_cache` among it. A
batch has what a collator makes, labels and an `attention_mask` with padding in one row.

Each takes a step "plain", compiled as a function, `torch.compile(lambda **batch:
model(**batch).loss)`; "checkpointed", the model itself compiled, after
`gradient_checkpointing_enable({{"use_reentrant": False}})`; and "reentrant", with `True`. All
rewrites are made (`options={{"rewrites": "all"}}`) and the graphs run as they are (`aot_eager`).
"{equal}" says that the loss and the gradient of every parameter are those of the model without the
rewrites, each within {near:.0e} as a norm: sums in another order.

{summary}

The ops are those in the graphs, the most of the three ways. `tests/models/test_trained_models.py`
holds some of these rows.

| model | ops | {modes} |
| --- | --- | {dashes} |
"""

LEFT = """
## Not trained

"""


@dataclass(frozen=True)
class Row:
    """What is known of a model: its ops, and what came of each mode."""

    ops: Counter[str]
    results: tuple[str, ...]

    def __str__(self) -> str:
        ops = ", ".join(f"{count} {op}" for op, count in sorted(self.ops.items()))
        return " | ".join((ops or "none", *self.results))

    @property
    def equal(self) -> bool:
        return set(self.results) == {EQUAL}


def rows() -> dict[str, Row]:
    """What the document has."""
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
        f"{len(known)} of {len(MODELS)} models were trained. In all three ways, {equal} are equal;"
        f"\n{wrong} are wrong in one; {len(known) - equal - wrong} cannot be trained or compiled in"
        " one without rewrites."
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
