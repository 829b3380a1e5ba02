"""Explain what the backend `liger` would do with a model, and print it as a table."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..library import COMPOSED, DEVICES, OPS, implementation
from . import rewrite
from .attention.runtime.mask_inputs import MASKS
from .attention.runtime.mask_outputs import with_data
from .attention.runtime.padding import PADDING
from .attention.runtime.variants import duplicate
from .default_rewrites import KEPT_BY_INDUCTOR
from .differences import Verification
from .engine.report import Finding, Findings, first_line
from .gain import MIB, Gain, measured, saved_bytes
from .verify import state_kept
from .verify import verify as verified

# A number in the name of a module: the position of a layer in its list.
_POSITION = re.compile(r"(?<![^.])\d+(?![^.])")


def table(findings: Sequence[Finding], device: str = "") -> list[str]:
    """Return the lines of the table: the ops that are used, then the places that are left.

    `device` is the device of findings that name none: modules.
    """
    used = [finding for finding in findings if finding.used]
    left = [finding for finding in findings if not finding.used]
    lines = [f"{counted(len(used), 'op')} used", *_entries(used)]
    without = sorted({finding.device or device for finding in used} - {*DEVICES, "", "meta"})
    if without:
        lines.append(f"  Nothing is faster on {' and '.join(without)}, where there are no kernels.")
    if left:
        lines += [f"{counted(len(left), 'place')} left", *_entries(left)]
    return lines


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _entries(findings: Sequence[Finding]) -> list[str]:
    """Return an entry for each group of findings with the same text at the same place.

    An entry has their number, the text and the place. Modules whose names differ only in the
    position of their layer are at one place.
    """
    width = max(60, shutil.get_terminal_size((100, 24)).columns)
    groups: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        place = _POSITION.sub("*", finding.where) if finding.class_name else finding.where
        groups.setdefault((_text(finding), place), []).append(finding)
    lines = []
    for (text, place), group in groups.items():
        lines += textwrap.wrap(
            f"{len(group)} x {text}", width, initial_indent="  ", subsequent_indent="      "
        )
        where = group[0].where if len(group) == 1 else place
        where = f"      {where or '(the model itself)'}"
        lines.append(where if len(where) <= width else f"{where[: width - 4]} ...")
    return lines


def _text(finding: Finding) -> str:
    """Write a finding's op, then why it is not used, or the module's class, or the kernel."""
    options = ", ".join(f"{name}={value!r}" for name, value in finding.options.items())
    subject = finding.op or finding.class_name
    return f"{subject}{f'({options})' if options else ''}: {_detail(finding)}"


def _detail(finding: Finding) -> str:
    if finding.reason is not None:
        return finding.reason
    saved = ""
    if finding.logits_bytes:
        # bytes a token * 1,000 tokens / 1e6 bytes a MB
        saved = f", without {finding.logits_bytes / 1000:,.1f} MB of logits per 1,000 tokens"
    if finding.class_name:
        return finding.class_name + saved
    kept = ", by default left to Inductor" if finding.op in KEPT_BY_INDUCTOR else ""
    return _implementation(finding) + kept + saved


def _implementation(finding: Finding) -> str:
    """Return the name of the implementation that runs a finding's op on its device."""
    if finding.op not in COMPOSED and finding.op not in OPS:
        return "PyTorch's own"
    name = f"{finding.op}_forward" if finding.op in COMPOSED else finding.op
    device = finding.device if finding.device in DEVICES else ""
    return implementation(OPS[name], device)


@dataclass(frozen=True)
class Explanation(Findings):
    """The result of `explain`. `print` shows it as a table.

    The counts are those of `options={"rewrites": "all"}`; the table marks the ops that are left to
    Inductor by default.

    Attributes:
        findings: every place where an op is used, and every near miss, with the reason.
        graphs: the number of graphs that Dynamo captured.
        graph_breaks: the reasons for more than one graph.
        verification: with verify=True, the changes of the loss and the gradients.
        saved_bytes: the bytes that autograd saves for the backward of this batch if nothing is
            compiled, parameters and arguments not counted: without the ops, and with them; None if
            unknown.
        gain: with measure=True, the time and memory of training steps.
    """

    findings: tuple[Finding, ...] = ()
    graphs: int = 0
    graph_breaks: tuple[str, ...] = ()
    verification: Verification | None = None
    saved_bytes: tuple[int, int] | None = None
    gain: Gain | None = None

    def __str__(self) -> str:
        breaks = len(self.graph_breaks)
        lines = [f"{counted(self.graphs, 'graph')}, {counted(breaks, 'graph break')}"]
        for reason in self.graph_breaks:
            lines += textwrap.wrap(reason, 96, initial_indent="  ", subsequent_indent="    ")
        lines += table(self.findings)
        if self.saved_bytes is not None and any(self.saved_bytes):
            before, after = (f"{count / MIB:,.1f} MiB" for count in self.saved_bytes)
            lines.append(f"saved for the backward of this batch: {before}, with the ops {after}")
        for section in (self.gain, self.verification):
            if section is not None:
                lines.append(str(section))
        return "\n".join(lines)


