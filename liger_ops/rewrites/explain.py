"""Explain what the backend `liger` would do with a model."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from . import rewrite
from .attention.runtime.mask_inputs import put_known
from .attention.runtime.mask_outputs import with_data
from .attention.runtime.padding import assume_what_is_seen
from .attention.runtime.variants import duplicate
from .differences import Verification
from .engine.report import Finding, Findings
from .state import state_kept
from .table import counted, table
from .verify import verify as measure


@dataclass(frozen=True)
class Explanation(Findings):
    """The result of `explain`. `print` shows it as a table.

    The counts are those of `options={"rewrites": "all"}`; the table marks the ops that are left to
    Inductor by default.

    Attributes:
        findings: every place where an op was used, and every place where a pattern almost matched.
        graphs: the number of graphs that Dynamo captured.
        graph_breaks: the reasons for more than one graph.
        verification: with verify=True, the changes of the loss and the gradients.
    """

    findings: tuple[Finding, ...] = ()
    graphs: int = 0
    graph_breaks: tuple[str, ...] = ()
    verification: Verification | None = None

    def __str__(self) -> str:
        breaks = len(self.graph_breaks)
        lines = [f"{counted(self.graphs, 'graph')}, {counted(breaks, 'graph break')}"]
        for reason in self.graph_breaks:
            lines += textwrap.wrap(reason, 96, initial_indent="  ", subsequent_indent="    ")
        lines += table(self.findings)
        if self.verification is not None:
            lines.append(str(self.verification))
        return "\n".join(lines)


def explain(
    model: Callable[..., Any], *args: Any, verify: bool = False, **kwargs: Any
) -> Explanation:
    """Explain what `torch.compile(model, backend="liger")` would do for these arguments.

    The model runs once, eagerly and unchanged, while Dynamo traces it; nothing is compiled. Where
    the backend looks at a padding mask, the findings are those of the variant that this batch
    needs. Buffers
    and random state are restored. Like `torch._dynamo.explain`, this clears Dynamo's cache of
    compiled code.

    With `verify` the loss and its gradients are also measured on this batch: with the unchanged
    graph, with every rewrite made, and, as the truth, unchanged with all arithmetic in float64
    (float32 if a half-precision model has operations that float64 lacks). Run it before a long
    training. It needs the memory of a training step in float64, and changes no `.grad`. The loss is
    the output's `loss`, the output itself or the first of a tuple if scalar, or a weighted sum of
    the output's tensors. For a model that `fuse` changed the unchanged graph is that of the model
    without `fuse`. A copy of it, fused and unfused, then also runs eagerly in float64, where only
    rounding may differ.

    Args:
        model: a module or a function.
        *args, **kwargs: the arguments of the call.
        verify: whether to measure the loss and the gradients.

    Returns:
        An `Explanation`, as data and printed as a table: where an op is used and which kernel would
        run, where a pattern almost matched and why it was refused, the graph breaks, and
        `verification`: the largest differences of the loss and of each gradient, with the error of
        the dtype itself beside them, and whether they agree.

    Raises:
        TypeError: verify is not a bool.
        ValueError: with verify, the output has no gradient.

    Example:
        >>> norm = torch.nn.RMSNorm(8, eps=1e-6)
        >>> liger_ops.explain(norm, torch.ones(2, 8)).counts()
        {'rms_norm': 1}
    """
    from ..torch_private import counters

    if not isinstance(verify, bool):
        raise TypeError(f"explain: verify must be a bool, got {type(verify).__name__}")
    findings: list[Finding] = []
    graphs = 0

    def backend(module: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        nonlocal graphs
        graphs += 1
        untouched, rewritten = duplicate(module), duplicate(module)
        wrap = with_data(untouched)
        data = put_known(rewritten, example_inputs)
        assume_what_is_seen(rewritten, [*example_inputs, *data])
        findings.extend(rewrite(rewritten).findings)
        return untouched.forward if wrap is None else wrap(untouched.forward)

    before = Counter(counters["graph_break"])
    torch.compiler.reset()
    try:
        with state_kept(model):
            torch.compile(model, backend=backend)(*args, **kwargs)
        verification = measure(model, args, kwargs) if verify else None
    finally:
        torch.compiler.reset()
    breaks = Counter(counters["graph_break"]) - before
    reasons = tuple(" ".join(str(reason).split()) for reason in breaks.elements())
    return Explanation(tuple(findings), graphs, reasons, verification)
