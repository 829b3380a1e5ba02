"""The table of docs/losses.md for those who come from Liger-Kernel names what exists."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import liger_ops
from liger_ops import losses
from liger_ops.losses.kto import LOSS_TYPES
from liger_ops.losses.pair_losses import PAIR_LOSSES

DOCUMENT = Path(__file__).parents[2] / "docs" / "losses.md"


def names() -> set[str]:
    """Return the names of ops, losses and modules, their arguments and the fields of outputs."""
    found = {*losses.__all__, *dir(liger_ops)}
    public = [getattr(losses, name) for name in losses.__all__]
    for thing in [
        *public,
        losses.modules.LinearLoss,
        liger_ops.log_prob,
        liger_ops.linear_divergence,
    ]:
        found |= set(getattr(thing, "_fields", ()))
        found |= set(inspect.signature(thing).parameters)
        found |= set(inspect.signature(getattr(thing, "forward", thing)).parameters)
    return found


def test_names_of_the_table_exist() -> None:
    _, section = DOCUMENT.read_text().split("## Coming from Liger-Kernel\n")
    section, *_ = section.split("\n## ")
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line[:2] == "| "][1:]
    assert len(rows) > 15 and all(len(row) == 2 for row in rows)
    here = {name for _, ours in rows for name in re.findall(r"`(\w+)", ours)}
    assert len(here) > 25 and here - names() == set()
    loss_types = set(re.findall(r'"(\w+)"', section))
    assert loss_types and loss_types <= {*PAIR_LOSSES, *LOSS_TYPES}
