"""The rewrites to ops of losses and of log-probabilities and entropies of tokens.

An op takes logits, with their casts, scales and softcap; or it takes the head that computes them,
if nothing else uses the logits. What is computed per token from the same logits is one call.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import fx

from ..engine.canonical import canonical
from ..engine.graph_state import GraphState
from ..engine.report import HEADS, Report
from ..engine.rewrite import Refused, attempt
from .insert_loss_op import of_logits, with_head
from .loss_chain import alike
from .losses import FUNCTIONS, JoinedTargets, Loss, TokenTerm, check_users, losses, read
from .token_terms import READERS, Parts
from .unfused_loss import finding, refusal


def rewrite(op: str, graph: fx.Graph, report: Report) -> None:
    family = op.removeprefix("linear_")
    for node in report.visiting(op, losses(graph) if family == "cross_entropy" else ()):
        try:
            loss = read(node)
        except Refused as refused:
            report.refused(op, node, str(refused))
        else:
            _replace(op, graph, report, [loss])
    groups, others = _groups(graph)
    if family == "log_prob":
        for node, reason in others:
            report.refused(op, node, str(reason))
    tried: set[frozenset[fx.Node]] = set()
    while groups:
        group = groups.pop(0)
        key = frozenset(part.node for part in group)
        if key in tried:
            continue
        tried.add(key)
        report.at = (op, group[0].node)
        ways = (Loss(tuple(parts)) for parts in _ways(group) if _family(parts) == family)
        if _replace(op, graph, report, ways):
            # The nodes of other groups may be erased.
            groups, _ = _groups(graph)


def _replace(op: str, graph: fx.Graph, report: Report, ways: Iterable[Loss]) -> bool:
    """Replace the first of several losses that is not refused, and report what came of it."""
    replaced, refused_as = (with_head, refusal) if op in HEADS else (of_logits, finding)
    left = None
    for loss in ways:
        try:
            with attempt(graph):
                _check(loss.ends)
                new = replaced(op, loss, GraphState(graph))
        except Refused as refused:
            left = left or refused_as(op, loss, refused)
            continue
        if new is not None:
            report.used(op, new)
        return new is not None
    if left is not None:
        report.findings.append(left)
    return False


def _groups(graph: fx.Graph) -> tuple[list[list[TokenTerm]], list[tuple[fx.Node, Refused]]]:
    """The parts of the graph, grouped by their logits, and the nodes that are refused."""
    reader, inner, ends = Parts(), set[fx.Node](), set[fx.Node]()
    groups: list[list[TokenTerm]] = []
    refused = []
    for node in reversed(graph.nodes):
        call = canonical(node)
        if call is None or call.op not in READERS:
            continue
        if node in inner and all(user in inner or user in ends for user in node.users):
            continue
        try:
            part = reader.read(node)
        except Refused as reason:
            if call.op in ("gather", "sum"):
                refused.append((node, reason))
            continue
        if part is None or part.kind == "mean_logit":
            continue
        ends.add(node)
        inner.update(part.inner)
        of = next((group for group in groups if alike(group[0].chain, part.chain)), None)
        if of is None:
            groups.append([part])
        else:
            of.insert(0, part)
    return groups[::-1], refused[::-1]


def _ways(group: list[TokenTerm]) -> Iterator[list[TokenTerm]]:
    """The parts to replace by one op: all, or else the entropies on their own and the others."""
    yield group
    entropies = [part for part in group if part.kind == "entropy"]
    others = [part for part in group if part.kind != "entropy"]
    if entropies and others:
        yield others
    for kind in ("log_prob", "entropy"):
        alone = [part for part in group if part.kind == kind]
        if len(group) > len(alone) or len(alone) > 1:
            for part in alone:
                yield [part]


def _family(parts: list[TokenTerm]) -> str | None:
    """The op whose results the parts are; None if they are no op's, or not a loss."""
    kinds = {part.kind for part in parts}
    ops = [call.op for part in parts if (call := canonical(part.node)) is not None]
    if "entropy" not in kinds and not set(FUNCTIONS).isdisjoint(ops):
        # `read` reads it, with more of its options.
        return None
    if "total" in kinds:
        return "cross_entropy" if "log_prob" in kinds and "entropy" not in kinds else None
    if "entropy" in kinds:
        return "log_prob"
    if "target_logit" in kinds:
        return "cross_entropy" if kinds & {"lse", "log_prob"} else None
    return "log_prob" if "log_prob" in kinds else None


def _check(parts: tuple[TokenTerm, ...]) -> None:
    """Raise Refused if one op cannot compute all parts, or if a value on the way is needed."""
    targets = [part.target for part in parts if part.target is not None]
    if any(one is not targets[0] or isinstance(one, JoinedTargets) for one in targets[1:]):
        raise Refused("each token has several targets, taken one by one")
    if len({part.kind for part in parts}) < len(parts):
        # One tensor would replace two, which makes a difference if either is written.
        raise Refused("a part of the loss is computed twice")
    ends = {part.node for part in parts}
    inner = {node for part in parts for node in part.inner}
    check_users(inner - ends, inner | ends)
