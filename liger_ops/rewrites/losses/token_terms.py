"""What is computed per token from the distribution of its classes: log-probabilities, entropies.

The parts are read from their last operation upwards. Log-probabilities are `gather` of log_softmax,
or of the logits less their logsumexp; an entropy is the sum of probabilities times their
logarithms, or logsumexp less the sum of probabilities times logits. A loop over rows or chunks
whose results are stacked or concatenated is read as the computation of all rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from ..engine.canonical import IDENTITY, Call, canonical, is_tensor, same, value
from ..engine.casts import represents
from ..engine.rewrite import Refused
from .loss_chain import LogitsPath, SoftmaxPath, alike, chain_of, way_of
from .losses import FUNCTIONS, JoinedTargets, TokenTerm, called


class Parts:
    """The parts of a graph, each read once."""

    def __init__(self) -> None:
        self._known: dict[fx.Node, TokenTerm | Refused | None] = {}

    def read(self, node: fx.Node) -> TokenTerm | None:
        """The part that `node` computes, or None; raises Refused if the ops do not support it."""
        if node not in self._known:
            call = canonical(node)
            reader = None if call is None else READERS.get(call.op)
            try:
                known = None if reader is None else reader(self, node, call)
            except Refused as refused:
                known = refused
            self._known[node] = known
        found = self._known[node]
        if isinstance(found, Refused):
            raise found
        return found

    def _operand(self, node: Any) -> TokenTerm | None:
        """The part that an operation of other parts takes. A refusal is the operand's own."""
        try:
            return self.read(node) if is_tensor(node) and isinstance(node, fx.Node) else None
        except Refused:
            return None

    def _gather(self, node: fx.Node, call: Call) -> TokenTerm | None:
        values, dim, index = call.args
        if not is_tensor(index) or dim != -1 or (start := _start(values)) is None:
            return None
        way = way_of(start)
        is_one = same(tuple(value(index).shape), (*value(values).shape[:-1], 1))
        if way is None:
            logit = TokenTerm(node, "target_logit", chain_of(start), target=index)
            return logit if is_one else None
        if way.op != "log_softmax":
            return None
        if not is_one:
            raise Refused("the targets are not one for each position")
        chain = chain_of(way.start)
        return TokenTerm(node, "log_prob", chain, way.nodes, index, way.negative)

    def _logsumexp(self, node: fx.Node, call: Call) -> TokenTerm | None:
        logits, dims, _ = call.args
        if dims != (-1,) or (start := _start(logits)) is None:
            return None
        return TokenTerm(node, "lse", chain_of(start))

    def _sum(self, node: fx.Node, call: Call) -> TokenTerm | None:
        summed, dims, _, dtype = call.args
        if dims != (-1,) or (start := _start(summed)) is None:
            return None
        if dtype is not None and not represents(dtype, value(summed).dtype):
            return None
        product, negative = canonical(summed), False
        passed: tuple[fx.Node, ...] = (summed,)
        while product is not None and product.op in ("neg", "contiguous", IDENTITY):
            negative ^= product.op == "neg"
            passed = (*passed, product.args[0])
            product = canonical(product.args[0])
        if product is not None and product.op == "mul":
            return _of_products(node, product.args, negative, passed)
        try:
            way = way_of(start)
        except Refused:
            return None
        if way is None or way.op != "log_softmax":
            return None
        return TokenTerm(node, "total", chain_of(way.start), way.nodes, negative=way.negative)

    def _sub(self, node: fx.Node, call: Call) -> TokenTerm | None:
        if not is_tensor(node) or not all(_is_like(one, node) for one in call.args):
            return None
        sides = [self._behind_views(one) for one in call.args]
        parts = [part for part, _ in sides if part is not None and not part.negative]
        if len(parts) < 2 or not alike(parts[0].chain, parts[1].chain):
            return None
        made = _DIFFERENCES.get((parts[0].kind, parts[1].kind))
        if made is None:
            return None
        kind, negative = made
        inner: tuple[fx.Node, ...] = ()
        for part, views in sides:
            assert part is not None
            # What a loss uses besides, such as lse in a z-loss, is a part of its own.
            if not _used_once(views if part.kind == "lse" else (*views, part.node)):
                return None
            inner = (*inner, *views, part.node, *part.inner)
        (other,) = [part for part in parts if part.kind != "lse"]
        chain = replace(other.chain, nodes=_union(*(part.chain.nodes for part in parts)))
        return TokenTerm(node, kind, chain, inner, other.target, negative)

    def _behind_views(self, node: Any) -> tuple[TokenTerm | None, tuple[fx.Node, ...]]:
        """The part whose last dimension of 1 is added or removed, and the nodes that do it."""
        views: tuple[fx.Node, ...] = ()
        while (part := self._operand(node)) is None:
            call = canonical(node)
            if call is None or not _moves_a_last_one(node, call):
                return None, ()
            views = (*views, node)
            node = call.args[0]
        return part, views

    def _neg(self, node: fx.Node, call: Call) -> TokenTerm | None:
        part = self._operand(call.args[0])
        if part is None or part.kind not in ("log_prob", "entropy") or not _used_once([part.node]):
            return None
        inner = (part.node, *part.inner)
        return replace(part, node=node, inner=inner, negative=not part.negative)

    def _joined(self, node: fx.Node, call: Call) -> TokenTerm | None:
        tensors, dim = call.args
        if not isinstance(tensors, tuple) or dim != -value(node).dim():
            return None
        parts = []
        for one in tensors:
            part, views = self._behind_views(one)
            if part is None or not _used_once((*views, part.node)):
                return None
            parts.append(replace(part, node=one, inner=(*views, part.node, *part.inner)))
        if not parts or not all(_is_like_piece(part, parts[0]) for part in parts):
            return None
        pieces = [_piece(part.chain.logits) for part in parts]
        first = parts[0]
        whole = None if pieces[0] is None else pieces[0].of
        if whole is None or not _cover(pieces, whole):
            return None
        outer = _union(*(part.chain.nodes for part in parts), *(one.nodes for one in pieces if one))
        by_rows = is_tensor(whole, dim=2)
        chain = chain_of(replace(first.chain, logits=whole, nodes=outer, by_rows=by_rows))
        inner = _union(*((part.node, *part.inner) for part in parts))
        join = torch.stack if call.op == "stack" else torch.cat
        target = None
        if first.target is not None:
            target = JoinedTargets(join, tuple(part.target for part in parts))
        return replace(first, node=node, chain=chain, inner=inner, target=target)

    def _call(self, node: fx.Node, call: Call) -> TokenTerm | None:
        """A loss function without a reduction, which is a log-probability times -1."""
        _, target, weight, ignore_index, reduction, *smoothing = call.args
        if reduction != "none" or weight is not None or smoothing not in ([], [0.0]):
            return None
        if not isinstance(ignore_index, int) or value(target).is_floating_point():
            return None
        try:
            return replace(called(node, call, tempered=True), kind="log_prob", negative=True)
        except Refused:
            # `read` reports it.
            return None


