"""Write docs/reports/fuse.md: what `fuse` finds in every transformers model, and what it leaves.

    python tests/support/fuse_report.py

every_model.py builds the models; tests/fusion/test_fuse_every_model.py checks the document.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import transformers

import paths  # noqa: F401

# isort: split
import every_model
from liger_ops import fuse
from liger_ops.fusion import FuseReport

DOCUMENT = Path(__file__).parents[2] / "docs" / "reports" / "fuse.md"

KINDS = {
    "norm": "norms", "modulated norm": "modulated norms", "gated activation": "gated activations",
    "rotary embedding": "rotary embeddings", "attention": "attention", "loss": "loss",
    "hyper connection": "hyper-connections",
}  # fmt: skip

INTRODUCTION = """\
# What `liger_ops.fuse` finds in models of transformers

Written by `python tests/support/fuse_report.py`; `tests/fusion/test_fuse_every_model.py`
fails where it is not so.

transformers {version}, {count} model types of {types}: all that can be built from their default
configurations without another package, on the meta device, with at most {layers} layers where their
code allows it.

A number is of modules: "4" of which all are fused, "3 of 4" of which three are. Counted are those
that `fuse` fuses, and those that it names in `report.left`; the reasons follow the table.
[fuse.md](../fuse.md) says how each kind is fused.
"""

# The number of classes to name for each reason.
NAMED = 4


@dataclass(frozen=True)
class Row:
    """The report of `fuse` for one model."""

    model_type: str
    class_name: str
    report: FuseReport

    def __str__(self) -> str:
        cells = (self.cell(kind) for kind in KINDS)
        return f"| {self.model_type} | {self.class_name} | {' | '.join(cells)} |"

    def cell(self, kind: str) -> str:
        """Return the number of fused modules of a kind, and of all if some are left."""
        fused = sum(entry.kind == kind for entry in self.report.fused)
        left = sum(entry.kind == kind for entry in self.report.left)
        if not left:
            return str(fused or "")
        return f"**{fused} of {fused + left}**"


def rows(model_types: Iterable[str]) -> Iterator[Row]:
    for model_type in model_types:
        model = every_model.built(model_type)
        if model is not None:
            yield Row(model_type, type(model).__name__, fuse(model))


def version(document: str) -> str:
    """Return the version of transformers that a document was written with."""
    return document.partition("\ntransformers ")[2].partition(",")[0]


def reasons(found: list[Row], kind: str) -> Iterator[str]:
    """Yield a line for each reason to leave modules of a kind, the most frequent first."""
    places = defaultdict(list)
    for row in found:
        for entry in row.report.left:
            if entry.kind == kind:
                places[entry.reason].append((entry.class_name, row.model_type))
    for reason, at in sorted(places.items(), key=lambda item: (-len(item[1]), item[0])):
        counts = Counter(class_name for class_name, _ in at)
        names = [name for name, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))]
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        types = len({model_type for _, model_type in at})
        where = f"{len(at)} in {types} model type{'s' if types > 1 else ''}"
        yield f"- {where}: `{reason}` ({', '.join(names[:NAMED])}{more})"


def document() -> str:
    model_types = every_model.model_types()
    found = list(rows(model_types))
    lines = [
        INTRODUCTION.format(
            version=transformers.__version__, count=len(found), types=len(model_types),
            layers=every_model.LAYERS,
        ),
        f"| model type | class | {' | '.join(KINDS.values())} |",
        f"|{' --- |' * (len(KINDS) + 2)}",
        *map(str, found),
    ]  # fmt: skip
    for kind, title in KINDS.items():
        lines += [f"\n## Left: {title}\n", *reasons(found, kind)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    DOCUMENT.write_text(document())
