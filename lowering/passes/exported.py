"""Graphs that the rewrites do not read: those of ATen's operators, in place of the code's."""

from __future__ import annotations

import torch
from torch import fx


def refuse_exported(graph: fx.Graph) -> None:
    """Raise for a graph of ATen's operators, in which no pattern would be found.

    Dynamo's graphs hold the functions and methods that the code calls, and each node's value as
    `example_value`. `torch.export` and AOTAutograd make graphs of ATen's operators, with `val`.

    Raises:
        ValueError: the graph is of ATen's operators.
    """
    if any("example_value" in node.meta for node in graph.nodes):
        return
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and "val" in node.meta:
            raise ValueError(
                "graph_pass: the graph must be one of Dynamo's, which Inductor hands to"
                f" pre_grad_custom_pass, got one of ATen's operators ({node.target}), as"
                " torch.export and AOTAutograd make it; to export a model with the ops of"
                " liger_ops, call liger_ops.fuse(model) before torch.export.export"
            )
