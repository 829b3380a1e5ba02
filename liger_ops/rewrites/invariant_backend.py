"""The Dynamo backend of every compiled function within `liger_ops.invariant`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ..invariant_mode import NotInvariantError
from ..torch_private import CompileWrapper
from .backend import Compiled, liger


def operator_by_operator(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Compiled:
    """Compile by AOTAutograd alone, and refuse flex_attention, whose sums would not be noticed."""
    graphs = (part.graph for part in module.modules() if isinstance(part, fx.GraphModule))
    flex = torch.ops.higher_order.flex_attention
    if any(node.target is flex for graph in graphs for node in graph.nodes):
        # An error in a backend becomes one of Dynamo's.
        return refuse
    return CompileWrapper("aot_eager", None, {}, dynamic=None)(module, example_inputs)


def refuse(*args: Any) -> Any:
    raise NotInvariantError(
        "liger_ops.invariant: flex_attention is covered where a rewrite makes it varlen_attention:"
        " with padding, causal windows and packed documents"
    )


# Inductor divides a sum among programs by the size of the batch, and which operations it fuses,
# with the rounding between them left out, depends on sizes too. So the graphs of AOTAutograd run
# operator by operator. No variant is made for masks of ones: padding is never looked at.
OPTIONS = {"inner_backend": operator_by_operator, "rewrites": "all", "padding": True}


def invariant_backend(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Compiled:
    """Compile with all rewrites of the backend `liger`, and call each operator of the graph."""
    return liger(module, example_inputs, options=OPTIONS)
