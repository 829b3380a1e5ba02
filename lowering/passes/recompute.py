"""What may be computed again in the backward, and what must not.

Under `torch._functorch.config.activation_memory_budget` below 1, the partitioner saves fewer
activations, and computes again what it takes for cheap. It cannot know of an op what it costs.
"""

from __future__ import annotations

import torch._functorch.config as functorch_config
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

# Their forward may have the gradients: to run it again is to multiply all logits again.
SAVED = {
    "linear_cross_entropy",
    "linear_cross_entropy_forward",
    "cross_entropy",
    "cross_entropy_forward",
}


def mark(graph: fx.Graph) -> None:
    """Mark the ops of this package: the losses to be saved, and with a budget the others, which
    read and write memory once, to be computed again."""
    for node in graph.nodes:
        if node.op != "call_function" or getattr(node.target, "namespace", None) != "liger":
            continue
        name = node.target._opname
        if name in SAVED:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        elif functorch_config.activation_memory_budget < 1 and "recompute" not in node.meta:
            node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
            # One region: with several, what one hands to the next would be saved.
            node.meta["ac_graph_id"] = 0
