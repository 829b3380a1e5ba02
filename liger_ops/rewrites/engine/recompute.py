"""Mark which ops may be recomputed in the backward, and which must not.

With `torch._functorch.config.activation_memory_budget` below 1, AOTAutograd's partitioner saves
fewer activations, and recomputes what it estimates to be cheap. It cannot estimate the cost of
custom ops.
"""

from __future__ import annotations

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from ...torch_private import functorch_config

# Losses, whose forward may also compute the gradients. To recompute one would recompute all logits,
# only to save a few numbers per token.
SAVED = {
    name + suffix
    for name in (
        "linear_cross_entropy", "cross_entropy", "linear_divergence", "linear_log_prob", "log_prob",
        "linear_top_k", "linear_score_centering",
    )
    for suffix in ("", "_forward")
}  # fmt: skip


def mark(graph: fx.Graph) -> None:
    """Mark the losses as saved and, with a budget below 1, the other ops as recomputed.

    The other ops read and write memory once.
    """
    for node in graph.nodes:
        if node.op != "call_function" or getattr(node.target, "namespace", None) != "liger":
            continue
        name = node.target._opname
        if name in SAVED:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        elif functorch_config.activation_memory_budget < 1 and "recompute" not in node.meta:
            node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
            # One region for all ops: a value that passes from one region to another would be saved.
            node.meta["ac_graph_id"] = 0
