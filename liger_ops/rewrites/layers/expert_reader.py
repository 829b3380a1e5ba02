"""Read the code of a layer of experts whose rows are gathered; see `experts.py`.

A number of an expert from E on is a sentinel of expert parallelism. `grouped_mm` leaves the rows of
sentinels out of all groups, as the op does: their results are masked, or memory that nothing was
written to. `batched_mm` multiplies them by the weights of another expert, so that the numbers have
to be those of `topk` there.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import fx

from ..engine.canonical import (
    Call,
    OpOverload,
    OpOverloadPacket,
    calls,
    canonical,
    is_tensor,
    operation,
    same,
    value,
)
from ..engine.graph_state import GraphState
from ..engine.insertion import Refused
from ..engine.reading import CodeReader
from .activations import CLAMPED_SWIGLU, GEGLU, RELU_SQUARED, SWIGLU, UNLIMITED

ACTIVATIONS: list[Any] = [*CLAMPED_SWIGLU, *SWIGLU, *GEGLU, *RELU_SQUARED, *UNLIMITED]
# transformers' own operator, in place of a grouped_mm that Inductor does not compile.
FALLBACK = ("transformers.grouped_mm_fallback", "transformers.grouped_mm_fallback.default")
# Dtypes in which the numbers of experts are the same numbers.
COUNTED = (torch.float32, torch.float64, torch.int32, torch.int64)


class Product(NamedTuple):
    """A product of rows by the weights of their experts.

    Attributes:
        node: the product, before its bias.
        rows: the rows that are multiplied, and the node that reads them.
        weight: the weights of all experts, (E, N, K), or (E, K, N) if `is_transposed`.
        bias: (E, N), or None.
    """

    node: fx.Node
    rows: tuple[Any, fx.Node]
    weight: fx.Node
    is_transposed: bool
    bias: fx.Node | None


class ExpertInputs(NamedTuple):
    """The inputs of a layer's experts, and the options of the op's activation."""

    x: fx.Node
    up: Product
    down: Product
    ids: fx.Node
    scores: fx.Node
    options: tuple[Any, ...]


def is_product(node: fx.Node) -> bool:
    call = _call_of_experts(node) or canonical(node)
    if call is not None and call.op == "matmul":
        return any(_is_rows(x) and is_tensor(x, dim=3) for x in call.args)
    return call is not None and call.op == "grouped_mm"


def _is_rows(node: Any) -> bool:
    """Return whether a node is `x[index]`, of a vector of integers."""
    if not isinstance(node, fx.Node) or operation(node) != "getitem" or not is_tensor(node):
        return False
    index = value(node.args[1])
    return is_tensor(index, dim=1) and index.dtype in (torch.int32, torch.int64)


def _call_of_experts(node: Any) -> Call | None:
    """Return the canonical call of an operation that only code of experts has, or None."""
    if not isinstance(node, fx.Node):
        return None
    if _is_rows(node):
        return Call("rows", node.args)
    is_operator = isinstance(node.target, (OpOverload, OpOverloadPacket))
    if is_operator and str(node.target) in FALLBACK and not set(node.kwargs) - {"offs"}:
        return Call("grouped_mm", (*node.args, *node.kwargs.values()))
    name = operation(node)
    if name in ("setitem", "floordiv", "ge", "empty_like") and len(node.args) in (1, 2, 3):
        return Call(name, node.args)
    if name == "arange" and len(node.args) == 1 and not {"start", "step"} & set(node.kwargs):
        return Call(name, node.args)
    return None


class ExpertReader(CodeReader):
    """Reads the code of a layer's experts, from the sum over a token's rows.

    Attributes:
        is_grouped: whether the rows are in the order of the experts.
        sort: the node that sorts the rows by their experts.
        ids: the numbers of the experts, (T, K).
        sizes: what the code takes for E, the number of experts.
    """

    def __init__(self, state: GraphState) -> None:
        super().__init__(state)
        self.is_grouped = False
        self.sort: fx.Node | None = None
        self.ids: fx.Node | None = None
        self.sizes: list[Any] = []
        self.is_clamped = False
        self.top_k: Any = None

    def experts(self, total: fx.Node) -> ExpertInputs:
        node, args = self.needed(total, total, "sum")
        if args[1:] != ((-2,), False, None):
            raise Refused("its sum is not one of the rows of each token")
        by_token, (rows, _) = self.needed(args[0], node, "view")
        T, self.top_k, D = value(by_token).shape
        if not is_tensor(rows, dim=2) or not same(value(rows).shape[1], D):
            raise Refused("its sum is not one of the rows of each token")
        if not isinstance(self.top_k, int):
            raise Refused("the number of experts of a token is not known at compile time")
        node = by_token
        if ordered := self.call(rows, node, "rows"):
            self.is_grouped = True
            node, (rows, inverse) = ordered
            self.check_inverse(inverse, node)
        node, factors = self.needed(rows, node, "mul")
        results, column = self.factors(factors)
        scores = self.scores(column, node)
        down = self.product(results, node, is_last=True)
        options, results, reader = self.activation(self.read(*down.rows))
        up = self.product(results, reader)
        x = self.hidden_states(up)
        E = value(down.weight).shape[0]
        assert self.ids is not None
        for matrix in (self.ids, scores):
            if not same(tuple(value(matrix).shape), (T, self.top_k)):
                raise Refused("its experts or their scores are not K for each token")
        if not is_tensor(x, dim=2) or not same(value(x).shape[0], T):
            raise Refused("its rows are not K for each token")
        if not all(same(size, E) for size in (*self.sizes, value(up.weight).shape[0])):
            raise Refused(f"its code counts another number of experts than {E}")
        # torch.histc without bounds, which are both 0 for one expert, counts a sentinel as well.
        if (not self.is_grouped or same(E, 1)) and not self.is_of_topk(E, total):
            raise Refused("the numbers of its experts are not those of topk: one may be a sentinel")
        return ExpertInputs(x, up, down, self.ids, scores, options)

    def factors(self, factors: tuple[Any, ...]) -> tuple[Any, Any]:
        """Return the results of the rows, and the column of their scores."""
        for results, column in (factors, factors[::-1]):
            if (
                calls(column, "unsqueeze")
                and is_tensor(column, dim=2)
                and is_tensor(results, dim=2)
            ):
                return results, column
        raise Refused("its rows are not multiplied by a score each")

    def scores(self, column: Any, by: fx.Node) -> fx.Node:
        node, (scores, dim) = self.needed(column, by, "unsqueeze")
        if dim != -1:
            raise Refused("its rows are not multiplied by a score each")
        if self.is_grouped:
            node, (scores, order) = self.needed(scores, node, "rows")
            self.check_order(order, node)
        elif masked := self.call(scores, node, "masked_fill"):
            node, (scores, sentinels, filled) = masked
            self.check_sentinels(sentinels, node, filled)
        node, (scores, _) = self.needed(scores, node, "view")
        taken: fx.Node = self.take(scores)
        return taken

    def product(self, x: Any, by: fx.Node, is_last: bool = False) -> Product:
        """Read a product of rows by the weights of their experts, with its bias."""
        is_masked = False
        while self.is_grouped and (masked := self.call(x, by, "masked_fill")):
            by, (x, sentinels, filled) = masked
            _, (sentinels, dim) = self.needed(sentinels, by, "unsqueeze")
            if dim != -1:
                raise Refused("its mask is not one of rows")
            self.check_sentinels(sentinels, by, filled)
            is_masked = True
        bias = None
        if added := self.call(x, by, "add"):
            by, (x, rows) = added
            if _is_rows(x):
                x, rows = rows, x
            node, (bias, ids) = self.needed(rows, by, "rows")
            bias = self.take(bias)
            self.check_numbers(ids, node)
        if is_last and self.is_grouped and self.is_clamped and not is_masked:
            raise Refused("the rows of sentinels are not masked")
        product = self.grouped(x, by) if self.is_grouped else self.batched(x, by)
        if bias is not None and value(bias).dtype != value(product.node).dtype:
            raise Refused(f"its bias is in {value(bias).dtype}, which the op would round")
        return product._replace(bias=bias)

    def grouped(self, x: Any, by: fx.Node) -> Product:
        node, (rows, weight, offsets) = self.needed(x, by, "grouped_mm")
        reader, is_transposed = node, True
        if turned := self.call(weight, node, "transpose"):
            reader, (weight, dims) = turned
            if dims != (-2, -1):
                raise Refused("its weights are transposed in another way")
            is_transposed = False
        weight = self.take(weight)
        if not is_tensor(weight, dim=3):
            raise Refused("its weights are not a matrix for each expert")
        self.check_offsets(offsets, node, value(weight).shape[0])
        return Product(node, (rows, node), weight, is_transposed, None)

    def batched(self, x: Any, by: fx.Node) -> Product:
        reader, (x, squeezed) = self.needed(x, by, "squeeze")
        node, (left, right) = self.needed(x, reader, "matmul")
        is_transposed = _is_rows(right)
        weight, rows = (right, left) if is_transposed else (left, right)
        reader, (rows, dim) = self.needed(rows, node, "unsqueeze")
        if dim != squeezed or dim != (-2 if is_transposed else -1):
            raise Refused("its products are not of a row by a matrix")
        gathered, (weight, ids) = self.needed(weight, node, "rows")
        weight = self.take(weight)
        if not is_tensor(weight, dim=3):
            raise Refused("its weights are not a matrix for each expert")
        self.check_numbers(ids, gathered)
        return Product(node, (rows, reader), weight, is_transposed, None)

    def activation(self, root: fx.Node) -> tuple[tuple[Any, ...], Any, fx.Node]:
        """Return the options of the op's activation, what it is computed from, and the reader."""
        reason = "what is between its products is no activation of the op"
        for pattern, replacement in ACTIVATIONS:
            with self.state.modes_of(root):
                match = pattern.match(root)
            if match is None or match.difference is not None:
                continue
            try:
                op, args = replacement(match)
                options, *halves = _options(op._opname, args)
            except Refused as refused:
                reason = str(refused)
                continue
            self.nodes |= match.nodes
            if len(halves) == 1:
                return (*options, False), halves[0], root
            gate, up = halves
            return self.halves(gate, up, root, options)
        raise Refused(reason)

    def halves(
        self, gate: Any, up: Any, by: fx.Node, options: tuple[Any, ...]
    ) -> tuple[tuple[Any, ...], Any, fx.Node]:
        """Return what `gate` and `up` are the halves of, and its reader, behind the options."""
        node, (x, *of_gate) = self.needed(gate, by, "slice")
        other, (y, *of_up) = self.needed(up, by, "slice")
        n = value(x).shape[-1]
        if self.source(x, node) is not self.source(y, other) or not isinstance(n, int):
            raise Refused("its gate and up are not halves of one product")
        if same((*of_gate, *of_up), (-1, 0, n // 2, 1, -1, n // 2, n, 1)):
            return (*options, False), x, node
        if same((*of_gate, *of_up), (-1, 0, n, 2, -1, 1, n, 2)):
            return (*options, True), x, node
        raise Refused("its gate and up are not the first and the second half of a product")

    def hidden_states(self, up: Product) -> fx.Node:
        x, node = up.rows
        if not self.is_grouped:
            node, (x, count, dim) = self.needed(x, node, "repeat_interleave")
            if dim != -2 or not same(count, self.top_k):
                raise Refused("its rows are not those of each token, one for each expert")
            taken: fx.Node = self.take(x)
            return taken
        if cast := self.call(x, node, "cast"):
            node, (x, _) = cast
        if masked := self.call(x, node, "masked_fill"):
            node, (x, sentinels, filled) = masked
            _, (sentinels, _) = self.needed(sentinels, node, "unsqueeze")
            self.check_sentinels(sentinels, node, filled)
        node, (x, tokens) = self.needed(x, node, "rows")
        taken = self.take(x)
        node, (order, count) = self.needed(tokens, node, "floordiv")
        if not same(count, self.top_k):
            raise Refused("its rows are not those of each token, one for each expert")
        self.check_order(order, node)
        return taken

    def check_offsets(self, x: Any, by: fx.Node, E: Any) -> None:
        """Raise Refused if x is not where the rows of each expert end."""
        node, (counts, dim, dtype) = self.needed(x, by, "cumsum")
        node, (ids, bins, least, most) = self.needed(counts, node, "histc")
        # The bins are of one number each: from 0 to E they are 1 wide, from 0 to E - 1 a little
        # more, which puts E - 1, at the end, into the last.
        if not same((dim, bins, least), (-1, E, 0)) or not (same(most, E - 1) or same(most, E)):
            raise Refused("its groups are not those of the experts")
        if dtype not in (None, torch.int32):
            raise Refused("its groups are not those of the experts")
        while cast := self.call(ids, node, "cast"):
            node, (ids, dtype) = cast
            if dtype not in COUNTED:
                raise Refused(f"the numbers of experts are rounded to {dtype}")
        self.check_item(ids, node, 0)

    def check_inverse(self, x: Any, by: fx.Node) -> None:
        """Raise Refused if x does not undo the order of the experts."""
        node, (new, order, places) = self.needed(x, by, "setitem")
        self.needed(new, node, "empty_like")
        self.check_order(order, node)
        numbers, _ = self.needed(places, node, "arange")
        if not same(tuple(value(numbers).shape), tuple(value(new).shape)):
            raise Refused("the order of its rows is not undone")

    def check_order(self, x: Any, by: fx.Node) -> None:
        """Raise Refused if x is not the order of the rows by expert."""
        self.check_item(x, by, 1)

    def check_item(self, x: Any, by: fx.Node, i: int) -> None:
        node, (pair, number) = self.needed(x, by, "item")
        node, (ids, dim, descending) = self.needed(pair, node, "sort")
        if number != i or dim != -1 or descending is not False or self.sort not in (None, node):
            raise Refused("its rows are not in one order, that of the experts")
        self.sort = node
        self.flat_numbers(ids, node)

    def check_numbers(self, x: Any, by: fx.Node) -> None:
        """Raise Refused if x is not the number of each row's expert, that of a sentinel clamped."""
        if clamp := self.call(x, by, "clamp"):
            by, (x, least, most) = clamp
            if least is not None and not same(least, 0):
                raise Refused("the numbers of its experts are clamped")
            self.is_clamped = True
            self.sizes.append(most + 1 if isinstance(most, int) else None)
        if self.is_grouped:
            self.check_item(x, by, 0)
        else:
            self.flat_numbers(x, by)

    def check_sentinels(self, x: Any, by: fx.Node, filled: Any) -> None:
        """Raise Refused if x is not a mask of sentinels, or if rows are filled with another number
        than 0."""
        node, (ids, E) = self.needed(x, by, "ge")
        if not same(filled, 0):
            raise Refused(f"the rows of sentinels are filled with {filled}")
        self.sizes.append(E)
        if self.is_grouped:
            self.check_item(ids, node, 0)
        else:
            self.flat_numbers(ids, node)

    def flat_numbers(self, x: Any, by: fx.Node) -> None:
        node, (ids, _) = self.needed(x, by, "view")
        ids = self.take(ids)
        if not is_tensor(x, dim=1) or self.ids not in (None, ids):
            raise Refused("its rows have different experts in each product")
        self.ids = ids

    def is_of_topk(self, E: Any, by: fx.Node) -> bool:
        """Return whether the numbers of the experts are positions of `topk` among at most E."""
        x: Any = self.ids
        while True:
            node = self.source(x, by)
            call = canonical(node)
            if call is None or call.op not in ("view", "cast", "item"):
                return False
            if call.op == "item":
                break
            if call.op == "cast" and call.args[1] not in (torch.int32, torch.int64):
                return False
            by, x = node, call.args[0]
        chosen = calls(call.args[0], "topk")
        if chosen is None or call.args[1] != 1:
            return False
        scores, _, dim, _ = chosen.args
        return same(value(scores).shape[dim], E)

    def needed(self, x: Any, by: fx.Node, op: str) -> tuple[fx.Node, tuple[Any, ...]]:
        found = self.call(x, by, op)
        if found is None:
            raise Refused(f"{x} is not the {op} that experts have there")
        return found

    def _canonical(self, node: Any) -> Call | None:
        return _call_of_experts(node) or super()._canonical(node)


def _options(op: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the options of moe_experts for the call of an activation, and the call's tensors."""
    unused = (1.702, 7.0, 1.0)
    if op == "relu_squared":
        return ("relu_squared", *unused), args[0]
    gate, up, *rest = args
    if op == "geglu":
        return ("gelu" if rest[0] == "none" else "gelu_tanh", *unused), gate, up
    if op == "clamped_swiglu":
        if same(rest, (1.0, math.inf, 0.0)):
            return ("silu", *unused), gate, up
        return ("clamped_swiglu", *rest), gate, up
    if not same(rest[0], 1.0):
        raise Refused(f"its gate is multiplied by {rest[0]}")
    return ("silu", *unused), gate, up