# What the difference of two parts is, and whether it is multiplied by -1.
_DIFFERENCES = {
    ("target_logit", "lse"): ("log_prob", False),
    ("lse", "target_logit"): ("log_prob", True),
    ("lse", "mean_logit"): ("entropy", False),
    ("mean_logit", "lse"): ("entropy", True),
}

READERS: dict[str, Any] = {
    **{name: getattr(Parts, f"_{name}") for name in ("gather", "logsumexp", "sum", "sub", "neg")},
    **dict.fromkeys(("stack", "cat"), Parts._joined),
    **dict.fromkeys(FUNCTIONS, Parts._call),
}


def _start(values: Any) -> LogitsPath | None:
    """The chain from values with the classes of a token in their last dimension."""
    if not is_tensor(values) or value(values).dim() < 2 or not value(values).is_floating_point():
        return None
    return LogitsPath(values, by_rows=value(values).dim() == 2, tempered=True)


def _of_products(
    node: fx.Node, factors: tuple[Any, ...], negative: bool, passed: tuple[fx.Node, ...]
) -> TokenTerm | None:
    """The sum of the products of probabilities with their logarithms or with logits."""
    shape = tuple(value(passed[0]).shape)
    if not all(is_tensor(one) and same(tuple(value(one).shape), shape) for one in factors):
        return None
    ways: list[SoftmaxPath | None] = []
    for one in factors:
        start = _start(one)
        ways.append(None if start is None else way_of(start))
    ops = [None if way is None else way.op for way in ways]
    if "softmax" not in ops:
        return None
    at = ops.index("softmax")
    p, other = ways[at], ways[1 - at]
    assert p is not None
    chain = chain_of(p.start)
    if other is None:
        start = _start(factors[1 - at])
        logits = None if start is None else chain_of(start)
        if logits is None or not alike(chain, logits):
            return None
        chain = replace(chain, nodes=_union(chain.nodes, logits.nodes))
        negative ^= p.negative
        return TokenTerm(node, "mean_logit", chain, (*passed, *p.nodes), negative=negative)
    logarithms = chain_of(other.start)
    if other.op != "log_softmax" or not alike(chain, logarithms):
        return None
    chain = replace(chain, nodes=_union(chain.nodes, logarithms.nodes))
    inner = _union(passed, p.nodes, other.nodes)
    negative ^= p.negative ^ other.negative
    return TokenTerm(node, "entropy", chain, inner, negative=not negative)


