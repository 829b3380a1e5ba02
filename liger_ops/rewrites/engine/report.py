"""Findings: where in a graph or a model ops are used, and where they are not and why.

An exception in a rewrite is a bug of this package: it becomes a warning, or is raised if the
environment says so.
"""

from __future__ import annotations

import inspect
import os
import re
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import fx

from ...library import COMPOSED, OPS

_TORCH = str(Path(torch.__file__).parent)
_FRAME = re.compile(r'^ *File "(?P<file>[^"]*)", line (?P<line>\d+), in (?P<function>.*)$')


# Rewrites to ops whose first two arguments are a hidden state and the head's weight.
HEADS = ("linear_cross_entropy", "linear_log_prob")


@dataclass(frozen=True)
class Finding:
    """A place where an op is used, or where the code is close to an op and the op is not used.

    Attributes:
        op: the rewrite: an op's name, or a rewrite of attention, such as "causal_attention"; "" for
            a module that `fuse` left.
        reason: why the op is not used, one clause; None where it is used.
        where: the innermost line of the code that a graph was traced from, or the name of a module
            in its model, "" for the model itself.
        device: the type of the device that the place runs on; "" for a module.
        class_name, kind, options: with `fuse`, the module's class, what kind of module it is, and
            the op's options.
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
        """True if the op is used."""
        return self.reason is None


class Findings:
    """Findings that can be counted: the base of the results of `explain` and `fuse`."""

    findings: Sequence[Finding]

    def counts(self) -> dict[str, int]:
        """Return the number of places where each op is used."""
        return dict(Counter(finding.op for finding in self.findings if finding.used))

    @property
    def left(self) -> tuple[Finding, ...]:
        """The places where no op is used, each with the reason."""
        return tuple(finding for finding in self.findings if not finding.used)


@dataclass
class Report(Findings):
    """The findings of one or several graphs, in the order in which they were made."""

    findings: list[Finding] = field(default_factory=list)
    # The rewrite that is running and the node that it is at, for the report of a failure.
    at: tuple[str, fx.Node | None] = ("", None)
    _nodes: dict[fx.Node, Finding] = field(default_factory=dict, repr=False)
    _seen: set[tuple[str, fx.Node]] = field(default_factory=set, repr=False)

    def used(self, op: str, node: fx.Node) -> None:
        """Report that `node` is now a call of `op`."""
        avoided = 0
        if op in HEADS:
            avoided = logits_bytes(node.args[1].meta["example_value"])  # type: ignore[union-attr]
        self._nodes[node] = Finding(
            op, None, source_line(node), device_of(node), logits_bytes=avoided
        )
        self.findings.append(self._nodes[node])

    def superseded(self, node: fx.Node) -> None:
        """Remove the finding of `node`, because another op replaces its op or its refused code."""
        if node in self._nodes:
            self.findings.remove(self._nodes.pop(node))

    def refused(self, op: str, node: fx.Node, reason: str) -> None:
        """Report why `op` is not used at `node`."""
        finding = Finding(op, reason, source_line(node), device_of(node))
        self._nodes.setdefault(node, finding)
        self.findings.append(finding)

    def visiting(self, rewrite: str, nodes: Iterable[fx.Node]) -> Iterator[fx.Node]:
        """Yield the nodes, each recorded in `at` while `rewrite` is at it."""
        for node in nodes:
            self.at = (rewrite, node)
            yield node

    def once(self, rewrite: str, nodes: Iterable[fx.Node]) -> Iterator[fx.Node]:
        """Yield the nodes that this rewrite has not visited.

        A subgraph is rewritten with the graph that calls it, and again by itself.
        """
        for node in self.visiting(rewrite, nodes):
            if (rewrite, node) not in self._seen and not node._erased:
                self._seen.add((rewrite, node))
                yield node


def logits_bytes(weight: torch.Tensor) -> int:
    """Compute `Finding.logits_bytes` for a head's weight; 0 if the number of words is symbolic."""
    V = weight.shape[0]
    # int() of a symbol would add a guard, and make the compiled code valid for this size alone.
    return V * (weight.dtype.itemsize + torch.float32.itemsize) if isinstance(V, int) else 0


