"""Insert calls into a graph, each with its example value, and run a node's call with other values
for its arguments, such as fake tensors.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ...torch_private import FakeTensor
from .canonical import value


def replay(node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call the function or method that `node` calls, with these arguments."""
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    function: Any = node.target
    return function(*args, **kwargs)


def fake_mode_of(values: Iterable[Any]) -> contextlib.AbstractContextManager[Any]:
    """Return the fake mode of the fake tensors in `values`, or a context that does nothing.

    It is not the fake mode that is active while a backend runs.
    """
    for x in values:
        if isinstance(x, FakeTensor):
            return x.fake_mode
    return contextlib.nullcontext()


# Keys of a node's meta that say which of the user's code it is from; copied to new nodes.
ORIGIN = ("stack_trace", "nn_module_stack", "source_fn_stack")

# A function of torch, and its arguments after the tensor.
View = tuple[Any, ...]
NO_KWARGS: Mapping[str, Any] = {}


class Refused(Exception):
    """A match cannot be replaced. The text is the reason, one clause."""


def run(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] = NO_KWARGS) -> Any:
    """Run `target` on the example values of `args`; `kwargs` are constants."""
    values = pytree.tree_map(value, args)
    try:
        with fake_mode_of(pytree.tree_leaves(values)):
            return target(*values, **kwargs)
    except (TypeError, ValueError) as error:
        raise Refused(str(error)) from None


def insert(
    before: fx.Node, target: Any, args: tuple[Any, ...], result: Any,
    kwargs: Mapping[str, Any] = NO_KWARGS,
) -> fx.Node:  # fmt: skip
    """Insert a call with the example value `result` before a node, with that node's origin."""
    graph = before.graph
    with graph.inserting_before(before):
        new = graph.call_function(target, args, dict(kwargs))
    new.meta.update({key: before.meta[key] for key in ORIGIN if key in before.meta})
    new.meta["example_value"] = result
    return new


def derive(before: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """Insert a call before a node, and compute its example value; `kwargs` are constants."""
    return insert(before, target, args, run(target, args, kwargs), kwargs)


def viewed(at: fx.Node, x: fx.Node, views: Iterable[View]) -> fx.Node:
    """Insert views of x before `at`, one upon the other, and return the last."""
    for function, *arguments in views:
        x = derive(at, function, x, *arguments)
    return x


def items(of: fx.Node, count: int) -> list[fx.Node]:
    """Insert nodes for the first `count` results of `of`, which returns several."""
    results: list[fx.Node] = []
    after = of
    for i, result in enumerate(of.meta["example_value"][:count]):
        with of.graph.inserting_after(after):
            item = of.graph.call_function(operator.getitem, (of, i))
        item.meta.update({key: of.meta[key] for key in ORIGIN if key in of.meta})
        item.meta["example_value"] = result
        results.append(item)
        after = item
    return results


class Emitter:
    """Inserts calls before the node `before`, in the order in which they are made.

    A call of constants that returns an integer is computed at once and not inserted, so that sizes
    that are known stay numbers. `like` is a value whose fake mode the calls run in.
    """

    def __init__(self, before: fx.Node, like: Any) -> None:
        self.before, self._fake_mode = before, fake_mode_of([like])

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        nodes = [leaf for leaf in leaves if isinstance(leaf, fx.Node)]
        known_args, known_kwargs = pytree.tree_map(value, (args, kwargs))
        with self._fake_mode, torch.no_grad():
            result = target(*known_args, **known_kwargs)
        if not nodes and isinstance(result, int):
            return result
        return insert(self.before, target, args, result, kwargs)

    def size(self, tensor: Any, dim: int) -> Any:
        """Return a size as a number, or as a node if it is symbolic."""
        known = value(tensor).shape[dim]
        return known if isinstance(known, int) else self(torch.Tensor.size, tensor, dim)