def _is_like(one: Any, other: fx.Node) -> bool:
    """Whether two values have the same sizes and dtype."""
    if not is_tensor(one) or value(one).dtype != value(other).dtype:
        return False
    return same(tuple(value(one).shape), tuple(value(other).shape))


def _moves_a_last_one(node: fx.Node, call: Call) -> bool:
    """Whether a node adds or removes a last dimension of 1, or is a view that changes nothing."""
    if not is_tensor(call.args[0]) or call.op not in _VIEWS:
        return False
    now, before = tuple(value(node).shape), tuple(value(call.args[0]).shape)
    return same(now, before) or same(now, (*before, 1)) or same((*now, 1), before)


_VIEWS = {"squeeze", "unsqueeze", "view", "flatten", "contiguous", "getitem", IDENTITY}


def _used_once(nodes: Any) -> bool:
    return all(len(node.users) == 1 for node in nodes)


def _union(*groups: tuple[fx.Node, ...]) -> tuple[fx.Node, ...]:
    return tuple(dict.fromkeys(node for group in groups for node in group))


def _is_like_piece(part: TokenTerm, first: TokenTerm) -> bool:
    """Whether two pieces are the same computation, of positions that no view has changed."""
    if part.kind in ("total", "mean_logit") or part.chain.slices:
        return False
    if not alike(replace(part.chain, logits=first.chain.logits), first.chain):
        return False
    options = [(one.kind, one.negative, one.ignore_index) for one in (part, first)]
    # `gather` leaves a last dimension of 1.
    shape, positions = tuple(value(part.node).shape), tuple(value(part.chain.logits).shape[:-1])
    return options[0] == options[1] and (same(shape, positions) or same(shape, (*positions, 1)))


@dataclass(frozen=True)
class _Piece:
    """Consecutive entries of the first dimension of a tensor; `stop` is None for one, `x[start]`.

    `nodes` are those that take them.
    """

    of: fx.Node
    start: Any
    stop: Any
    nodes: tuple[fx.Node, ...]


def _piece(node: fx.Node) -> _Piece | None:
    call = canonical(node)
    if call is None or len(call.args) < 2 or not isinstance(call.args[0], fx.Node):
        return None
    of, first = call.args[:2]
    if call.op == "slice" and first == -value(of).dim() and same(call.args[4], 1):
        return _Piece(of, call.args[2], call.args[3], (node, *call.through))
    if call.op == "item" and isinstance(first, int):
        parts = canonical(of)
        if parts is not None and parts.op == "unbind" and parts.args[1] == -value(node).dim() - 1:
            return _Piece(parts.args[0], first, None, (node, of))
    is_entry = call.op == "getitem" and isinstance(first[0], int)
    if is_entry and all(isinstance(one, slice) and one == slice(None) for one in first[1:]):
        return _Piece(of, first[0], None, (node,))
    return None


def _cover(pieces: list[Any], whole: fx.Node) -> bool:
    """Whether the pieces are all of the whole, in order."""
    at: Any = 0
    for piece in pieces:
        if piece is None or piece.of is not whole or not same(piece.start, at):
            return False
        at = at + 1 if piece.stop is None else piece.stop
    return same(at, value(whole).shape[0])
