"""Read terms per token, log-probabilities and entropies, from the operations that compute them.

A term is read from its last operation upwards. Log-probabilities are `gather` of log_softmax, or of
the logits less their logsumexp; an entropy is the sum of probabilities times their logarithms, or
logsumexp less the sum of probabilities times logits. A loop over rows or chunks whose results are
stacked or concatenated is read as the computation of all rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from ..engine.canonical import Call, canonical, is_tensor, same, value
from ..engine.casts import represents
from ..engine.insertion import Refused
from ..engine.maps.index_maps import COPIES, RESHAPES
from .loss_chain import LogitsPath, SoftmaxPath, follow_back, same_logits, softmax_path
from .losses import FUNCTIONS, JoinedTargets, TokenTerm, term_of_call


class TermReader:
    """A reader of the terms of a graph, each read once."""

    def __init__(self) -> None:
        self._known: dict[fx.Node, TokenTerm | Refused | None] = {}

    def read(self, node: fx.Node) -> TokenTerm | None:
        """Return the term that `node` computes, or None.

        Raises:
            Refused: the ops do not support the term.
        """
        if node not in self._known:
            call = canonical(node)
            reader = None if call is None else TERM_READERS.get(call.op)
            try:
                result = None if reader is None else reader(self, node, call)
            except Refused as refused:
                result = refused
            self._known[node] = result
        result = self._known[node]
        if isinstance(result, Refused):
            raise result
        return result

    def _operand(self, node: Any) -> TokenTerm | None:
        """Return the term that is an operand of another term, or None.

        A refusal is reported for the operand itself, and not for the operation on it.
        """
        try:
            return self.read(node) if is_tensor(node) and isinstance(node, fx.Node) else None
        except Refused:
            return None

    def _gather(self, node: fx.Node, call: Call) -> TokenTerm | None:
        values, dim, index = call.args
        if not is_tensor(index) or dim != -1 or (start := _start(values)) is None:
            return None
        softmax = softmax_path(start)
        is_one_index = same(tuple(value(index).shape), (*value(values).shape[:-1], 1))
        if softmax is None:
            logit = TokenTerm(node, "target_logit", follow_back(start), target=index)
            return logit if is_one_index else None
        if softmax.op != "log_softmax":
            return None
        if not is_one_index:
            raise Refused("the targets are not one for each position")
        path = follow_back(softmax.start)
        return TokenTerm(node, "log_prob", path, softmax.nodes, index, softmax.negative)

    def _logsumexp(self, node: fx.Node, call: Call) -> TokenTerm | None:
        logits, dims, _ = call.args
        if dims != (-1,) or (start := _start(logits)) is None:
            return None
        return TokenTerm(node, "lse", follow_back(start))

    def _sum(self, node: fx.Node, call: Call) -> TokenTerm | None:
        summed, dims, _, dtype = call.args
        if dims != (-1,) or (start := _start(summed)) is None:
            return None
        if dtype is not None and not represents(dtype, value(summed).dtype):
            return None
        product, negative = canonical(summed), False
        between: tuple[fx.Node, ...] = (summed,)
        while product is not None and product.op in COPIES | {"neg"}:
            negative ^= product.op == "neg"
            between = (*between, product.args[0])
            product = canonical(product.args[0])
        if product is not None and product.op == "mul":
            return _of_products(node, product.args, negative, between)
        try:
            softmax = softmax_path(start)
        except Refused:
            return None
        if softmax is None or softmax.op != "log_softmax":
            return None
        return TokenTerm(
            node, "total", follow_back(softmax.start), softmax.nodes, negative=softmax.negative
        )

    def _sub(self, node: fx.Node, call: Call) -> TokenTerm | None:
        if not is_tensor(node) or not all(_is_like(tensor, node) for tensor in call.args):
            return None
        sides = [self._behind_views(tensor) for tensor in call.args]
        terms = [term for term, _ in sides if term is not None and not term.negative]
        if len(terms) < 2 or not same_logits(terms[0].path, terms[1].path):
            return None
        difference = _DIFFERENCES.get((terms[0].kind, terms[1].kind))
        if difference is None:
            return None
        kind, negative = difference
        inner: tuple[fx.Node, ...] = ()
        for term, views in sides:
            assert term is not None
            # What a loss uses besides, such as lse in a z-loss, is a part of its own.
            if not _used_once(views if term.kind == "lse" else (*views, term.node)):
                return None
            inner = (*inner, *views, term.node, *term.inner)
        (other,) = [term for term in terms if term.kind != "lse"]
        path = replace(other.path, nodes=_union(*(term.path.nodes for term in terms)))
        return TokenTerm(node, kind, path, inner, other.target, negative)

    def _behind_views(self, node: Any) -> tuple[TokenTerm | None, tuple[fx.Node, ...]]:
        """Return the term behind views that add or remove a last dimension of 1, and the views."""
        views: tuple[fx.Node, ...] = ()
        while (term := self._operand(node)) is None:
            call = canonical(node)
            if call is None or not _moves_a_last_one(node, call):
                return None, ()
            views = (*views, node)
            node = call.args[0]
        return term, views

    def _neg(self, node: fx.Node, call: Call) -> TokenTerm | None:
        term = self._operand(call.args[0])
        if term is None or term.kind not in ("log_prob", "entropy") or not _used_once([term.node]):
            return None
        inner = (term.node, *term.inner)
        return replace(term, node=node, inner=inner, negative=not term.negative)

    def _joined(self, node: fx.Node, call: Call) -> TokenTerm | None:
        tensors, dim = call.args
        if not isinstance(tensors, tuple) or dim != -value(node).dim():
            return None
        terms = []
        for tensor in tensors:
            term, views = self._behind_views(tensor)
            if term is None or not _used_once((*views, term.node)):
                return None
            terms.append(replace(term, node=tensor, inner=(*views, term.node, *term.inner)))
        if not terms or not all(_is_like_piece(term, terms[0]) for term in terms):
            return None
        pieces = [_piece(term.path.logits) for term in terms]
        first = terms[0]
        whole_logits = None if pieces[0] is None else pieces[0].source
        if whole_logits is None or not _cover(pieces, whole_logits):
            return None
        outer = _union(
            *(term.path.nodes for term in terms), *(piece.nodes for piece in pieces if piece)
        )
        by_rows = is_tensor(whole_logits, dim=2)
        path = follow_back(replace(first.path, logits=whole_logits, nodes=outer, by_rows=by_rows))
        inner = _union(*((term.node, *term.inner) for term in terms))
        join = torch.stack if call.op == "stack" else torch.cat
        target = None
        if first.target is not None:
            target = JoinedTargets(join, tuple(term.target for term in terms))
        return replace(first, node=node, path=path, inner=inner, target=target)

    def _call(self, node: fx.Node, call: Call) -> TokenTerm | None:
        """Read a loss function without a reduction, which is a log-probability times -1."""
        _, target, weight, ignore_index, reduction, *smoothing = call.args
        if reduction != "none" or weight is not None or smoothing not in ([], [0.0]):
            return None
        if not isinstance(ignore_index, int) or value(target).is_floating_point():
            return None
        try:
            return replace(
                term_of_call(node, call, has_temperature=True), kind="log_prob", negative=True
            )
        except Refused:
            # `losses.read_loss` reports it.
            return None


# Kinds of the two operands of a subtraction -> (kind of the result, whether it is negative).
_DIFFERENCES = {
    ("target_logit", "lse"): ("log_prob", False),
    ("lse", "target_logit"): ("log_prob", True),
    ("lse", "mean_logit"): ("entropy", False),
    ("mean_logit", "lse"): ("entropy", True),
}

TERM_READERS: dict[str, Any] = {
    **{
        name: getattr(TermReader, f"_{name}")
        for name in ("gather", "logsumexp", "sum", "sub", "neg")
    },
    **dict.fromkeys(("stack", "cat"), TermReader._joined),
    **dict.fromkeys(FUNCTIONS, TermReader._call),
}


def _start(values: Any) -> LogitsPath | None:
    """Return the path from values with the classes of a token in their last dimension, or None."""
    if not is_tensor(values) or value(values).dim() < 2 or not value(values).is_floating_point():
        return None
    return LogitsPath(values, by_rows=value(values).dim() == 2, has_temperature=True)


def _of_products(
    node: fx.Node, factors: tuple[Any, ...], negative: bool, between: tuple[fx.Node, ...]
) -> TokenTerm | None:
    """Read the sum over classes of probabilities times their logarithms, or times logits.

    `factors` are the operands of the product, and `between` the nodes from the sum's input to it.
    """
    shape = tuple(value(between[0]).shape)
    if not all(is_tensor(tensor) and same(tuple(value(tensor).shape), shape) for tensor in factors):
        return None
    softmaxes: list[SoftmaxPath | None] = []
    for tensor in factors:
        start = _start(tensor)
        softmaxes.append(None if start is None else softmax_path(start))
    ops = [None if softmax is None else softmax.op for softmax in softmaxes]
    if "softmax" not in ops:
        return None
    position = ops.index("softmax")
    p, other = softmaxes[position], softmaxes[1 - position]
    assert p is not None
    path = follow_back(p.start)
    if other is None:
        start = _start(factors[1 - position])
        logits = None if start is None else follow_back(start)
        if logits is None or not same_logits(path, logits):
            return None
        path = replace(path, nodes=_union(path.nodes, logits.nodes))
        negative ^= p.negative
        return TokenTerm(node, "mean_logit", path, (*between, *p.nodes), negative=negative)
    logarithms = follow_back(other.start)
    if other.op != "log_softmax" or not same_logits(path, logarithms):
        return None
    path = replace(path, nodes=_union(path.nodes, logarithms.nodes))
    inner = _union(between, p.nodes, other.nodes)
    negative ^= p.negative ^ other.negative
    return TokenTerm(node, "entropy", path, inner, negative=not negative)


def _is_like(tensor: Any, other: fx.Node) -> bool:
    """Return whether two values have the same sizes and dtype."""
    if not is_tensor(tensor) or value(tensor).dtype != value(other).dtype:
        return False
    return same(tuple(value(tensor).shape), tuple(value(other).shape))


def _moves_a_last_one(node: fx.Node, call: Call) -> bool:
    """Return whether a node adds or removes a last dimension of 1, or changes no dimension."""
    if not is_tensor(call.args[0]) or call.op not in _VIEWS:
        return False
    now, before = tuple(value(node).shape), tuple(value(call.args[0]).shape)
    return same(now, before) or same(now, (*before, 1)) or same((*now, 1), before)


# Of a getitem that only removes or adds a last dimension of 1, too.
_VIEWS = COPIES | RESHAPES | {"getitem"}


def _used_once(nodes: Any) -> bool:
    return all(len(node.users) == 1 for node in nodes)


def _union(*groups: tuple[fx.Node, ...]) -> tuple[fx.Node, ...]:
    return tuple(dict.fromkeys(node for group in groups for node in group))


def _is_like_piece(term: TokenTerm, first: TokenTerm) -> bool:
    """Return whether two pieces are the same computation, of positions that no view changed."""
    if term.kind in ("total", "mean_logit") or term.path.slices:
        return False
    if not same_logits(replace(term.path, logits=first.path.logits), first.path):
        return False
    options = [(like.kind, like.negative, like.ignore_index) for like in (term, first)]
    # `gather` leaves a last dimension of 1.
    shape, positions = tuple(value(term.node).shape), tuple(value(term.path.logits).shape[:-1])
    return options[0] == options[1] and (same(shape, positions) or same(shape, (*positions, 1)))


@dataclass(frozen=True)
class _Piece:
    """Consecutive entries of the first dimension of a tensor, x[start:stop].

    `stop` is None for a single entry, x[start]. `nodes` select the entries.
    """

    source: fx.Node
    start: Any
    stop: Any
    nodes: tuple[fx.Node, ...]


def _piece(node: fx.Node) -> _Piece | None:
    """Return the piece of another tensor that `node` is, or None."""
    call = canonical(node)
    if call is None or len(call.args) < 2 or not isinstance(call.args[0], fx.Node):
        return None
    source, first = call.args[:2]
    if call.op == "slice" and first == -value(source).dim() and same(call.args[4], 1):
        return _Piece(source, call.args[2], call.args[3], (node, *call.through))
    if call.op == "item" and isinstance(first, int):
        split = canonical(source)
        if split is not None and split.op == "unbind" and split.args[1] == -value(node).dim() - 1:
            return _Piece(split.args[0], first, None, (node, source))
    is_entry = call.op == "getitem" and isinstance(first[0], int)
    if is_entry and all(isinstance(item, slice) and item == slice(None) for item in first[1:]):
        return _Piece(source, first[0], None, (node,))
    return None


def _cover(pieces: list[Any], whole_logits: fx.Node) -> bool:
    """Return whether the pieces are all of the whole, in order."""
    position: Any = 0
    for piece in pieces:
        if piece is None or piece.source is not whole_logits or not same(piece.start, position):
            return False
        position = position + 1 if piece.stop is None else piece.stop
    return same(position, value(whole_logits).shape[0])
