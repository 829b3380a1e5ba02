"""Group what is computed per token from the same logits, for one call of an op."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import fx

from ..engine.canonical import canonical
from ..engine.graph_state import GraphState
from ..engine.report import Finding, Report
from ..engine.rewrite import Refused, attempt
from .loss_chain import alike
from .losses import NO_CLASS, JoinedTargets, Loss, LossOutput, check_users
from .token_terms import READERS, Parts, TokenTerm

# Replaces a loss by an op and returns the op's node, or None if the op is another's; or raises
# Refused.
Replacement = Callable[[Loss, GraphState], fx.Node | None]
Refusal = Callable[[str, Loss, Refused], Finding]


def rewrite_tokens(
    graph: fx.Graph, report: Report, op: str, family: str, replaced: Replacement, refusal: Refusal
) -> None:  # fmt: skip
    """Replace the losses per token that an op of `family`, "log_prob" or "cross_entropy", computes.

    `refusal` makes the finding for a loss that is refused.
    """
    groups, refused = _groups(graph)
    if family == "log_prob":
        for node, reason in refused:
            report.refused(op, node, str(reason))
    tried: set[frozenset[fx.Node]] = set()
    while groups:
        group = groups.pop(0)
        key = frozenset(part.node for part in group)
        if key in tried:
            continue
        tried.add(key)
        report.at = (op, group[0].node)
        if _rewritten(graph, report, op, family, replaced, refusal, group):
            # The nodes of other groups may be erased.
            groups, _ = _groups(graph)


def _rewritten(
    graph: fx.Graph, report: Report, op: str, family: str, replaced: Replacement, refusal: Refusal,
    group: list[TokenTerm],
) -> bool:  # fmt: skip
    """Replace the whole group or, if that is refused, a part of it; report what came of it."""
    finding = None
    for parts in _ways(group):
        if _family(parts) != family:
            continue
        loss = _loss(parts)
        try:
            with attempt(graph):
                _check(parts)
                new = replaced(loss, GraphState(graph))
                if new is None:
                    return False
                report.used(op, new)
                return True
        except Refused as refused:
            finding = finding or refusal(op, loss, refused)
    if finding is not None:
        report.findings.append(finding)
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
    if "entropy" not in kinds and not {"cross_entropy", "nll_loss"}.isdisjoint(ops):
        # `losses` reads it, with more of its options.
        return None
    if "total" in kinds:
        return "cross_entropy" if "log_prob" in kinds and "entropy" not in kinds else None
    if "entropy" in kinds:
        return "log_prob"
    if "target_logit" in kinds:
        return "cross_entropy" if kinds & {"lse", "log_prob"} else None
    return "log_prob" if "log_prob" in kinds else None


def _loss(parts: list[TokenTerm]) -> Loss:
    ends = tuple(
        LossOutput(
            one.node, one.kind, one.negative, one.chain.by_rows, (*one.inner, *one.chain.nodes)
        )
        for one in parts
    )
    of = next((part for part in parts if part.target is not None), None)
    if of is None:
        return Loss(ends, parts[0].chain, None)
    ignored = NO_CLASS if of.ignore_index is None else of.ignore_index
    return Loss(ends, of.chain, of.target, of.ignore_index is None, ignore_index=ignored)


def _check(parts: list[TokenTerm]) -> None:
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
