"""Explain what the backend `liger` would do with a model."""

from __future__ import annotations

import contextlib
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from . import rewrite
from .mask_inputs import put_known
from .mask_outputs import with_data
from .padding import assume_what_is_seen, duplicate
from .report import Finding, Findings
from .table import counted, table
from .verify import Verification
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
    the output's `loss`, the output itself, or a weighted sum of its tensors.

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
    from ...torch_private import counters

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
        with _state_kept(model):
            torch.compile(model, backend=backend)(*args, **kwargs)
        verification = measure(model, args, kwargs, _state_kept) if verify else None
    finally:
        torch.compiler.reset()
    breaks = Counter(counters["graph_break"]) - before
    reasons = tuple(" ".join(str(reason).split()) for reason in breaks.elements())
    return Explanation(tuple(findings), graphs, reasons, verification)


@contextlib.contextmanager
def _state_kept(model: Callable[..., Any]) -> Iterator[None]:
    """Restore a module's buffers and the random state of the CPU and the current device."""
    buffers = list(model.buffers()) if isinstance(model, torch.nn.Module) else []
    before = [buffer.detach().clone() for buffer in buffers]
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        random = torch.random.fork_rng(devices=[])
    else:
        current = torch.accelerator.current_device_index()
        random = torch.random.fork_rng(devices=[current], device_type=accelerator.type)
    with random:
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, value in zip(buffers, before, strict=True):
                    buffer.copy_(value)
