"""The rewrites of Dynamo's graph, one a file, in the order in which they run."""

from __future__ import annotations

from collections.abc import Callable, Collection

from torch import fx

from . import (
    causal_mask,
    clamped_swiglu,
    cross_entropy,
    fused_add_rms_norm,
    geglu,
    group_norm,
    grouped_heads,
    layer_norm,
    linear_cross_entropy,
    recompute,
    relu_squared,
    rms_norm,
    rope,
    swiglu,
)
from .report import Report

Rewrite = Callable[[fx.Graph, Report], None]

REWRITES: dict[str, Rewrite] = {
    "causal_attention": causal_mask.rewrite,
    # Of the attentions that have no mask.
    "grouped_attention": grouped_heads.rewrite,
    # Before rms_norm, which is what follows the subtraction of the mean.
    "layer_norm": layer_norm.rewrite,
    "rms_norm": rms_norm.rewrite,
    # Of the norms that the one before it found.
    "fused_add_rms_norm": fused_add_rms_norm.rewrite,
    "group_norm": group_norm.rewrite,
    "clamped_swiglu": clamped_swiglu.rewrite,
    "swiglu": swiglu.rewrite,
    "geglu": geglu.rewrite,
    "relu_squared": relu_squared.rewrite,
    "rope": rope.rewrite,
    # Before cross_entropy, which takes the losses whose logits are needed.
    "linear_cross_entropy": linear_cross_entropy.rewrite,
    "cross_entropy": cross_entropy.rewrite,
}


def rewrite(module: fx.GraphModule, names: Collection[str] | None = None) -> Report:
    """Run the rewrites of `names`, or all, on `module` and the graphs that it calls, in place."""
    report = Report()
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            # What a subgraph is called under, such as torch.no_grad, is not known in it.
            part.meta["is_subgraph"] = part is not module
            _rewrite(part.graph, report, names)
            part.recompile()
    return report


def rewrite_graph(graph: fx.Graph, names: Collection[str] | None = None) -> Report:
    """The same for a graph, whose module the caller compiles anew."""
    module = graph.owning_module
    if isinstance(module, fx.GraphModule) and module.graph is graph:
        return rewrite(module, names)
    report = Report()
    _rewrite(graph, report, names)
    return report


def _rewrite(graph: fx.Graph, report: Report, names: Collection[str] | None) -> None:
    for name, one in REWRITES.items():
        if names is None or name in names:
            one(graph, report)
    recompute.mark(graph)
    graph.lint()
