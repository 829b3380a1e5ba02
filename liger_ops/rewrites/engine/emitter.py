"""Insert operations into a graph, each with its result under fake tensors."""

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

    A call with constant integers alone is computed at once, so that sizes are numbers where they
    are known.
    """

    def __init__(self, before: fx.Node, like: Any) -> None:
        self.before, self._fake_mode = before, fake_mode_of([like])

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        given = pytree.tree_leaves((args, kwargs))
        nodes = [one for one in given if isinstance(one, fx.Node)]
        known_args, known_kwargs = pytree.tree_map(value, (args, kwargs))
        with self._fake_mode, torch.no_grad():
            result = target(*known_args, **known_kwargs)
        if not nodes and isinstance(result, int):
            return result
        return insert(self.before, target, args, result, kwargs)

    def size(self, tensor: Any, dim: int) -> Any:
        """The size as a number, or as a node if it is symbolic."""
        known = value(tensor).shape[dim]
        return known if isinstance(known, int) else self(torch.Tensor.size, tensor, dim)
