"""Findings: where ops are used, and where they are not and why, in a graph or in a model."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx

_TORCH = str(Path(torch.__file__).parent)
_FRAME = re.compile(r'^ *File "(?P<file>[^"]*)", line (?P<line>\d+), in (?P<function>.*)$')


# Rewrites to ops of a hidden state and its head's weight, the first two arguments.
HEADS = ("linear_cross_entropy", "linear_log_prob")


@dataclass(frozen=True)
class Finding:
    """A place where an op is used, or where one was looked for and is not used.

    Attributes:
        op: the rewrite: an op's name, or a rewrite of attention, such as "causal_attention"; "" for
            a module that `fuse` left.
        reason: why it is not used, one clause; None where it is.
        where: the innermost line of the code that a graph was traced from, or the name of a module
            in its model, "" for the model itself.
        device: the type of the device that the place runs on; "" for a module.
        class_name, kind, options: with `fuse`, the module's class, the kind of part that it is,
            and the op's options.
        logits_bytes: bytes of logits for each token that a fused loss with its head does not keep:
            V * (bytes of a logit + 4) for V words, the logits in the dtype of the head's weight and
            their log-softmax in float32, which the loss of logits keeps for its backward; 0 for
            other findings.
    """

    op: str
    reason: str | None
    where: str
    device: str = ""
    class_name: str = ""
    kind: str = ""
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    logits_bytes: int = 0

    @property
    def used(self) -> bool:
        return self.reason is None


class Findings:
    """What `explain` and `fuse` return: findings, counted and printed as a table."""

    findings: Sequence[Finding]

    def counts(self) -> dict[str, int]:
        """Number of places where each op is used."""
        return dict(Counter(finding.op for finding in self.findings if finding.used))

    @property
    def left(self) -> tuple[Finding, ...]:
        """The places where no op is used, each with the reason."""
        return tuple(finding for finding in self.findings if not finding.used)


@dataclass
class Report(Findings):
    """The findings of one or several graphs, in the order in which they were made."""

    findings: list[Finding] = field(default_factory=list)
    # The rewrite that is running and its node, for the report of a failure.
    at: tuple[str, fx.Node | None] = ("", None)
    _of: dict[fx.Node, Finding] = field(default_factory=dict, repr=False)
    _seen: set[tuple[str, fx.Node]] = field(default_factory=set, repr=False)

    def used(self, op: str, node: fx.Node) -> None:
        avoided = 0
        if op in HEADS:
            avoided = logits_bytes(node.args[1].meta["example_value"])  # type: ignore[union-attr]
        self._of[node] = Finding(op, None, source_line(node), device_of(node), logits_bytes=avoided)
        self.findings.append(self._of[node])

    def superseded(self, node: fx.Node) -> None:
        """Remove the finding of `node`: another op replaces the op, or what was refused."""
        if node in self._of:
            self.findings.remove(self._of.pop(node))

    def refused(self, op: str, node: fx.Node, reason: str) -> None:
        finding = Finding(op, reason, source_line(node), device_of(node))
        self._of.setdefault(node, finding)
        self.findings.append(finding)

    def visiting(self, rewrite: str, nodes: Iterable[fx.Node]) -> Iterator[fx.Node]:
        """Yield the nodes, each recorded as the position of `rewrite`."""
        for node in nodes:
            self.at = (rewrite, node)
            yield node

    def once(self, rewrite: str, nodes: Iterable[fx.Node]) -> Iterator[fx.Node]:
        """Visit the nodes that this rewrite has not visited: a subgraph is rewritten with the graph
        that calls it, and again by itself."""
        for node in self.visiting(rewrite, nodes):
            if (rewrite, node) not in self._seen and not node._erased:
                self._seen.add((rewrite, node))
                yield node


def logits_bytes(weight: torch.Tensor) -> int:
    """`Finding.logits_bytes` of a head with this weight, 0 for a symbolic number of words."""
    V = weight.shape[0]
    # int() of a symbol would make a constant of it.
    return V * (weight.dtype.itemsize + torch.float32.itemsize) if isinstance(V, int) else 0


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
