"""The position_ids of a model, in which transformers looks for packed documents.

While it is traced transformers cannot read them, and adds a mask of documents in any case.
Position_ids that a model makes itself if it is given none hold no packed documents: its forward is
traced without data, and the positions that it passes to the mask functions are proved consecutive.

Position_ids that it is given become the documents of varlen_attention. The mask is made as it would
be without them: if that is causal, or a causal window, each document takes the place of a row.
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

from ...invariant_mode import NotInvariantError, is_invariant
from ...ops.attention.documents import Documents, called, packed_rows
from ...rewrites.attention.mask.evaluate import IndexFunctions
from ...rewrites.engine.maps.algebra import Affine, Unknown, index
from ..layers.rebinding import chain_to, opaque, rebound, wrapped
from ..probing import undisturbed
from ..trace import Trace

# Functions of transformers.masking_utils that may skip a causal mask by default.
CAUSAL = {"create_causal_mask", "create_sliding_window_causal_mask", "create_chunked_causal_mask"}
INPUTS = ("input_ids", "inputs_embeds")
BATCH, LENGTHS = 2, (4, 9)


def takes_positions(forward: Any) -> bool:
    """Return whether a forward takes position_ids, and `reading_positions` can copy it."""
    return "position_ids" in inspect.signature(forward).parameters and not opaque(wrapped(forward))


def makes_positions(model: Any, forward: Any) -> tuple[str, ...]:
    """Return the inputs with which a forward's masks are of one document if it is given no
    position_ids."""
    names = inspect.signature(forward).parameters
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


def reading_positions(
    forward: Any, inputs: tuple[str, ...], name: str, documents: Callable[..., Any],
    is_tracing: Callable[[Tensor], bool],
) -> Callable[..., Any]:  # fmt: skip
    """Return a forward that reads the position_ids that it is given as documents.

    Args:
        forward: that of the model.
        inputs: those with which alone the position_ids that it makes are consecutive. In such
            calls the masks are made without them.
        name: that of the implementation that its masks are made for.
        documents: the mask function of `documents_function`.
        is_tracing: transformers' function that says whether a tensor's data cannot be read.
    """

    def with_documents(make_mask: Callable[..., Any]) -> Callable[..., Any]:
        return _with_documents(make_mask, name, documents, is_tracing)

    reading = rebound(forward, dict.fromkeys(CAUSAL, with_documents))
    if not inputs:
        return reading
    harmless = ("self", *inputs, "attention_mask")
    names = list(inspect.signature(forward).parameters)
    others = [(position, name) for position, name in enumerate(names) if name not in harmless]
    consecutive = rebound(forward, dict.fromkeys(CAUSAL, _without_positions))

    @functools.wraps(forward)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        given = [args[i] if i < len(args) else kwargs.get(name) for i, name in others]
        looks = any(isinstance(value, Tensor) for value in given)
        return (reading if looks else consecutive)(*args, **kwargs)

    return chosen


def _without_positions(make_mask: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **given: make_mask(*args, **{**given, "position_ids": None})


# The table of mask functions that transformers' functions read, and their arguments. With another
# argument a mask may hide or show more than the documents do.
TABLE = "ALL_MASK_ATTENTION_FUNCTIONS"
ARGUMENTS = {"config", "inputs_embeds", "position_ids", "cache_position"}
# The names of its argument for a cache.
CACHES = ("cache", "past_key_values")


def _with_documents(
    make_mask: Any, name: str, documents: Callable[..., Any], is_tracing: Callable[[Tensor], bool]
) -> Callable[..., Any]:
    """Return a function that makes masks as `make_mask` does, but those of documents by number."""
    if not chain_to(make_mask, TABLE) or opaque(wrapped(make_mask)):
        return make_mask
    by_rows = rebound(make_mask, {TABLE: lambda _: {name: documents}})

    def make(*args: Any, **given: Any) -> Any:
        positions: Any = given.get("position_ids")
        config, inputs = given.get("config"), given.get("inputs_embeds")
        others = [value for key, value in given.items() if key not in ARGUMENTS]
        if is_invariant() and _are_positions(positions) and not is_tracing(positions):
            _check_documents(positions, given)
        if (
            args
            or getattr(config, "_attn_implementation", None) != name
            or inputs is None
            or not _are_positions(positions)
            or any(value is not None for value in others)
        ):
            return make_mask(*args, **given)
        begins = _begins(positions)
        without = {**given, "position_ids": None}
        if not is_tracing(begins) and not begins.any():
            return make_mask(**without)
        rows = by_rows(**without)
        if not isinstance(rows, Documents):
            return make_mask(**given)
        packed = packed_rows(called, begins.expand(inputs.shape[:2]), begins.device)
        return packed._replace(window_left=rows.window_left)

    return make


def _begins(positions: Tensor) -> Tensor:
    """Return where a document begins, but for the first of a row."""
    return torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1


def _check_documents(positions: Tensor, given: dict[str, Any]) -> None:
    """Refuse documents that transformers does not look for, because there is a cache or a mask."""
    mask = given.get("attention_mask")
    if mask is None and all(given.get(name) is None for name in CACHES):
        return
    begins = _begins(positions)
    if isinstance(mask, Tensor):
        if mask.dim() != 2 or mask.shape[1] < positions.shape[1]:
            return
        # The positions of padding may be any.
        is_token = mask[:, mask.shape[1] - positions.shape[1] :].to(begins.device) != 0
        begins = begins[:, 1:] & is_token[:, 1:] & is_token[:, :-1]
    if begins.any():
        raise NotInvariantError(
            "liger_ops.invariant: the position_ids are of packed documents, which transformers does"
            " not separate if there is an attention_mask or a cache; pass neither, and"
            " use_cache=False"
        )


def _are_positions(positions: Any) -> bool:
    # Narrower numbers may pass their largest between two tokens.
    return isinstance(positions, Tensor) and positions.dim() == 2 and positions.dtype == torch.int64
