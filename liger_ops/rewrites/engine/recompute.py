"""Mark which ops may be recomputed in the backward, and which must not.

With `torch._functorch.config.activation_memory_budget` below 1, the partitioner saves fewer
activations and recomputes what it estimates to be cheap. It cannot estimate custom ops.
"""

from __future__ import annotations

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from ...torch_private import functorch_config

# Their forward may also compute the gradients; recomputing it would recompute all logits, to save a
# few numbers per token.
SAVED = {
    name + suffix
    for name in (
        "linear_cross_entropy", "cross_entropy", "linear_divergence", "linear_log_prob", "log_prob",
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
            # All in one region: values passed from one region to the next would be saved.
            node.meta["ac_graph_id"] = 0
