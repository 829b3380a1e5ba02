"""PyTorch's own functions, where another package has set its own in their place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.nn import functional

from ...torch_private import native_linear


@contextmanager
def torch_linear() -> Iterator[None]:
    """Within it, torch.nn.functional.linear is PyTorch's. DeepSpeed's `zero.Init` sets an autograd
    function there for the rest of the process, in which nothing is recognised."""
    current = functional.linear
    functional.linear = native_linear
    try:
        yield
    finally:
        functional.linear = current
