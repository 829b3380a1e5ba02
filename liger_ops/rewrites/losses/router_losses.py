"""The load-balancing loss of a mixture of experts, over all of its layers.

transformers writes it as a loop over the layers, which the graph has unrolled: sums of the numbers
of tokens that each expert has and of the experts' probabilities, both divided by the number of
tokens. The sums are followed back from the loss to the softmax of each layer's logits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import fx

from ..engine.canonical import calls, is_tensor, same, same_number, value
from ..engine.graph_state import GraphState
from ..engine.insertion import Refused, derive, items
from ..engine.reading import CodeReader, is_zeros, nodes_before
from ..engine.report import Report
from ..engine.rewrite import emit, reported

OP = "router_losses"
# Most operations between a choice of experts and the product of a loss.
FURTHEST = 10
# Dtypes in which the numbers of experts are the same numbers.
COUNTED = (torch.float32, torch.float64, torch.int32, torch.int64)


class Layer(NamedTuple):
    """A layer's part in one of the two sums.

    Attributes:
        logits: the layer's logits.
        weight: the weights of the tokens, or None.
        top_k: the number of experts that are counted for a token; None in the sum of probabilities.
    """

    logits: fx.Node
    weight: fx.Node | None
    top_k: Any = None


def rewrite(graph: fx.Graph, report: Report) -> None:
    state: GraphState | None = None
    for loss in report.visiting(OP, list(graph.nodes)):
        if not _is_like_a_loss(loss):
            continue
        state = state or GraphState(graph)
        if not state.transformed(loss):
            with reported(graph, report, OP, loss), state.modes_of(loss):
                report.used(OP, _replace(loss, state))


def _is_like_a_loss(node: fx.Node) -> bool:
    """Return whether a node is a number times a sum of products after a choice of experts."""
    product = calls(node, "mul")
    if product is None or not is_tensor(node, dim=0):
        return False
    for total in product.args:
        reduction = calls(total, "sum") or calls(total, "mean")
        if reduction and reduction.args[1] is None and calls(reduction.args[0], "mul"):
            return any(
                calls(before, "topk") for before in nodes_before(reduction.args[0], FURTHEST)
            )
    return False


def _replace(loss: fx.Node, state: GraphState) -> fx.Node:
    reading = CodeReader(state)
    logits, weight, top_k = _LossReader(reading).layers(loss)
    op = emit(loss, torch.ops.liger.router_losses.default, (logits, top_k, weight))
    (new,) = items(op, 1)
    if value(new).dtype != value(loss).dtype:
        new = derive(loss, torch.Tensor.to, new, value(loss).dtype)
    reading.replace(loss, new, [*logits, weight])
    return op


# A value, and the node that reads it.
Read = tuple[Any, fx.Node]


class _LossReader:
    """Reads the code of a loss: E * sum(counts / tokens * (probabilities / tokens))."""

    def __init__(self, reading: CodeReader) -> None:
        self.reading = reading

    def layers(self, loss: fx.Node) -> tuple[list[fx.Node], fx.Node | None, int]:
        """Return the logits of each layer, the weights of tokens, and the number of experts that a
        token has."""
        a, b = self.factors(loss)
        counts, tokens = self.quotient(*a)
        sums, others = self.quotient(*b)
        if _is_sum_over_tokens(counts[0][0]):
            counts, sums = sums, counts
        counted = [self.counted(*term) for term in counts]
        summed = [self.summed(*term) for term in sums]
        order = self.reading.state.order
        layers = sorted((layer.logits for layer in summed), key=order.__getitem__)
        if layers != sorted((layer.logits for layer in counted), key=order.__getitem__):
            raise Refused("its counts are not of the logits whose probabilities it sums")
        top_k, weight, E = counted[0].top_k, counted[0].weight, value(layers[0]).shape[1]
        if not same(_shape(counts[0][0]), (E,)):
            raise Refused("its counts are not one for each expert")
        if any(layer.weight is not weight for layer in (*counted, *summed)):
            raise Refused("its layers or sums have different weights of tokens")
        if any(layer.top_k != top_k for layer in counted) or not isinstance(top_k, int):
            raise Refused("its layers count different numbers of experts for a token")
        if not all(same(_shape(layer), _shape(layers[0])) for layer in layers):
            raise Refused("its layers have different numbers of tokens or experts")
        if not same(self.number, E) and not same_number(value(self.number), E):
            raise Refused(f"it is multiplied by {self.number}, not by the number of experts, {E}")
        for total in (tokens, others):
            self.check_total(*total, layers, weight)
        if weight is not None and value(weight).requires_grad:
            raise Refused("the weights of its tokens have a gradient")
        return layers, weight, top_k

    def factors(self, loss: fx.Node) -> list[Read]:
        """Return the two factors of the product that is summed, each with its reader."""
        node, args = self.needed(loss, loss, "mul")
        total, self.number = args if is_tensor(args[0]) else args[::-1]
        total, summed = self.needed(total, node, "sum")
        if summed[1:] not in ((None, False, None), (None, False, torch.float32)):
            raise Refused("its sum is not one of all experts")
        product, factors = self.needed(summed[0], total, "mul")
        if not all(same(size, 1) for size in value(product).shape[:-1]):
            raise Refused("it multiplies the share of each choice by the probabilities")
        return [self.reading.views(x, product, "unsqueeze", "view") for x in factors]

    def quotient(self, x: Any, by: fx.Node) -> tuple[list[Read], Read]:
        """Return the terms of a sum that is divided, and the divisor, each with its reader."""
        node, (total, divisor) = self.needed(x, by, "div")
        if value(node).dtype is not torch.float32:
            raise Refused(f"its sums are in {value(node).dtype}")
        terms = self.terms(total, node)
        if not terms or any(not same(_shape(term), _shape(node)) for term, _ in terms):
            raise Refused("its sums over the layers are not of numbers for each expert")
        return terms, (divisor, node)

    def terms(self, x: Any, by: fx.Node) -> list[Read]:
        """Return the terms of a sum, without zeros, each with its reader."""
        waiting, terms = [(x, by)], []
        while waiting:
            x, by = waiting.pop()
            if isinstance(x, fx.Node) and (found := self.reading.call(x, by, "add")):
                node, args = found
                waiting += [(arg, node) for arg in args]
            elif is_zeros(zeros := self.reading.source(x, by)):
                if isinstance(zeros, fx.Node):
                    self.reading.read(x, by)
            else:
                terms.append((x, by))
        return terms

    def counted(self, x: Any, by: fx.Node) -> Layer:
        """Read the numbers of tokens of each expert in a layer."""
        weight = None
        if found := self.reading.call(x, by, "histc"):
            node, (ids, bins, least, most) = found
            E = value(node).shape[0]
            # The bins are of one number each: from 0 to E they are 1 wide, from 0 to E - 1 a little
            # more, which puts E - 1, at the end, into the last.
            if not same((bins, least), (E, 0)) or not (same(most, E) or same(most, E - 1)):
                raise Refused("its bins are not one for each expert")
            while cast := self.reading.call(ids, node, "cast"):
                node, (ids, dtype) = cast
                if dtype not in COUNTED:
                    raise Refused(f"the numbers of experts are rounded to {dtype}")
        else:
            node, (zeros, _, ids, repeated) = self.needed(x, by, "scatter_add")
            if not is_zeros(self.reading.read(zeros, node)) or not is_tensor(node, dim=1):
                raise Refused("its counts are not added to zeros")
            _, (weight, top_k, dim) = self.needed(repeated, node, "repeat_interleave")
            if dim not in (None, -1) or not is_tensor(weight, dim=1):
                raise Refused("its weights are not repeated for each expert of a token")
            weight = self.weight(weight)
        ids, node = self.reading.views(ids, node, "view")
        node, (chosen, i) = self.needed(ids, node, "item")
        node, (scores, count, dim, largest) = self.needed(chosen, node, "topk")
        if i != 1 or dim != -1 or largest is not True:
            raise Refused("its counts are not of the experts with the largest probabilities")
        if weight is not None and not same(top_k, count):
            raise Refused("its weights are not repeated for each expert of a token")
        if not calls(self.reading.source(scores, node), "softmax"):
            # The largest logits are of the same experts.
            return Layer(self.reading.take(scores), weight, count)
        return Layer(self.logits(scores, node), weight, count)

    def summed(self, x: Any, by: fx.Node) -> Layer:
        """Read the sums of the probabilities of each expert in a layer."""
        node, args = self.needed(x, by, "sum")
        if args[1:] not in (((-2,), False, None), ((-2,), False, torch.float32)):
            raise Refused("its probabilities are not summed over tokens")
        if value(node).dtype is not torch.float32:
            raise Refused(f"its probabilities are summed in {value(node).dtype}")
        weight, x = None, args[0]
        if found := self.reading.call(x, node, "mul"):
            node, factors = found
            column = next((f for f in factors if calls(f, "unsqueeze")), None)
            _, (column, dim) = self.needed(column, node, "unsqueeze")
            if dim != -1 or not is_tensor(column, dim=1):
                raise Refused("its probabilities are not weighted by token")
            weight = self.weight(column)
            (x,) = (f for f in factors if not calls(f, "unsqueeze"))
        if cast := self.reading.call(x, node, "cast"):
            node, (x, dtype) = cast
            if dtype is not torch.float32:
                raise Refused(f"its probabilities are rounded to {dtype}")
        return Layer(self.logits(x, node), weight)

    def logits(self, x: Any, by: fx.Node) -> fx.Node:
        """Return the logits of a layer's probabilities."""
        node, (x, dim) = self.needed(x, by, "softmax")
        logits: fx.Node = self.reading.take(x)
        dtypes = (value(logits).dtype, torch.float32)
        if dim != -1 or not is_tensor(node, dim=2) or value(node).dtype not in dtypes:
            raise Refused("its probabilities are not those of a matrix of logits")
        return logits

    def weight(self, x: Any) -> fx.Node:
        weight: fx.Node = self.reading.take(x)
        if value(weight).dtype is not torch.float32:
            raise Refused(f"the weights of its tokens are in {value(weight).dtype}")
        return weight

    def check_total(
        self, x: Any, by: fx.Node, layers: list[fx.Node], weight: fx.Node | None
    ) -> None:
        """Raise Refused if x is not the number of tokens, or the sum of their weights, in all
        layers."""
        rows = value(layers[0]).shape[0]
        if weight is None and isinstance(rows, int) and same(x, rows * len(layers)):
            return
        terms = self.terms(x, by)
        for term, reader in terms:
            if weight is None and not is_tensor(term) and same(term, rows):
                continue
            found = self.reading.call(term, reader, "sum") if weight is not None else None
            if found is None or found[1][1:] != (None, False, None):
                raise Refused("it does not divide by the number of its tokens")
            if self.reading.take(found[1][0]) is not weight:
                raise Refused("it does not divide by the sum of the weights of its tokens")
        if len(terms) != len(layers):
            raise Refused("it does not divide by the number of tokens in all of its layers")

    def needed(self, x: Any, by: fx.Node, op: str) -> tuple[fx.Node, tuple[Any, ...]]:
        found = self.reading.call(x, by, op)
        if found is None:
            raise Refused(f"{x} is not the {op} that the loss has there")
        return found


def _shape(x: Any) -> tuple[Any, ...]:
    return tuple(value(x).shape) if is_tensor(x) else ()


def _is_sum_over_tokens(term: Any) -> bool:
    return calls(term, "sum") is not None