def explain(
    model: Callable[..., Any], *args: Any, verify: bool = False, measure: bool = False,
    **kwargs: Any,
) -> Explanation:  # fmt: skip
    """Explain what `torch.compile(model, backend="liger")` would do for these arguments.

    The model runs once, eagerly and unchanged, while Dynamo traces it; nothing is compiled. Where
    the backend reads a padding mask, the findings are those of the variant that this batch needs.
    Buffers and random state are restored. Like `torch._dynamo.explain`, this clears Dynamo's cache
    of compiled code.

    With `verify` the loss and its gradients are also measured on this batch: with the unchanged
    graph, with every rewrite made, and, as the truth, unchanged with all arithmetic in float64
    (float32 if a half-precision model has operations that float64 lacks). Run it before a long
    training. It needs the memory of a training step in float64, and changes no `.grad`. The loss is
    the output's `loss`, the output itself or the first of a tuple if scalar, or a weighted sum of
    the output's tensors. For a model that `fuse` changed the unchanged graph is that of the model
    without `fuse`. A copy of it, fused and unfused, then also runs eagerly in float64, where only
    rounding may differ.

    With `measure` training steps on this batch, forward and gradients, are timed on the model's
    device: eager, by `torch.compile`, and with the rewrites that are made by default; for a fused
    model with and without `fuse`, eager and by `torch.compile`. Each has its median, its peak
    memory and the time of its compilation, without caches; and there is a step without each
    rewrite that alone changes more than noise. Each step is compiled, so a large model takes
    minutes.

    Args:
        model: a module or a function.
        *args, **kwargs: the arguments of the call.
        verify: whether to measure the loss and the gradients.
        measure: whether to measure the time and memory of steps.

    Returns:
        An `Explanation`, as data and printed as a table: where an op is used and which kernel would
        run, where a pattern almost matched and why it was refused, the graph breaks, and
        `verification`: the largest differences of the loss and of each gradient, with the error of
        the dtype itself beside them, and whether they agree.

    Raises:
        TypeError: verify or measure is not a bool, or the model fails with its only argument, a
            dictionary.
        ValueError: with verify, the output has no gradient.

    Example:
        >>> norm = torch.nn.RMSNorm(8, eps=1e-6)
        >>> liger_ops.explain(norm, torch.ones(2, 8)).counts()
        {'rms_norm': 1}
    """
    from ..torch_private import counters

    for name, option in (("verify", verify), ("measure", measure)):
        if not isinstance(option, bool):
            raise TypeError(f"explain: {name} must be a bool, got {type(option).__name__}")
    findings: list[Finding] = []
    saved: tuple[int, int] | None = (0, 0)
    graphs = 0

    def backend(module: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        nonlocal graphs, saved
        graphs += 1
        untouched, rewritten = duplicate(module), duplicate(module)
        wrap = with_data(untouched)
        data = MASKS.assume(rewritten, example_inputs)
        PADDING.assume(rewritten, [*example_inputs, *data])
        findings.extend(rewrite(rewritten).findings)
        without_ops, with_ops = saved_bytes(untouched), saved_bytes(rewritten)
        if saved is not None and without_ops is not None and with_ops is not None:
            saved = (saved[0] + without_ops, saved[1] + with_ops)
        else:
            saved = None
        return untouched.forward if wrap is None else wrap(untouched.forward)

    before = Counter(counters["graph_break"])
    torch.compiler.reset()
    try:
        with state_kept(model):
            try:
                torch.compile(model, backend=backend)(*args, **kwargs)
            except Exception as error:
                if len(args) != 1 or kwargs or not isinstance(args[0], Mapping):
                    raise
                # Some models take a dictionary as an argument, so that a failure alone tells.
                raise TypeError(
                    f"explain: the model fails with its only argument, a {type(args[0]).__name__}"
                    f" ({first_line(error)}). The arguments of a call, as in model(**batch), are"
                    " accepted as explain(model, **batch)"
                ) from error
        verification = verified(model, args, kwargs) if verify else None
        used = [finding.op for finding in findings if finding.used]
        gain = measured(model, args, kwargs, used) if measure else None
    finally:
        torch.compiler.reset()
    breaks = Counter(counters["graph_break"]) - before
    reasons = tuple(" ".join(str(reason).split()) for reason in breaks.elements())
    return Explanation(tuple(findings), graphs, reasons, verification, saved, gain)
