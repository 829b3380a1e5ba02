"""Follow the weights of attention that a model writes out back to the product of the scores."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from ...accepted import is_scale
from ..engine.canonical import Call, canonical, is_tensor, operation, same, value
from ..engine.canonical.call import FUNCTIONS, METHODS
from ..engine.insertion import Refused
from ..engine.maps import algebra
from ..engine.maps.index_maps import COPIES, VIEWS, index_maps
from .attention_products import Scores, product_of_scores
from .numbers import constant

# Models apply about ten operations to their scores, and five to their weights.
DEPTH = 32
_OUT_OF_PLACE = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
}
_OUT_OF_PLACE_METHODS = ("add_", "sub_", "mul_", "div_", "masked_fill_", "tanh_")


# Operations on weights after which the result is another computation, not another spelling.
_CHANGES = {"mul", "div", "add", "masked_fill", "where"}
_DROPOUT = "dropout"


@dataclass(frozen=True)
class UnfusedScores:
    """The operations on scores, and on the weights of their softmax, in the order of the code.

    Attributes:
        product: the product of queries and keys.
        nodes: the nodes from the product on, the product's first.
        scale: the factor before tanh.
        cap: the factor after tanh, or None without tanh.
        masks: for each mask its node; its truth where a score stays and the number that it fills
            the others with, both None for a mask that is added; and whether the scores are
            (B * H, S, T) there.
        fills: the tensors in which the code stores the numbers that masks fill with.
        heads: H, if the code reshapes (B * H, S, T) to (B, H, S, T) or back.
        sinks: (H,), the numbers in the scores' last column.
        are_weights: whether the softmax was applied.
        without_sinks: whether the weights' last column is dropped.
        difference: why this is not attention that an op computes, or None.
    """

    product: Scores
    nodes: tuple[fx.Node, ...]
    scale: float = 1.0
    cap: float | None = None
    masks: tuple[tuple[fx.Node, bool | None, float | None, bool], ...] = ()
    fills: tuple[fx.Node, ...] = ()
    heads: int | None = None
    sinks: fx.Node | None = None
    are_weights: bool = False
    without_sinks: bool = False
    difference: str | None = None

    def scale_and_softcap(self) -> tuple[float, float | None]:
        """Return the scale and the soft cap of softcap * tanh(scale * query @ key^T / softcap).

        Raises:
            Refused: one of them is a number that an engine cannot multiply by.
        """
        softcap = self.cap
        scale = self.scale if softcap is None else self.scale * softcap
        for number in (scale, softcap):
            if number is not None and not is_scale(number):
                raise Refused(f"its scores are multiplied by {number}")
        return scale, softcap

    def with_difference(self, difference: str) -> UnfusedScores:
        return replace(self, difference=self.difference or difference)


@dataclass
class ScoresReader:
    """A reader that follows scores back to the product, each node once."""

    _scores: dict[fx.Node, UnfusedScores | None] = field(default_factory=dict)

    def read(self, node: Any, depth: int = 0) -> UnfusedScores | None:
        """Return the operations from a product to `node`; None if other operations compute it."""
        if not isinstance(node, fx.Node) or not is_tensor(node) or depth > DEPTH:
            return None
        if node not in self._scores:
            self._scores[node] = self._read(node, depth)
        return self._scores[node]

    def _read(self, node: fx.Node, depth: int) -> UnfusedScores | None:
        if (product := product_of_scores(node)) is not None:
            return _start(product)
        call, in_place = _canonical_call(node)
        if call is not None and call.op == "cat":
            return self._with_sinks(node, call, depth)
        if call is None or call.op not in _STEPS:
            return None
        for index in _score_positions(call, in_place):
            inner = self.read(call.args[index], depth + 1)
            if inner is None:
                continue
            # A mask or a factor is a step of the scores. On weights it is another computation.
            changes_weights = inner.are_weights and call.op in _CHANGES
            result = (_changed if changes_weights else _STEPS[call.op])(node, inner, call, index)
            if result is not None:
                return replace(result, nodes=(*result.nodes, node))
        return None

    def _with_sinks(self, node: fx.Node, call: Call, depth: int) -> UnfusedScores | None:
        tensors, dim = call.args
        if dim != -1 or len(tensors) != 2:
            return None
        inner = self.read(tensors[0], depth + 1)
        if inner is None or inner.sinks is not None or not is_tensor(node, dim=4):
            return None
        if inner.are_weights:
            return None
        sinks, nodes = per_head_numbers(tensors[1])
        if sinks is None or not same(value(sinks).shape[0], value(node).shape[1]):
            inner = inner.with_difference("the last column of its scores is not one number a head")
        return replace(inner, sinks=sinks or tensors[1], nodes=(*inner.nodes, *nodes, node))


def _start(product: Scores) -> UnfusedScores | None:
    scale = constant(product.scale)
    if scale is None:
        return None
    scores = UnfusedScores(product, product.nodes, scale)
    if not is_scale(scale):
        scores = scores.with_difference(f"its scores are multiplied by {scale}")
    return scores if product.bias is None else _with_mask(product.nodes[0], scores, product.bias)


def _canonical_call(node: fx.Node) -> tuple[Call | None, bool]:
    """Return the canonical call of a node, and whether it works in place.

    The call of an operation in place is that of the same operation out of place.
    """
    spelling: Any = None
    if node.op == "call_function" and node.target in _OUT_OF_PLACE:
        spelling = FUNCTIONS[_OUT_OF_PLACE[node.target]]
    if node.op == "call_method" and node.target in _OUT_OF_PLACE_METHODS:
        spelling = METHODS[str(node.target)[:-1]]
    if spelling is None:
        call = canonical(node)
        is_dropout = call is None and operation(node) in (_DROPOUT, "dropout_")
        return Call(_DROPOUT, node.args) if is_dropout else call, False
    try:
        return spelling(*node.args, **node.kwargs), True
    except TypeError:
        return None, True


def _score_positions(call: Call, in_place: bool) -> tuple[int, ...]:
    """Return the positions of the arguments that may be the scores."""
    if call.op in ("add", "mul") and not in_place:
        return (0, 1)
    return (1, 2) if call.op == "where" else (0,)


def _identity(node: fx.Node, inner: UnfusedScores, call: Call, index: int) -> UnfusedScores | None:
    return inner


def _viewed(node: fx.Node, inner: UnfusedScores, call: Call, index: int) -> UnfusedScores | None:
    """Accept a view that joins or splits batch and heads, or that changes nothing."""
    before, after = value(call.args[0]).shape, value(node).shape
    has_sinks = inner.sinks is not None and not inner.without_sinks
    if has_sinks or not same(tuple(before[-2:]), tuple(after[-2:])):
        return None
    if len(before) == len(after):
        return inner if same(tuple(before), tuple(after)) else None
    if {len(before), len(after)} != {3, 4}:
        return None
    heads = (after if len(after) == 4 else before)[1]
    if not isinstance(heads, int) or inner.heads not in (None, heads):
        return None
    return replace(inner, heads=heads)


def _scaled(node: fx.Node, inner: UnfusedScores, call: Call, index: int) -> UnfusedScores | None:
    other = call.args[1 - index]
    if inner.sinks is not None or not _same_shape(node, call.args[index]):
        return None
    if is_tensor(other):
        return inner.with_difference("its scores are multiplied by a tensor")
    factor = constant(other)
    if factor is None:
        return None
    if inner.masks:
        return inner.with_difference("its scores are scaled after a mask is added")
    if not is_scale(factor):
        verb = "divided" if call.op == "div" else "multiplied"
        return inner.with_difference(f"its scores are {verb} by {factor}")
    factor = 1.0 / factor if call.op == "div" else factor
    if inner.cap is None:
        return replace(inner, scale=inner.scale * factor)
    return replace(inner, cap=inner.cap * factor)


def _capped(node: fx.Node, inner: UnfusedScores, call: Call, index: int) -> UnfusedScores | None:
    if inner.are_weights:
        return None
    if inner.masks or inner.cap is not None or inner.sinks is not None:
        return inner.with_difference("its scores are capped after a mask is added, or twice")
    return replace(inner, cap=1.0)


def _added(node: fx.Node, inner: UnfusedScores, call: Call, index: int) -> UnfusedScores | None:
    mask = call.args[1 - index]
    if inner.sinks is not None or not _same_shape(node, call.args[index]):
        return None
    if not isinstance(mask, fx.Node) or not is_tensor(mask):
        return None
    return _with_mask(node, inner, mask) if value(mask).is_floating_point() else None


def _filled(node: fx.Node, inner: UnfusedScores, call: Call, index: int) -> UnfusedScores | None:
    """Accept masked_fill(scores, mask, fill), or torch.where with the scores on either side."""
    mask, fill = call.args[1:] if call.op == "masked_fill" else (call.args[0], call.args[3 - index])
    number = constant(fill)
    if inner.sinks is not None or number is None or not _same_shape(node, call.args[index]):
        return None
    if not isinstance(mask, fx.Node) or value(mask).dtype != torch.bool:
        return None
    visible = call.op == "where" and index == 1
    filled = _with_mask(node, inner, mask, visible, number)
    return replace(filled, fills=(*inner.fills, fill)) if is_tensor(fill) else filled


def _with_mask(
    node: fx.Node, inner: UnfusedScores, mask: fx.Node,
    visible: bool | None = None, fill: float | None = None,
) -> UnfusedScores:  # fmt: skip
    return replace(inner, masks=(*inner.masks, (mask, visible, fill, is_tensor(node, dim=3))))


def _shifted(node: fx.Node, inner: UnfusedScores, call: Call, index: int) -> UnfusedScores | None:
    """Accept scores - scores.max(-1, keepdim=True), which changes neither softmax nor gradients."""
    if inner.are_weights:
        return None
    scores, largest = call.args
    nodes: tuple[fx.Node, ...] = ()
    while isinstance(largest, fx.Node) and operation(largest) == "detach":
        nodes, largest = (*nodes, largest), largest.args[0]
    name = "amax"
    if isinstance(largest, fx.Node) and operation(largest) == "getitem" and largest.args[1] == 0:
        nodes, largest, name = (*nodes, largest), largest.args[0], "max"
    if not isinstance(largest, fx.Node) or operation(largest) != name:
        return None
    arguments = dict(zip(("input", "dim", "keepdim"), largest.args, strict=False))
    arguments.update(largest.kwargs)
    dim = arguments.get("dim")
    dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    if arguments.get("input") is not scores or not arguments.get("keepdim"):
        return None
    if dim not in (-1, value(scores).dim() - 1):
        return None
    return replace(inner, nodes=(*inner.nodes, *nodes, largest))


def _softmax(node: fx.Node, inner: UnfusedScores, call: Call, index: int) -> UnfusedScores | None:
    if inner.are_weights:
        return None
    over_keys = inner.difference if call.args[1] == -1 else "its softmax is not over the keys"
    return replace(inner, are_weights=True, difference=over_keys)


def _changed(node: fx.Node, inner: UnfusedScores, call: Call, index: int) -> UnfusedScores | None:
    return replace(inner, difference="its weights are changed after the softmax")


def _dropped(node: fx.Node, inner: UnfusedScores, call: Call, index: int) -> UnfusedScores | None:
    difference = "it has dropout, and another kernel would drop other weights"
    return replace(inner, difference=difference) if inner.are_weights else None


def _sliced(node: fx.Node, inner: UnfusedScores, call: Call, index: int) -> UnfusedScores | None:
    """Accept a slice of the weights that drops the last column, that of the sinks."""
    x, dim, start, stop, step = call.args
    is_last = dim == -1 and same((start, step, stop), (0, 1, value(x).shape[-1] - 1))
    if not is_last or not inner.are_weights or inner.without_sinks or not is_tensor(node, dim=4):
        return None
    return replace(inner, without_sinks=True)


# For each operation a function (node, scores or weights before it, call, index of the scores among
# the call's arguments). It returns them after the operation, or None for an argument that it does
# not follow.
_STEPS: dict[str, Callable[[fx.Node, UnfusedScores, Call, int], UnfusedScores | None]] = {
    **dict.fromkeys((*COPIES, "cast"), _identity),
    **dict.fromkeys(("mul", "div"), _scaled),
    **dict.fromkeys(("masked_fill", "where"), _filled),
    "view": _viewed, "tanh": _capped, "add": _added, "sub": _shifted,
    "softmax": _softmax, _DROPOUT: _dropped, "slice": _sliced,
}  # fmt: skip


def _same_shape(a: fx.Node, b: fx.Node) -> bool:
    return same(tuple(value(a).shape), tuple(value(b).shape))


def per_head_numbers(column: fx.Node) -> tuple[fx.Node | None, tuple[fx.Node, ...]]:
    """Return the (H,) of which a column (B, H, S, 1) holds copies, and the nodes between them.

    Return None and no nodes if the column holds anything else.
    """
    heads = value(column).shape[1]
    for view in index_maps(column, VIEWS | {"cast"}):
        if is_tensor(view.source, dim=1):
            per_head = same(heads, 1) or algebra.same(view.places[-1], algebra.index(-3))
            return (view.source, view.nodes) if per_head else (None, ())
    return None, ()
