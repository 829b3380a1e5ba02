"""The backward of functions that have no second derivative."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Raise if a backward is itself to be differentiated. PyTorch's `once_differentiable` raises
    only where the incoming gradients require a gradient, and is silent of one that is constant."""

    @functools.wraps(backward)
    def run(ctx: Any, *grads: Any) -> Any:
        # Compiled code has no second derivative either, and raises itself.
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                "liger_ops.distributed: the gradient over a sharded vocabulary cannot be"
                " differentiated again; got create_graph=True"
            )
        return backward(ctx, *grads)

    return run
