"""Capture the graphs that torch.compile makes of a function."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd


class Recorder:
    """A backend that keeps the traced forward and backward graphs, and runs them.

    `change` is called with each graph first, and may change it.
    """

    def __init__(self, change: Callable[[torch.fx.GraphModule], object] = bool) -> None:
        self.change = change
        self.forwards: list[torch.fx.GraphModule] = []
        self.backwards: list[torch.fx.GraphModule] = []
        # The ops of each graph before it is changed.
        self.ops: list[Counter[str]] = []

    def backend(self, **options: Any) -> Callable[..., Any]:
        def keep(graphs: list[torch.fx.GraphModule]) -> Callable[..., Any]:
            def compile_graph(graph: torch.fx.GraphModule, inputs: Any) -> Any:
                self.ops.append(liger_ops_of([graph]))
                self.change(graph)
                graphs.append(graph)
                return make_boxed_func(graph.forward)

            return compile_graph

        compilers = {"fw_compiler": keep(self.forwards), "bw_compiler": keep(self.backwards)}
        return aot_autograd(**compilers, **options)


def liger_ops_of(graphs: list[torch.fx.GraphModule]) -> Counter[str]:
    """Count each liger op in the graphs."""
    names = (str(node.target) for graph in graphs for node in graph.graph.nodes)
    return Counter(name.split(".")[1] for name in names if name.startswith("liger."))
