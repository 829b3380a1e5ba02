"""The Dynamo backend of every compiled function within `liger_ops.invariant`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from .backend import Compiled, liger

# Inductor divides a sum among programs by the size of the batch, and which operations it fuses,
# with the rounding between them left out, depends on sizes too. So the graphs of AOTAutograd run
# operator by operator. No variant is made for masks of ones: padding is never looked at.
OPTIONS = {"inner_backend": "aot_eager", "rewrites": "all", "padding": True}


def invariant_backend(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Compiled:
    """Compile with all rewrites of the backend `liger`, and call each operator of the graph."""
    return liger(module, example_inputs, options=OPTIONS)
