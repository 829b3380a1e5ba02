"""The rewrites as a `pre_grad_custom_pass` of Inductor."""

from __future__ import annotations

import sys
from collections.abc import Collection

import torch
from torch import fx

from ..compile_cache import package_hash
from ..torch_private import CustomGraphPass, OpOverload
from . import rewrite
from .default_rewrites import checked_flag, chosen
from .losses.unfused_loss import warn


def graph_pass(
    rewrites: str | Collection[str] | None = None, *, strict: bool | None = None
) -> LigerGraphPass:
    """Return the rewrites of the backend `liger` as a pass, to be combined with other passes.

        torch.compile(model, options={"pre_grad_custom_pass": liger_ops.graph_pass()})

    Its `uuid()` contains a hash of this package, so that Inductor's caches work and an upgrade
    invalidates them. On a cache hit neither the pass nor the compilation runs.

    Args:
        rewrites: names from `liger_ops.rewrites.REWRITES`, or "all"; None for the default
            before Inductor.
        strict: whether an exception in a rewrite is raised; by default the graph stays unchanged,
            with a warning.

    Returns:
        The pass. It applies to the compilations whose configuration names it; `liger_ops.enable`
        sets it for all.

    Raises:
        TypeError: rewrites or strict has another type.
        ValueError: rewrites names a rewrite that does not exist. The pass itself raises ValueError
            for a graph of ATen operators, such as torch.export's.
    """
    return LigerGraphPass(
        chosen(rewrites, True, "graph_pass: rewrites"), checked_flag(strict, "graph_pass: strict")
    )


class LigerGraphPass(CustomGraphPass):
    """The result of `liger_ops.graph_pass`.

    With `skips_exported` it leaves a graph of ATen operators as it is, instead of raising an error.
    """

    def __init__(
        self, names: Collection[str], strict: bool | None, skips_exported: bool = False
    ) -> None:
        self.names, self.strict, self.skips_exported = names, strict, skips_exported

    def __call__(self, graph: fx.Graph) -> None:
        if self.skips_exported and exported_operator(graph) is not None:
            return
        refuse_exported(graph)
        if _is_for_a_subgraph():
            return
        module, strict = graph.owning_module, self.strict
        if module is None:
            # Without an owning module the graph cannot be restored if a rewrite fails.
            module, strict = fx.GraphModule(torch.nn.Module(), graph), True
        warn(rewrite(module, self.names, strict=strict).findings)

    def uuid(self) -> str:
        return f"liger_ops {package_hash()} {','.join(sorted(self.names))}"


def _is_for_a_subgraph() -> bool:
    """Return whether Inductor is at a subgraph, for which it calls its own function recursively.

    Subgraphs are rewritten with the outer graph, which shows how they are called.
    """
    depth, frame = 0, sys._getframe()
    while frame is not None:
        depth += frame.f_code.co_name == "_recursive_pre_grad_passes"
        frame = frame.f_back  # type: ignore[assignment]
    return depth > 1


def exported_operator(graph: fx.Graph) -> str | None:
    """Return the name of an ATen operator in the graph; None for a graph of Dynamo.

    Dynamo's graphs hold the functions and methods that the code calls, with example values in
    `example_value`. `torch.export` and AOTAutograd make graphs of ATen operators, with `val`.
    """
    if any("example_value" in node.meta for node in graph.nodes):
        return None
    targets = (node.target for node in graph.nodes if "val" in node.meta)
    return next((str(target) for target in targets if isinstance(target, OpOverload)), None)


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
