"""Find attention that a model writes out.

    softmax(softcap * tanh(scale * query @ key^T / softcap) + mask) @ value

with any of softcap, masks and a column of sinks left out. `unfused_attentions` yields each
occurrence. The code is followed back from the last product, through casts and views, to the
softmax, and on to the first product. Casts to the dtype of the result or a wider one are ignored:
attention kernels compute scores and softmax in float32, whatever the storage, and so round less
often than the code. A cast to a narrower dtype, or to integers, is a rounding on purpose.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from ..engine.canonical import IDENTITY, canonical, is_tensor, same, value
from ..engine.casts import represents
from ..engine.effects import writes
from ..engine.graph_state import GraphState
from ..engine.insertion import Refused, View
from ..engine.report import Report
from ..engine.rewrite import foreign
from .attention import Mask
from .attention_products import Operand, product_of_weights
from .mask.evaluate import Scope
from .unfused_scores import ScoresReader, UnfusedScores


@dataclass(frozen=True)
class UnfusedAttention:
    """Attention that is written out, or a call of it, for S queries, T keys and H heads.

    Attributes:
        root: the node of the result.
        query, key, value: (B, H, S, D), (B, H, T, D) and (B, H, T, E), as they enter the products:
            scaled queries and repeated heads are left as they are.
        scale: the number that the products are multiplied by, apart from the softcap.
        softcap: the bound of the scores, or None.
        masks: in the order in which they are applied, all after the softcap.
        fills: the tensors in which the code stores the numbers that masks fill with.
        sinks: (H,), the score of each head's further key, whose value is 0, or None.
        back: the views that bring (B, H, S, E) into the shape of `root`.
        nodes: the nodes that are computed between the operands and the result, with `root`.
    """

    root: fx.Node
    query: Operand
    key: Operand
    value: Operand
    scale: float
    softcap: float | None
    masks: tuple[Mask, ...]
    sinks: fx.Node | None
    back: tuple[View, ...]
    nodes: frozenset[fx.Node]
    fills: tuple[fx.Node, ...] = ()

    @property
    def is_call(self) -> bool:
        """True for a call of scaled_dot_product_attention, False for attention written out."""
        return self.nodes == {self.root}

    def inputs(self) -> list[fx.Node]:
        """Return the tensors that attention reads."""
        operands = (self.query, self.key, self.value, *(mask.tensor for mask in self.masks))
        sinks = [] if self.sinks is None else [self.sinks]
        return [operand.source for operand in operands] + sinks


def unfused_attentions(
    rewrite: str, report: Report, scope: Scope, state: GraphState, *, reports: bool = True
) -> Iterator[tuple[fx.Node, UnfusedAttention]]:
    """Yield each node that is the result of attention that is written out, with that attention.

    Code that only comes near, or cannot be replaced, is reported as refused, if this rewrite
    `reports`.
    """
    for node in report.once(rewrite, list(scope.graph.nodes)):
        try:
            attention = attention_at(node)
            if attention is not None:
                _check(attention, state)
        except Refused as refused:
            if reports:
                report.refused(rewrite, node, str(refused))
            continue
        if attention is not None:
            yield node, attention


def attention_at(root: fx.Node) -> UnfusedAttention | None:
    """Return the attention whose result is `root`, or None.

    Raises:
        Refused: the code is attention but for one operation, which the text names.
    """
    product = product_of_weights(root)
    scores = None if product is None else ScoresReader().read(product.weights)
    if product is None or scores is None or not scores.are_weights:
        return None
    if scores.difference:
        raise Refused(scores.difference)
    if scores.without_sinks != (scores.sinks is not None):
        raise Refused("its scores have a further column that its weights do not drop")
    scale, softcap = scores.scale_and_softcap()
    query, key, values, back = *scores.product[:2], product.value, product.back
    masks = tuple(
        Mask(_four_dimensions(tensor, scores, is_flat), visible, fill)
        for tensor, visible, fill, is_flat in scores.masks
    )
    if value(scores.product.nodes[0]).dim() == 3:
        query, key = (operand.viewed(*_split(scores)) for operand in (query, key))
    if is_tensor(root, dim=3):
        values = values.viewed(*_split(scores))
        merged: View = (torch.squeeze, 1) if scores.heads is None else (torch.flatten, 0, 1)
        back = (merged, *back)
    nodes = frozenset((root, *scores.nodes))
    return UnfusedAttention(
        root, query, key, values, scale, softcap, masks, scores.sinks, back, nodes, scores.fills
    )


def _split(scores: UnfusedScores) -> tuple[View, ...]:
    """Return the views that split (B * H, S, D) into (B, H, S, D), with H = 1 if it is unknown."""
    if scores.heads is None:
        return ((torch.unsqueeze, 1),)
    return ((torch.unflatten, 0, (-1, scores.heads)),)


def _four_dimensions(mask: fx.Node, scores: UnfusedScores, is_flat: bool) -> Operand:
    """Return a mask that broadcasts to (B, H, S, T), also if its scores are (B * H, S, T)."""
    operand = Operand(mask)
    if not is_flat or not is_tensor(mask, dim=3):
        return operand
    if same(value(mask).shape[0], 1):
        return operand.viewed((torch.unsqueeze, 1))
    return operand.viewed(*_split(scores))


def _check(attention: UnfusedAttention, state: GraphState) -> None:
    """Raise Refused if the nodes cannot be replaced by any op.

    The reasons are foreign tensors, a value that is rounded or used elsewhere, a torch.func
    transform, operations in different modes, and writes in place.
    """
    if reason := foreign([*attention.inputs(), attention.root]):
        raise Refused(reason)
    for node in attention.nodes:
        if _is_narrower(node, value(attention.root).dtype):
            raise Refused(f"{node.name}, a value on the way, is rounded to {value(node).dtype}")
    if state.transformed(attention.root):
        raise Refused("it runs inside of a torch.func transform, such as vmap")
    _check_users(attention.nodes, attention)
    computed = [node for node in attention.nodes if not _is_identity(node)]
    if not state.one_mode(computed):
        raise Refused("its operations run in different gradient or autocast modes")
    first = min(attention.nodes, key=state.order.__getitem__)
    # The nodes themselves have no other users. One may be written in place by the next one, and
    # by nothing else.
    if state.written(attention.inputs(), first, attention.root) or state.ever_written(
        attention.fills
    ):
        raise Refused("a tensor is written in place between its operations")


def _is_narrower(node: fx.Node, dtype: torch.dtype) -> bool:
    """Return whether a node rounds its inputs to a dtype that lacks values of `dtype`."""
    example = value(node)
    if not isinstance(example, Tensor) or represents(example.dtype, dtype):
        return False
    inputs = [value(operand) for operand in node.all_input_nodes]
    return not all(represents(example.dtype, x.dtype) for x in inputs if isinstance(x, Tensor))


def _check_users(nodes: Iterable[fx.Node], attention: UnfusedAttention) -> None:
    """Raise Refused if a value between the operands and the result is used elsewhere."""
    for node in nodes:
        if node is attention.root or _is_view_of_an_input(node, attention):
            continue
        outside = [
            user for user in node.users if user not in attention.nodes and not _is_dead(user)
        ]
        if not outside:
            continue
        if any(user.op == "output" for user in outside):
            raise Refused("its weights or scores are returned, and kernels do not compute them")
        raise Refused(f"{node.name}, a value on the way, is used elsewhere, by {outside[0].name}")


def _is_dead(node: fx.Node) -> bool:
    """Return whether a node is dead: it has no side effects, and only dead users."""
    return node.op != "output" and not writes(node) and all(map(_is_dead, node.users))


def _is_view_of_an_input(node: fx.Node, attention: UnfusedAttention) -> bool:
    """Return whether `node` is the transposed key, which may also be used elsewhere."""
    call = canonical(node)
    return call is not None and call.op == "transpose" and call.args[0] is attention.key.source


def _is_identity(node: fx.Node) -> bool:
    call = canonical(node)
    return call is not None and call.op == IDENTITY