def source_line(node: fx.Node) -> str:
    """Return the source line of a node: "modeling_llama.py:73, forward: return self.weight * x".

    Frames of PyTorch's own code are skipped unless there are no others.
    """
    lines = (node.stack_trace or "").rstrip().splitlines()
    frames = [(frame, i) for i, line in enumerate(lines) if (frame := _FRAME.match(line))]
    if not frames:
        return node.name
    outside_torch = [pair for pair in frames if not pair[0]["file"].startswith(_TORCH)]
    frame, i = (outside_torch or frames)[-1]
    code = lines[i + 1].strip() if i + 1 < len(lines) else ""
    return f"{Path(frame['file']).name}:{frame['line']}, {frame['function']}: {code}"


def device_of(node: fx.Node) -> str:
    """Return the device type of the value of `node`; "" if that is not a tensor."""
    value = node.meta.get("example_value")
    if isinstance(value, (tuple, list)) and value:
        value = value[0]
    device = getattr(value, "device", None)
    return "" if device is None else str(device.type)


STRICT = "LIGER_OPS_STRICT"
T = TypeVar("T")
D = TypeVar("D")


def is_strict(strict: bool | None) -> bool:
    """Return whether an exception in a rewrite is raised; None stands for LIGER_OPS_STRICT."""
    return os.environ.get(STRICT, "0") not in ("", "0") if strict is None else strict


def first_line(error: Exception) -> str:
    """Return an error's type and the first line of its message."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def failed(report: Report, error: Exception) -> Report:
    """Warn of an error at `report.at`, and return the report of an unchanged graph."""
    rewrite, node = report.at
    where = "" if node is None else source_line(node)
    reason = f"the rewrite failed, {type(error).__name__}: {error}"
    warnings.warn(
        f"liger_ops: the rewrite {rewrite!r} failed{f' at {where}' if where else ''}"
        f" ({type(error).__name__}: {error}). This graph is compiled without any rewrite."
        " Please report this with the output of `python -m liger_ops` and the traceback of a run"
        f" with options={{'strict': True}}, or with {STRICT}=1 in the environment.",
        stacklevel=2,
    )
    return Report([Finding(rewrite, reason, where, "" if node is None else device_of(node))])


def guarded(
    name: str, strict: bool | None, function: Callable[..., T], *args: object, otherwise: D
) -> T | D:
    """Call `function`, a step of the rewrites; if it raises, warn and return `otherwise`.

    With `strict` the exception is raised.
    """
    try:
        return function(*args)
    except Exception as error:
        if is_strict(strict):
            raise
        failed(Report(at=(name, None)), error)
        return otherwise


def op_of(node: fx.Node) -> str | None:
    """Return the name of the op of liger_ops that a node calls, or None."""
    is_op = getattr(node.target, "namespace", None) == "liger"
    return node.target._opname if is_op else None  # type: ignore[union-attr]


def bound(nodes: Iterable[fx.Node]) -> Iterator[tuple[fx.Node, dict[str, Any]]]:
    """Yield the nodes that call ops, each with all its arguments by name."""
    for node in list(nodes):
        if name := op_of(node):
            call = inspect.signature(definition_of(name)).bind(*node.args, **node.kwargs)
            call.apply_defaults()
            yield node, dict(call.arguments)


def definition_of(name: str) -> Callable[..., Any]:
    """Return the definition of an op, which may be composed of other ops."""
    return COMPOSED[name] if name in COMPOSED else OPS[name].definition


def reason_for_none(report: Report, rewrites: Collection[str]) -> str:
    """Return why rewrites found no op in a graph: the first near miss, if there is one."""
    reasons = [f"{finding.op}: {finding.reason}" for finding in report.findings if not finding.used]
    *names, last = rewrites
    none = f"none of {', '.join(names)} and {last}" if names else f"no {last}"
    return reasons[0] if reasons else f"it computes {none}"
