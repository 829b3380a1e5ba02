"""Detection of graphs of ATen operators, which the rewrites cannot read."""

from __future__ import annotations

from torch import fx

from ..torch_private import OpOverload


def exported_operator(graph: fx.Graph) -> str | None:
    """An ATen operator of the graph; None for a graph of Dynamo.

    Dynamo's graphs hold the functions and methods that the code calls, with example values in
    `example_value`. `torch.export` and AOTAutograd make graphs of ATen operators, with `val`.
    """
    if any("example_value" in node.meta for node in graph.nodes):
        return None
    found = (node.target for node in graph.nodes if "val" in node.meta)
    return next((str(one) for one in found if isinstance(one, OpOverload)), None)


def refuse_exported(graph: fx.Graph) -> None:
    """Raise ValueError for a graph of ATen operators, in which no pattern would match."""
    operator = exported_operator(graph)
    if operator is not None:
        raise ValueError(
            "graph_pass: the graph must be one of Dynamo's, which Inductor hands to"
            f" pre_grad_custom_pass, got one of ATen's operators ({operator}), as torch.export and"
            " AOTAutograd make it; to export a model with the ops of liger_ops, call"
            " liger_ops.fuse(model) before torch.export.export"
        )
