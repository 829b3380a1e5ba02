"""Read code back from its result, through writes in place, for code that no pattern covers.

Code may write to a tensor that it has made, as `out.add_(bias)` does. What a node reads is then the
value after the last write before it. `CodeReader` follows these values, and keeps the nodes that it
has passed: those that an op replaces.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from torch import fx

from .canonical import IDENTITY, Call, calls, canonical, operation, value, written_value
from .effects import memory, written
from .graph_state import GraphState, erase_unused
from .insertion import Refused
from .rewrite import obstacle, replace


def nodes_before(node: fx.Node, furthest: int) -> Iterator[fx.Node]:
    """Yield the nodes from which `node` is computed, by at most `furthest` operations."""
    nodes = [node]
    for _ in range(furthest):
        nodes = list(dict.fromkeys(x for node in nodes for x in node.all_input_nodes))
        yield from nodes


class CodeReader:
    """The nodes that compute a result, as far as they have been read: `nodes`."""

    def __init__(self, state: GraphState) -> None:
        self.state = state
        self.nodes: set[fx.Node] = set()

    @property
    def writers(self) -> list[fx.Node]:
        """The nodes that were read and write in place, in the order of the graph."""
        order = self.state.order
        return sorted((node for node in self.nodes if written(node)), key=order.__getitem__)

    def source(self, x: Any, by: fx.Node) -> Any:
        """Return the node that computes what `by` reads as x, behind identities; or a constant.

        Raises Refused if another tensor, of which x is a view, is written in between.
        """
        return self._source(x, by)[0]

    def call(self, x: Any, by: fx.Node, *ops: str) -> tuple[fx.Node, tuple[Any, ...]] | None:
        """Return the node that computes what `by` reads as x, and the arguments of its canonical
        call, if it is a call of one of `ops`; its nodes count as read."""
        node, passed = self._source(x, by)
        call = self._canonical(node)
        if call is None or call.op not in ops:
            return None
        self.nodes.update(passed, (node,), call.through)
        arguments = [a for a in call.args if isinstance(a, fx.Node)]
        for through in call.through:
            if any(w is not node for w in self.state.writers(arguments, through, node)):
                raise Refused(
                    f"{through.name} and {node.name} read a tensor before and after a write"
                )
        return node, call.args

    def views(self, x: Any, by: fx.Node, *ops: str) -> tuple[Any, fx.Node]:
        """Return the argument of the calls of `ops` that x is, one upon the other, and its reader;
        x and `by` themselves if x is none."""
        while (found := self.call(x, by, *ops)) is not None:
            by, (x, *_) = found
        return x, by

    def read(self, x: Any, by: fx.Node) -> fx.Node:
        """Count the node that computes what `by` reads as x as read, and return it."""
        node, passed = self._source(x, by)
        self.nodes.update(passed, (node,))
        return node

    def take(self, x: Any) -> Any:
        """Return the input of the op that x is, behind identities.

        The op reads it where the result stands. `check` asks that it is not written in between.
        """
        while isinstance(x, fx.Node) and (call := calls(x, IDENTITY)):
            self.nodes.add(x)
            (x,) = call.args
        return x

    def replace(self, root: fx.Node, new: fx.Node, inputs: Collection[Any]) -> None:
        """Replace `root` by `new`, which reads `inputs`, and erase what was read.

        Raises Refused if something is used elsewhere, or written in between.
        """
        users = {user for node in self.nodes - {root} for user in node.users if not user.users}
        # In a subgraph Dynamo keeps results that nothing uses.
        unused = {user for user in users if calls(user, "item") or self._is_unread(user, root)}
        self.nodes |= unused
        self.check(root, inputs)
        writers = self.writers
        replace([(root, new)], self.nodes, self.state)
        for node in (*unused, *reversed(writers)):
            erase_unused(node, self.nodes)

    def check(self, root: fx.Node, inputs: Collection[Any]) -> None:
        """Raise Refused if what was read cannot be replaced by an op of `inputs`."""
        if reason := obstacle([root], self.nodes, inputs, self.state, writers=self.writers):
            raise Refused(reason)
        held = memory(x for x in inputs if isinstance(x, fx.Node))
        for writer in self.writers:
            others = set(self.state.sharing(writer.all_input_nodes[0])) - self.nodes
            if written(writer) & held or others:
                raise Refused(f"{writer.name} writes to a tensor that is used elsewhere")

    def _is_unread(self, writer: fx.Node, root: fx.Node) -> bool:
        """Return whether a write in place is before `root`, and no node that was read sees it."""
        order, keys = self.state.order, written(writer)
        if written_value(writer) is None or not keys or order[writer] > order[root]:
            return False
        readers = [node for node in self.nodes if order[node] > order[writer]]
        return not keys & memory({*readers, *(x for node in readers for x in node.all_input_nodes)})

    def _source(self, x: Any, by: fx.Node) -> tuple[Any, tuple[fx.Node, ...]]:
        passed: tuple[fx.Node, ...] = ()
        while isinstance(x, fx.Node):
            writers = [w for w in self.state.writers([x], x, by) if w not in (x, by)]
            if writers:
                if writers[-1].args[:1] != (x,):
                    raise Refused(f"{x.name} is written in place, by {writers[-1].name}")
                return writers[-1], passed
            call = canonical(x)
            if call is None or call.op != IDENTITY:
                return x, passed
            passed, by, x = (*passed, x), x, call.args[0]
        return x, passed

    def _canonical(self, node: Any) -> Call | None:
        if not isinstance(node, fx.Node):
            return None
        return written_value(node) if written(node) and canonical(node) is None else canonical(node)


def is_zeros(node: Any) -> bool:
    """Return whether a node is a new tensor of zeros, or the number 0."""
    if not isinstance(node, fx.Node):
        return value(node) == 0 and type(node) in (int, float)
    return operation(node) in ("zeros", "zeros_like", "new_zeros")
