"""Train every model for a step, with the `liger` backend, with `fuse`, and with a fused LoRA, and
write models.md.

    python tests/support/trained_models_report.py                   # all
    python tests/support/trained_models_report.py --missing         # those not in the document
    python tests/support/trained_models_report.py LlamaForCausalLM  # some of them, by name
    python tests/support/trained_models_report.py --part 1/2        # half of them, with --part 2/2
    python tests/support/trained_models_report.py --ways fuse       # one column alone
    python tests/support/trained_models_report.py --document /tmp/models.md

The document keeps its rows of other models and its columns of other ways, and is written after each
model. Several parts can run at once.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import logging
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import transformers

import paths  # noqa: F401

# isort: split
import fuse_steps
from trained_models import LEFT_OUT, MODELS
from training_steps import MODES, NEAR, CannotTrain, Model, check, own_results

DOCUMENT = Path(__file__).parents[2] / "docs" / "reports" / "models.md"
EQUAL = fuse_steps.EQUAL
FUSE, LORA = "fuse", "lora"
WAYS = (*MODES, FUSE, LORA)
NOT_RUN = "not run"

INTRODUCTION = """\
# Models of transformers, trained for one step with `backend="liger"` and with `fuse`

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

The column "fuse" is of a fused model without a compiler, for the {combinations} combinations of
the table below. As `fuse(model, verify=batch)` does, it compares the loss, every output and every
gradient with the model's own: in float32 with a truth of float64, and in float64, where only its
rounding may differ. "{equal}" means that all combinations are, "left" that nothing of the model is
fused, and "not without fuse" that the model itself does not take the batch. A column "lora", if
there is one, is of the same model with a LoRA of rank 4 on every linear layer, by peft, and
`fuse(model, lora=True)`, for {adapted}.

{summary}

{by_combination}
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
        """True if the backend is equal in all modes."""
        return set(self.results[: len(MODES)]) == {EQUAL}


def rows(path: Path = DOCUMENT) -> dict[str, Row]:
    """Read the rows of the document, by model."""
    result = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| ") and len(cells) > 1 + len(MODES) and cells[0] in MODELS:
            ops = Counter({op: int(count) for count, op in re.findall(r"(\d+) (\w+)", cells[1])})
            results = [*cells[2:], *[NOT_RUN] * len(WAYS)][: len(WAYS)]
            result[cells[0]] = Row(ops, tuple(results))
    return result


def trained(model: Model, ways: list[str]) -> Row:
    """Train a model in these ways; return its row, with NOT_RUN for the others."""
    ops: Counter[str] = Counter()
    results = dict.fromkeys(WAYS, NOT_RUN)
    for way in (FUSE, LORA):
        if way in ways:
            outcomes = fuse_steps.outcomes(model, lora=way == LORA)
            results[way] = cell(fuse_steps.summary(outcomes))
    modes = [mode for mode in MODES if mode in ways]
    try:
        own = own_results(model) if modes else {}
    except CannotTrain as reason:
        results |= dict.fromkeys(modes, f"not without rewrites: {cell(reason)}")
        modes = []
    for mode in modes:
        try:
            ops |= check(model, mode, own).ops
            results[mode] = EQUAL
        except CannotTrain as reason:
            results[mode] = f"not without rewrites: {cell(reason)}"
        except AssertionError as problem:
            results[mode] = f"**wrong**: {cell(problem)}"
    return Row(ops, tuple(results.values()))


def merged(old: Row | None, new: Row) -> Row:
    """Return the new row, with the old row's results for the ways that were not run."""
    if old is None:
        return new
    ran = set(new.results[: len(MODES)]) != {NOT_RUN}
    pairs = zip(new.results, old.results, strict=True)
    return Row(new.ops if ran else old.ops, tuple(b if a == NOT_RUN else a for a, b in pairs))


def cell(text: object) -> str:
    return str(text).replace("|", "/")


def by_combination(cells: list[str]) -> str:
    """Return a table: how many models give each outcome with `fuse`, for each combination."""
    outcomes = fuse_steps.OUTCOMES
    lines = [["combination", *outcomes], ["---"] * (1 + len(outcomes))]
    ran = [fuse_steps.read(text) for text in cells if text != NOT_RUN]
    for name, counts in fuse_steps.counts(ran).items():
        lines.append([name, *(str(counts[outcome]) for outcome in outcomes)])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def document(known: dict[str, Row]) -> str:
    known = {name: known[name] for name in sorted(known)}
    adapted = any(row.results[-1] != NOT_RUN for row in known.values())
    ways = WAYS if adapted else WAYS[:-1]
    equal = sum(row.equal for row in known.values())
    wrong = sum("**" in str(row) for row in known.values())
    compiled_wrong = sum(
        any("**wrong**" in result for result in row.results[: len(MODES)]) for row in known.values()
    )
    summary = (
        f"{len(known)} of {len(MODELS)} models were trained. {equal} are equal in all three ways"
        f"\nof the backend; {wrong} are wrong in at least one way of {len(ways)};"
        f" {len(known) - equal - compiled_wrong} cannot be trained"
        "\nor compiled in at least one way, with or without rewrites."
    )
    introduction = INTRODUCTION.format(
        torch=torch.__version__.split("+")[0],
        transformers=transformers.__version__,
        equal=EQUAL,
        near=NEAR,
        summary=summary,
        combinations=len(fuse_steps.COMBINATIONS),
        by_combination=by_combination([row.results[WAYS.index(FUSE)] for row in known.values()]),
        adapted=" and ".join(fuse_steps.ADAPTED),
        modes=" | ".join(ways),
        dashes=" | ".join("---" for _ in ways),
    )
    shown = {name: replace(row, results=row.results[: len(ways)]) for name, row in known.items()}
    table = "".join(f"| {name} | {row} |\n" for name, row in shown.items())
    left = "".join(f"- {name}: {reason}.\n" for name, reason in sorted(LEFT_OUT.items()))
    return introduction + table + LEFT + left


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock the document, so that no other process reads and writes it meanwhile."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="MODEL", help="by default all")
    parser.add_argument("--missing", action="store_true", help="those that the document has not")
    parser.add_argument(
        "--part", default="1/1", metavar="I/N", help="every Nth model, from the Ith"
    )
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=list(WAYS), help="the columns")
    parser.add_argument("--document", type=Path, default=DOCUMENT, help="by default models.md")
    arguments = parser.parse_args()
    path = arguments.document
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    known = rows(path)
    names = arguments.names or [
        name for name in MODELS if not (arguments.missing and name in known)
    ]
    part, parts = map(int, arguments.part.split("/"))
    for name in names[part - 1 :: parts]:
        row = trained(MODELS[name], arguments.ways)
        print(name, row, sep=" | ", flush=True)
        with locked(path):
            known = rows(path)
            known[name] = merged(known.get(name), row)
            path.write_text(document(known))


if __name__ == "__main__":
    main()
