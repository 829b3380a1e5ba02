"""Train models with the layers of a build for the kernels hub, and write hub.md.

    python tests/support/hub_report.py                   # all causal language models
    python tests/support/hub_report.py LlamaForCausalLM  # some of them, by name
    python tests/support/hub_report.py --missing         # those not in the document
    python tests/support/hub_report.py --backend inductor --document /tmp/hub.md
    python tests/support/hub_report.py --peer kernels-community/liger-kernels

The last trains the models of the document with the layers of Liger-Kernel's repository, whose
source is in that folder of a clone, and writes the document's second table.

Needs the package `kernels`, and a transformers that takes it: docs/hub.md has the versions. The
document keeps its other table, and its rows of other models, and is written after each model.
"""

from __future__ import annotations

import argparse
import functools
import logging
import os
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import fx, nn
from transformers.models.auto import modeling_auto

import paths  # noqa: F401

# isort: split
import peer_layers
from hub_training import EQUAL, SAME_ERROR, outcome
from liger_ops.hub import build, layers, local
from trained_models import MODELS
from training_steps import NEAR, CannotTrain, Model, one_line, own_results

DOCUMENT = Path(__file__).parents[2] / "docs" / "reports" / "hub.md"
# Column -> whether the model is compiled, and whether its MLPs, loss and experts are layers too.
WAYS = {"eager": (False, False), "compiled": (True, False), "with more": (True, True)}

INTRODUCTION = """\
# Models of transformers with the layers of the kernels hub

Written by `python tests/support/hub_report.py`: torch {torch}, transformers {transformers},
kernels {kernels}, on a CPU.

The models are the causal language models of transformers that ask for a layer by name, made small
with random weights in float32. A batch has labels, and an `attention_mask` with padding in one row.
Each trains one step in three ways, and the loss and the gradient of every parameter are compared
with those of the model as it is. "eager" is after `kernelize(model, mode=Mode.TRAINING)`.
"compiled" is after `kernelize(model, mode=Mode.TRAINING | Mode.TORCH_COMPILE)`, by
`torch.compile(fullgraph=True, backend="{backend}")`, which raises at a graph break. "with more" is
the same with the gated MLPs, the loss and the experts too, which transformers does not name
(docs/hub.md).

"{equal}" means that the largest relative difference is at most {near:.0e}: sums have another order.
"{same_error}" means that the model as it is does not compile in one graph either. The column
"ops" counts the nodes of the ops in the graph of the last way; "own" are classes of which a layer
ran the model's own forward.

Of {count} models, {equal_counts}.

| model | ops | own | {ways} |
| --- | --- | --- | {dashes} |
"""


def asks_for_layers(model: nn.Module) -> bool:
    """Return whether a module of a model, or a function of one, asks for a layer by name."""
    candidates = [
        candidate
        for module in model.modules()
        for candidate in (module, *getattr(module, "_kernel_funcs", {}).values())
    ]
    names = {getattr(type(candidate), "kernel_layer_name", None) for candidate in candidates}
    return not names.isdisjoint(layers.__all__)


def counting(backend: str, ops: Counter[str]) -> Callable[..., Any]:
    """Return the backend, which first counts the nodes of a build's ops in the graph."""
    compile_graph = torch._dynamo.lookup_backend(backend)

    def run(module: fx.GraphModule, inputs: Any) -> Any:
        for node in module.graph.nodes:
            namespace, _, op = str(node.target).partition(".")
            if namespace.startswith(build.PYTHON_NAME):
                ops[op.removesuffix(".default")] += 1
        return compile_graph(module, inputs)

    return run


def trained(model: Model, folder: Path, backend: str) -> list[str]:
    """Train a model in all ways, and return the cells of its row after the name."""
    try:
        own = own_results(model)
    except CannotTrain as reason:
        return ["", "", *[f"{SAME_ERROR}: {reason}"] * len(WAYS)]
    ops: Counter[str] = Counter()
    kept: set[str] = set()
    outcomes = []
    for compiled, with_more in WAYS.values():
        ops.clear()
        kernelize = functools.partial(
            local.kernelize, folder=folder, with_more=with_more, compiled=compiled
        )
        compiler = counting(backend, ops) if compiled else None
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            outcomes.append(outcome(model, own, kernelize, backend, compiler))
        texts = [str(warning.message) for warning in caught]
        kept |= {text.split()[1] for text in texts if "keeps its own forward" in text}
    counted = ", ".join(f"{count} {op}" for op, count in sorted(ops.items()))
    return [counted or "none", ", ".join(sorted(kept)), *outcomes]


def rows(text: str, cells: int) -> dict[str, list[str]]:
    """Read the rows of a table, by model, which have so many cells after its name."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    return {name: rest for name, *rest in lines if name in MODELS and len(rest) == cells}


def document(known: dict[str, list[str]], backend: str) -> str:
    introduction = INTRODUCTION.format(
        torch=torch.__version__.split("+")[0],
        transformers=transformers.__version__,
        kernels=version("kernels"),
        backend=backend,
        equal=EQUAL,
        same_error=SAME_ERROR,
        near=NEAR,
        equal_counts=", ".join(
            f'{sum(cells[i] == EQUAL for cells in known.values())} are equal "{way}"'
            for i, way in enumerate(WAYS, 2)
        ),
        count=len(known),
        ways=" | ".join(WAYS),
        dashes=" | ".join("---" for _ in WAYS),
    )
    return introduction + "".join(
        f"| {' | '.join([name, *known[name]])} |\n" for name in sorted(known)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="MODEL", help="by default all")
    parser.add_argument("--missing", action="store_true", help="those that the document has not")
    parser.add_argument("--backend", default="aot_eager", help="of torch.compile")
    parser.add_argument("--document", type=Path, default=DOCUMENT, help="by default hub.md")
    parser.add_argument("--peer", type=Path, help="the source of Liger-Kernel's repository")
    arguments = parser.parse_args()
    # Everything is on this machine.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    text = arguments.document.read_text() if arguments.document.exists() else ""
    first, heading, second = text.partition(peer_layers.HEADING)
    second = heading + second
    known = rows(first, 2 + len(WAYS))
    causal = set(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    by_default = [name for name in MODELS if name in causal]
    if arguments.peer is not None:
        by_default, known = list(known), rows(second, len(peer_layers.WAYS))
    names = arguments.names or [
        name for name in by_default if not (arguments.missing and name in known)
    ]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "liger-kernels"
        if arguments.peer is None:
            build.write(folder)
        else:
            origin = peer_layers.lay_out(arguments.peer, folder)
        for name in names:
            model = MODELS[name]
            try:
                if not asks_for_layers(model.build()):
                    continue
            except Exception as error:
                print(name, one_line(error), sep=" | ", flush=True)
                continue
            if arguments.peer is None:
                cells = trained(model, folder, arguments.backend)
            else:
                cells = peer_layers.trained(model, folder)
            known[name] = [cell.replace("|", "/") for cell in cells]
            print(name, *known[name], sep=" | ", flush=True)
            if arguments.peer is None:
                first = document(known, arguments.backend)
            else:
                second = peer_layers.section(known, origin)
            arguments.document.write_text(first + second)


if __name__ == "__main__":
    main()
