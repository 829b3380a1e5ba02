"""Graphs that the rewrites do not read: those of ATen's operators, in place of the code's."""

from __future__ import annotations

import torch
from torch import fx


def exported_operator(graph: fx.Graph) -> str | None:
    """One of the ATen operators that a graph is made of; None for a graph of Dynamo's.

    Dynamo's graphs hold the functions and methods that the code calls, and each node's value as
    `example_value`. `torch.export` and AOTAutograd make graphs of ATen's operators, with `val`.
    """
    if any("example_value" in node.meta for node in graph.nodes):
        return None
    found = (node.target for node in graph.nodes if "val" in node.meta)
    return next((str(one) for one in found if isinstance(one, torch._ops.OpOverload)), None)


def refuse_exported(graph: fx.Graph) -> None:
    """Raise for a graph of ATen's operators, in which no pattern would be found.

    Raises:
        ValueError: the graph is of ATen's operators.
    """
    operator = exported_operator(graph)
    if operator is not None:
        raise ValueError(
            "graph_pass: the graph must be one of Dynamo's, which Inductor hands to"
            f" pre_grad_custom_pass, got one of ATen's operators ({operator}), as torch.export and"
            " AOTAutograd make it; to export a model with the ops of liger_ops, call"
            " liger_ops.fuse(model) before torch.export.export"
        )
