"""Rewrite losses, and log-probabilities and entropies of tokens, to ops.

An op takes logits, with their casts, scales and softcap; or it takes the head that computes them,
if nothing else uses the logits. Terms that are computed per token from the same logits become one
call.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import fx

from ..engine.canonical import canonical
from ..engine.graph_state import GraphState
from ..engine.insertion import Refused
from ..engine.report import HEADS, Report
from ..engine.rewrite import attempt
from .insert_loss_op import insert_head_op, insert_logits_op
from .loss_chain import same_logits
from .losses import (
    FUNCTIONS,
    JoinedTargets,
    Loss,
    TokenTerm,
    check_softmax_users,
    finding,
    loss_calls,
    read_loss,
    refusal,
)
from .token_terms import TERM_READERS, TermReader


def rewrite(op: str, graph: fx.Graph, report: Report) -> None:
    """Replace losses by `op`: cross_entropy or log_prob, or either with the prefix `linear_`."""
    family = op.removeprefix("linear_")
    for node in report.visiting(op, loss_calls(graph) if family == "cross_entropy" else ()):
        try:
            loss = read_loss(node)
        except Refused as refused:
            report.refused(op, node, str(refused))
        else:
            _replace(op, graph, report, [loss])
    groups, refused_nodes = _groups(graph)
    if family == "log_prob":
        for node, reason in refused_nodes:
            report.refused(op, node, str(reason))
    tried: set[frozenset[fx.Node]] = set()
    while groups:
        group = groups.pop(0)
        key = frozenset(term.node for term in group)
        if key in tried:
            continue
        tried.add(key)
        report.at = (op, group[0].node)
        selections = (
            Loss(tuple(terms)) for terms in _selections(group) if _family(terms) == family
        )
        if _replace(op, graph, report, selections):
            # The nodes of other groups may be erased.
            groups, _ = _groups(graph)


def _replace(op: str, graph: fx.Graph, report: Report, selections: Iterable[Loss]) -> bool:
    """Replace the first loss of `selections` that is not refused; return whether there is one.

    Report the replaced loss, or else the first refusal.
    """
    replace_by, finding_of = (
        (insert_head_op, refusal) if op in HEADS else (insert_logits_op, finding)
    )
    first_finding = None
    for loss in selections:
        try:
            with attempt(graph):
                _check(loss.terms)
                new = replace_by(op, loss, GraphState(graph))
        except Refused as refused:
            first_finding = first_finding or finding_of(op, loss, refused)
            continue
        if new is not None:
            report.used(op, new)
        return new is not None
    if first_finding is not None:
        report.findings.append(first_finding)
    return False


def _groups(graph: fx.Graph) -> tuple[list[list[TokenTerm]], list[tuple[fx.Node, Refused]]]:
    """Return the terms in the graph, grouped by their logits, and the nodes that are refused."""
    reader, inner, term_nodes = TermReader(), set[fx.Node](), set[fx.Node]()
    groups: list[list[TokenTerm]] = []
    refused = []
    # From the end, so that a term is read before the terms that it is computed from.
    for node in reversed(graph.nodes):
        call = canonical(node)
        if call is None or call.op not in TERM_READERS:
            continue
        if node in inner and all(user in inner or user in term_nodes for user in node.users):
            continue
        try:
            term = reader.read(node)
        except Refused as reason:
            if call.op in ("gather", "sum"):
                refused.append((node, reason))
            continue
        if term is None or term.kind == "mean_logit":
            continue
        term_nodes.add(node)
        inner.update(term.inner)
        same_group = next(
            (group for group in groups if same_logits(group[0].path, term.path)), None
        )
        if same_group is None:
            groups.append([term])
        else:
            same_group.insert(0, term)
    return groups[::-1], refused[::-1]


def _selections(group: list[TokenTerm]) -> Iterator[list[TokenTerm]]:
    """Yield selections of terms to replace by one op, in the order in which to try them.

    They are all terms, then those without the entropies, then each log-probability and each entropy
    alone.
    """
    yield group
    entropies = [term for term in group if term.kind == "entropy"]
    others = [term for term in group if term.kind != "entropy"]
    if entropies and others:
        yield others
    for kind in ("log_prob", "entropy"):
        of_kind = [term for term in group if term.kind == kind]
        if len(group) > len(of_kind) or len(of_kind) > 1:
            for term in of_kind:
                yield [term]


def _family(terms: list[TokenTerm]) -> str | None:
    """Return the family of ops whose results the terms are; None if none has them, or no loss."""
    kinds = {term.kind for term in terms}
    ops = [call.op for term in terms if (call := canonical(term.node)) is not None]
    if "entropy" not in kinds and not set(FUNCTIONS).isdisjoint(ops):
        # `read_loss` reads it, with more of its options.
        return None
    if "total" in kinds:
        return "cross_entropy" if "log_prob" in kinds and "entropy" not in kinds else None
    if "entropy" in kinds:
        return "log_prob"
    if "target_logit" in kinds:
        return "cross_entropy" if kinds & {"lse", "log_prob"} else None
    return "log_prob" if "log_prob" in kinds else None


def _check(terms: tuple[TokenTerm, ...]) -> None:
    """Raise Refused if one op cannot compute all terms, or if a value on the way is used."""
    targets = [term.target for term in terms if term.target is not None]
    if any(target is not targets[0] or isinstance(target, JoinedTargets) for target in targets[1:]):
        raise Refused("each token has several targets, taken one by one")
    if len({term.kind for term in terms}) < len(terms):
        # One tensor would replace two, which makes a difference if either is written.
        raise Refused("a part of the loss is computed twice")
    term_nodes = {term.node for term in terms}
    inner = {node for term in terms for node in term.inner}
    check_softmax_users(inner - term_nodes, inner | term_nodes)
