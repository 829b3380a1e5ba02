"""Call what a node calls, with other values for its arguments, such as fake tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import fx

from ...torch_private import FakeTensor


def replay(node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The result of the function or method that `node` calls."""
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    function: Any = node.target
    return function(*args, **kwargs)


def fake_mode_of(values: Iterable[Any]) -> contextlib.AbstractContextManager[Any]:
    """The fake mode of the tensors in `values`, which is not the one active in a backend."""
    for one in values:
        if isinstance(one, FakeTensor):
            return one.fake_mode
    return contextlib.nullcontext()
