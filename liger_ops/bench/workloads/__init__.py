"""All ops of the bench, one file per family, and the selection of ops, shapes and dtypes."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

import torch

from .entry import Entry, Shape, Workload

FAMILIES = (
    "norms", "activations", "rope", "attention", "softmaxes", "layers", "experts", "losses",
    "listed_words", "distribution_losses", "routers", "hyper_connections",
)  # fmt: skip
ENTRIES: dict[str, Entry] = {
    entry.op: entry
    for family in FAMILIES
    for entry in import_module(f"{__name__}.{family}").ENTRIES
}
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
SETS = ("figures", "models", "small")


def selected(
    ops: Sequence[str] | None, shapes: Sequence[str], dtypes: Sequence[str] | None
) -> list[Workload]:
    """Return the workloads of the selected ops, each once, in the order of the ops.

    Args:
        ops: names of ops, or None for all.
        shapes: any of SETS; names of models; or sizes such as "8192x4096", which apply to every op
            with that many dimensions.
        dtypes: names of DTYPES. None is all, except that the figures are in bfloat16 only.

    Raises:
        ValueError: an op, a shape or a dtype is unknown, or nothing is selected.
    """
    for op in ops or ():
        if op not in ENTRIES:
            raise ValueError(f"there is no op {op!r}; the ops are {', '.join(ENTRIES)}")
    for dtype in dtypes or ():
        if dtype not in DTYPES:
            raise ValueError(f"dtype {dtype!r} is none of {', '.join(DTYPES)}")
    chosen = dict.fromkeys(
        (op, shape, dtype)
        for op in ops or ENTRIES
        for choice in shapes
        for shape in _shapes(ENTRIES[op], choice)
        for dtype in dtypes or (["bfloat16"] if choice == "figures" else DTYPES)
    )
    if not chosen:
        raise ValueError(
            f"no op here has a shape {', '.join(shapes)}; shapes are {', '.join(SETS)}, a model"
            f" ({', '.join(_model_names())}), or sizes such as 8192x4096"
        )
    return [Workload(ENTRIES[op], shape, DTYPES[dtype]) for op, shape, dtype in chosen]


def _shapes(entry: Entry, choice: str) -> list[Shape]:
    if choice == "figures":
        # The figures of rms_norm include the host's time at a small shape.
        return [*entry.figures, *([entry.small] if entry.op == "rms_norm" else [])]
    if choice == "models":
        return list(entry.models.values())
    if choice == "small":
        return [entry.small]
    if choice in _model_names():
        return [entry.models[choice]] if choice in entry.models else []
    sizes = choice.split("x")
    if not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise ValueError(
            f"shape {choice!r} is none of {', '.join(SETS)}, no model"
            f" ({', '.join(_model_names())}), and no sizes such as 8192x4096"
        )
    return [tuple(map(int, sizes))] if len(sizes) == len(entry.dims) else []


def _model_names() -> list[str]:
    return list(dict.fromkeys(name for entry in ENTRIES.values() for name in entry.models))
