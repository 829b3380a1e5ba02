"""Models that make consecutive position_ids if they are given none.

transformers reads position_ids to find packed documents. While it is traced it cannot read them,
and adds a mask of documents in any case. Position_ids that a model makes itself hold no packed
documents: its forward is traced without data, and the positions that it passes to the mask
functions are proved consecutive.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...rewrites.attention.mask.evaluate import IndexFunctions
from ...rewrites.engine.maps.algebra import Affine, Unknown, index
from ..layers.rebinding import opaque, rebound, wrapped
from ..probing import undisturbed
from ..trace import Trace

# Functions of transformers.masking_utils that may skip a causal mask by default.
CAUSAL = {"create_causal_mask", "create_sliding_window_causal_mask", "create_chunked_causal_mask"}
INPUTS = ("input_ids", "inputs_embeds")
BATCH, LENGTHS = 2, (4, 9)


def makes_positions(model: Any, forward: Any) -> tuple[str, ...]:
    """Return the inputs with which a forward's masks are of one document if it is given no
    position_ids. () if `without_looking_at_positions` cannot copy the forward."""
    names = inspect.signature(forward).parameters
    if "position_ids" not in names or opaque(wrapped(forward)):
        return ()
    return tuple(
        name
        for name in INPUTS
        if name in names and all(_makes_positions(model, forward, name, n) for n in LENGTHS)
    )


def _makes_positions(model: Any, forward: Any, name: str, length: int) -> bool:
    trace, mask_calls = Trace(), []
    shape: tuple[int, ...] = (BATCH, length)
    if name == INPUTS[0]:
        given = trace.input(name, shape, torch.int64)
    else:
        given = trace.input(name, (*shape, getattr(model.config, "hidden_size", 1)), torch.float32)
    recording = rebound(
        forward, dict.fromkeys(CAUSAL, lambda _: lambda *_, **given: mask_calls.append(given))
    )
    # After its masks a forward may fail, because its tensors have no data.
    with contextlib.suppress(Exception), undisturbed(), trace.running():
        recording(_WithoutData(model), use_cache=False, **{name: given})
    positions = [given.get("position_ids") for given in mask_calls]
    return bool(mask_calls) and all(_are_consecutive(trace, one) for one in positions)


def _are_consecutive(trace: Trace, positions: Any) -> bool:
    try:
        value = isinstance(positions, Tensor) and IndexFunctions().value(trace.node(positions))
    except Unknown:
        return False
    return isinstance(value, Affine) and (value - index(-1)).is_constant


class _WithoutData:
    """A stand-in for a module in a trace, with its attributes and with results of its shapes."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.module, name)
        if isinstance(value, types.MethodType) and value.__self__ is self.module:
            return types.MethodType(value.__func__, self)
        if isinstance(value, nn.ModuleList):
            return ()
        return _WithoutData(value) if isinstance(value, nn.Module) else value

    def __call__(self, x: Tensor, *others: Any, **options: Any) -> Tensor:
        if isinstance(self.module, nn.Embedding):
            return torch.empty(*x.shape, self.module.embedding_dim, device=x.device)
        if isinstance(self.module, nn.Linear):
            return torch.empty(*x.shape[:-1], self.module.out_features, device=x.device)
        return x


def without_looking_at_positions(forward: Any, inputs: tuple[str, ...]) -> Callable[..., Any]:
    """Return a forward whose masks are made without its own position_ids in calls whose only
    tensors are these inputs and an attention_mask."""
    harmless = ("self", *inputs, "attention_mask")
    names = list(inspect.signature(forward).parameters)
    others = [(position, name) for position, name in enumerate(names) if name not in harmless]
    consecutive = rebound(forward, dict.fromkeys(CAUSAL, _without_positions))

    @functools.wraps(forward)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        given = [args[i] if i < len(args) else kwargs.get(name) for i, name in others]
        looks = any(isinstance(value, Tensor) for value in given)
        return (forward if looks else consecutive)(*args, **kwargs)

    return chosen


def _without_positions(make_mask: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **given: make_mask(*args, **{**given, "position_ids": None})
