"""The rewrites as one of Inductor's passes before autograd."""

from __future__ import annotations

import sys
from collections.abc import Collection

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from ...compile_cache import package_hash
from . import rewrite
from .chosen import checked_strict, chosen
from .exported import refuse_exported
from .inductor import declare_ops
from .unfused_loss import warn


def graph_pass(
    rewrites: str | Collection[str] | None = None, *, strict: bool | None = None
) -> LigerGraphPass:
    """The rewrites of the backend `liger`, as a pass for those who compose their own.

        torch.compile(model, options={"pre_grad_custom_pass": liger_ops.graph_pass()})

    Its `uuid()` is a hash of this package, so that Inductor's caches stay usable and notice an
    upgrade. On a hit they skip the pass along with the compilation.

    Args:
        rewrites: the names of those to make, of `liger_ops.lowering.passes.REWRITES`, or "all";
            None for those that pay before Inductor.
        strict: whether an exception in a rewrite is raised; by default the graph is left as it
            came, with a warning.

    Returns:
        The pass, for one configuration of Inductor or, by `liger_ops.enable`, for all.

    Raises:
        TypeError: rewrites or strict is of another type.
        ValueError: there is no such rewrite. The pass raises it for a graph of ATen's operators, as
            torch.export makes it: the rewrites read Dynamo's.
    """
    return LigerGraphPass(
        chosen(rewrites, True, "graph_pass: rewrites"), checked_strict(strict, "graph_pass: strict")
    )


class LigerGraphPass(CustomGraphPass):
    """See `liger_ops.graph_pass`."""

    def __init__(self, names: Collection[str], strict: bool | None) -> None:
        self.names, self.strict = names, strict

    def __call__(self, graph: fx.Graph) -> None:
        refuse_exported(graph)
        if _is_for_a_subgraph():
            return
        declare_ops()
        module, strict = graph.owning_module, self.strict
        if module is None:
            # There is nothing to put the graph back into, were a rewrite to fail.
            module, strict = fx.GraphModule(torch.nn.Module(), graph), True
        warn(rewrite(module, self.names, strict=strict).findings)

    def uuid(self) -> str:
        return f"liger_ops {package_hash()} {','.join(sorted(self.names))}"


def _is_for_a_subgraph() -> bool:
    """Whether Inductor is at a subgraph. It visits those first, one call of its own within another;
    what calls a subgraph, and so whether it may be rewritten, is known in the graph around it."""
    depth, frame = 0, sys._getframe()
    while frame is not None:
        depth += frame.f_code.co_name == "_recursive_pre_grad_passes"
        frame = frame.f_back  # type: ignore[assignment]
    return depth > 1
