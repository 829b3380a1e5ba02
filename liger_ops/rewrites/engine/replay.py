"""Run a node's call with other values for its arguments, such as fake tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import fx

from ...torch_private import FakeTensor


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
