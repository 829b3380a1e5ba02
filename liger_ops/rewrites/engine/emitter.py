"""Insert calls into a graph, each with its example value."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from .canonical import value
from .replay import fake_mode_of
from .rewrite import insert


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
