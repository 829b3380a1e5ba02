"""Report of what the rewrites replaced in a graph, and what they refused."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import fx

_TORCH = str(Path(torch.__file__).parent)
_FRAME = re.compile(r'^ *File "(?P<file>[^"]*)", line (?P<line>\d+), in (?P<function>.*)$')


@dataclass(frozen=True)
class Finding:
    """A place where a rewrite was made, or where a pattern almost matched.

    Attributes:
        op: the rewrite: an op's name, "attention", "causal_attention" or "grouped_attention".
        reason: why it was refused, one clause; None where the rewrite was made.
        where: the innermost line of the code that the graph was traced from.
        device: the type of the device that the place runs on.
    """

    op: str
    reason: str | None
    where: str
    device: str

    @property
    def used(self) -> bool:
        return self.reason is None


@dataclass
class Report:
    """The findings of one or several graphs, in the order in which they were made."""

    findings: list[Finding] = field(default_factory=list)
    # The rewrite that is running and its node, for the report of a failure.
    at: tuple[str, fx.Node | None] = ("", None)
    _of: dict[fx.Node, Finding] = field(default_factory=dict, repr=False)

    def used(self, op: str, node: fx.Node) -> None:
        self._of[node] = Finding(op, None, source_line(node), device_of(node))
        self.findings.append(self._of[node])

    def superseded(self, node: fx.Node) -> None:
        """Remove the finding of the op `node`, which another op replaces."""
        if node in self._of:
            self.findings.remove(self._of.pop(node))

    def refused(self, op: str, node: fx.Node, reason: str) -> None:
        self.findings.append(Finding(op, reason, source_line(node), device_of(node)))

    def visiting(self, rewrite: str, nodes: Iterable[fx.Node]) -> Iterator[fx.Node]:
        """Yield the nodes, each recorded as the position of `rewrite`."""
        for node in nodes:
            self.at = (rewrite, node)
            yield node

    def counts(self) -> dict[str, int]:
        """How many times each op was used."""
        return counted(self.findings)


def counted(findings: Iterable[Finding]) -> dict[str, int]:
    """Number of rewrites made, for each op."""
    return dict(Counter(finding.op for finding in findings if finding.used))


def source_line(node: fx.Node) -> str:
    """Source line of `node`, such as "modeling_llama.py:73, forward: return self.weight * x".

    Frames of PyTorch's own code are skipped unless there are no others.
    """
    lines = (node.stack_trace or "").rstrip().splitlines()
    frames = [(frame, i) for i, line in enumerate(lines) if (frame := _FRAME.match(line))]
    if not frames:
        return node.name
    theirs = [one for one in frames if not one[0]["file"].startswith(_TORCH)]
    frame, i = (theirs or frames)[-1]
    code = lines[i + 1].strip() if i + 1 < len(lines) else ""
    return f"{Path(frame['file']).name}:{frame['line']}, {frame['function']}: {code}"


def device_of(node: fx.Node) -> str:
    """Device type of the value of `node`; "" if that is not a tensor."""
    value = node.meta.get("example_value")
    if isinstance(value, (tuple, list)) and value:
        value = value[0]
    device = getattr(value, "device", None)
    return "" if device is None else str(device.type)
