"""The rewrites of Dynamo's graph, in the order in which they run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any

from torch import fx

from ..torch_private import HigherOrderOperator
from .attention import causal_attention, grouped_attention, masked_attention, sdpa
from .engine import casts, recompute
from .engine.effects import subgraphs
from .engine.graph_state import copy_of
from .engine.report import Report, failed, is_strict
from .engine.rewrite import replace_all
from .layers import (
    activations,
    dense_experts,
    experts,
    gated_rms_norm,
    hyper_connections,
    layer_norm,
    modulated_norm,
    rms_norm,
)
from .layers.rope import rms_norm_rope, rope
from .losses import loss_ops, router_losses

Rewrite = Callable[[fx.Graph, Report], None]

# Higher-order operators that call a subgraph as if its code stood in the graph.
INLINED = {
    *("cond", "invoke_subgraph", "tag_activation_checkpoint"),
    *("wrap", "wrap_activation_checkpoint"),
}


def _patterns(name: str, spellings: Any, **options: Any) -> Rewrite:
    return functools.partial(replace_all, name=name, spellings=spellings, **options)


def _experts(graph: fx.Graph, report: Report) -> None:
    dense_experts.rewrite(graph, report)
    experts.rewrite(graph, report)


# Name -> rewrite, in the order in which they run. Comments say why the order matters.
REWRITES: dict[str, Rewrite] = {
    # Before causal_attention, which replaces the masks of calls.
    "attention": sdpa.rewrite,
    "causal_attention": causal_attention.rewrite,
    # After causal_attention, which is faster where the mask is causal.
    "masked_attention": masked_attention.rewrite,
    # After attention, which makes calls of a faster operator where these are the same.
    "eager_attention": masked_attention.rewrite_unfused,
    # After causal_attention, because it needs attention without a mask.
    "grouped_attention": grouped_attention.rewrite,
    # Before rms_norm, which would match the norm of the streams.
    "mhc_coeffs": hyper_connections.rewrite,
    # After mhc_coeffs, whose results it looks for.
    "mhc_pre": hyper_connections.rewrite_pre,
    "mhc_post_res": hyper_connections.rewrite_post_res,
    # Before rms_norm, which would match the part after the subtraction of the mean.
    "layer_norm": _patterns("layer_norm", layer_norm.SPELLINGS, by_rows=True),
    # Before rms_norm, which would match the norm without its gate.
    "gated_rms_norm": _patterns("gated_rms_norm", gated_rms_norm.SPELLINGS),
    "rms_norm": _patterns("rms_norm", rms_norm.SPELLINGS, by_rows=True),
    # After layer_norm and rms_norm, whose ops they match, as fused_add_rms_norm does.
    "modulated_layer_norm": functools.partial(modulated_norm.rewrite, "layer_norm"),
    "modulated_rms_norm": functools.partial(modulated_norm.rewrite, "rms_norm"),
    "fused_add_rms_norm": rms_norm.add_residuals,
    "group_norm": _patterns("group_norm", layer_norm.GROUP_NORM),
    # Before the activations, which would match those of the experts.
    "moe_experts": _experts,
    "clamped_swiglu": _patterns("clamped_swiglu", activations.CLAMPED_SWIGLU),
    "swiglu": _patterns("swiglu", activations.SWIGLU),
    "geglu": _patterns("geglu", activations.GEGLU),
    "relu_squared": _patterns("relu_squared", activations.RELU_SQUARED),
    "rope": rope.rewrite,
    # After rope, whose ops it matches.
    "rms_norm_rope": rms_norm_rope.rewrite,
    # Before the ops of logits, which take the losses whose logits are used elsewhere.
    "linear_log_prob": functools.partial(loss_ops.rewrite, "linear_log_prob"),
    "linear_cross_entropy": functools.partial(loss_ops.rewrite, "linear_cross_entropy"),
    "log_prob": functools.partial(loss_ops.rewrite, "log_prob"),
    "cross_entropy": functools.partial(loss_ops.rewrite, "cross_entropy"),
    "router_losses": router_losses.rewrite,
}


def rewrite(
    module: fx.GraphModule, names: Collection[str] | None = None, *, strict: bool | None = None
) -> Report:
    """Run the rewrites `names`, or all, on `module` and the subgraphs that it calls, in place.

    If one raises an exception, `module` is restored and a warning is given; with `strict`, or
    LIGER_OPS_STRICT=1 in the environment, the exception is raised.
    """
    report = Report()
    modules = inlined(module)
    graphs = {} if is_strict(strict) else {m: copy_of(m.graph) for m in modules}
    try:
        # Imports the compiler, which importing liger_ops does not.
        from ..torch_private import disable_saved_tensors_hooks

        # The first call of a compiled function may be within hooks of saved tensors, such as those
        # of a checkpoint or of offloading. They must not see the fake tensors of a rewrite.
        with disable_saved_tensors_hooks():
            for graph_module in modules:
                # A subgraph does not show the modes of its caller, such as torch.no_grad.
                graph_module.meta["is_subgraph"] = graph_module is not module
                _rewrite(graph_module.graph, report, names)
                graph_module.recompile()
    except Exception as error:
        if is_strict(strict):
            raise
        for graph_module, graph in graphs.items():
            graph_module.graph = graph
        return failed(report, error)
    return report


def inlined(module: fx.GraphModule) -> list[fx.GraphModule]:
    """Return the module, and the subgraphs that it calls as if their code were inlined.

    Subgraphs of autograd functions, transforms and the like are excluded: their callers decide how
    they run.
    """
    modules = [module]
    for graph_module in modules:
        for node in graph_module.graph.nodes:
            if isinstance(node.target, HigherOrderOperator):
                is_inlined = node.target.name() in INLINED
                modules += [sub for sub in subgraphs(node) if is_inlined and sub not in modules]
    return modules


def _rewrite(graph: fx.Graph, report: Report, names: Collection[str] | None) -> None:
    for name, run in REWRITES.items():
        if names is None or name in names:
            report.at = (name, None)
            run(graph, report)
    casts.enter(graph)
    recompute.mark(graph)
    graph.lint()
