"""varlen_attention: choose an engine for a call, and complete what the engine leaves."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .... import library
from ....invariant_mode import is_invariant
from ....ops.attention.document_bounds import bounded
from ....ops.attention.varlen_attention import ENGINES
from ...common.tensors import next_power_of_2
from . import cudnn_engine, flash_engine, varlen_gradients, varlen_kernels
from .varlen_completion import complete, holes_of

VARIABLE = "LIGER_OPS_ATTENTION"
# Forward and backward on an H200, causal, bfloat16, TFLOP/s of visible pairs by cuDNN, by
# FlashAttention 2 and by the kernels of this package, 32 heads of 128 and 8 of keys unless said: 4
# documents of 4096 tokens 465, 276, 339; 10 of 64 to 3779 tokens 389, 244, 293; 32 of 512 195, 135,
# 160; 2 of 8192 with a window of 4096 500, 283, 355; 4 of 4096 with a window of 512, 4 heads of 256
# and 1 of keys 197, 164, 165; 8 of 2048 with a window of 128, 64 heads of 64 and 8 of keys 82, 64,
# 89 (`python -m liger_ops.bench.steps.attention`).
LONG, WIDE_WINDOW = 512, 512
LARGE_HEADS = 128
# Tokens for each document of a plan of cuDNN, which is for a power of 2 of them. Its time for
# tokens that no document has, up to the longest, is then less than what it saves.
TOKENS_OF_DOCUMENT = 128


class _Engine(NamedTuple):
    """Attributes:
    obstacle: returns why the engine does not take a call, or None.
    forward, backward: compute into outputs, and return the results, in these or in others.
    """

    obstacle: Callable[[Any], str | None]
    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, ...]]


ENGINES_OF_OTHERS = {
    "cudnn": _Engine(cudnn_engine.obstacle, cudnn_engine.forward, cudnn_engine.backward),
    "flash": _Engine(flash_engine.obstacle, flash_engine.forward, flash_engine.backward),
}
# Engines that failed, by the form of the call.
_failed: set[tuple[Any, ...]] = set()
_warned: set[tuple[str, str]] = set()


def engines(call: Any) -> Iterator[str]:
    """Yield the engine to try for a call before this package's own kernels, if any."""
    if is_invariant():
        # The choice would depend on the batch, and so may the plans of others.
        return
    wanted = call.engine
    if wanted == "auto":
        wanted = os.environ.get(VARIABLE, "auto")
        if wanted not in ENGINES:
            raise ValueError(
                f"varlen_attention: {VARIABLE} must be one of {', '.join(ENGINES)}, got {wanted!r}"
            )
    if wanted == "auto":
        order = _fastest(call)
    else:
        order = [] if wanted == "triton" else [wanted]
    for name in order:
        reason = ENGINES_OF_OTHERS[name].obstacle(call)
        if reason is None:
            yield name
        elif wanted != "auto":
            _warn(name, reason)


def _fastest(call: Any) -> list[str]:
    """Return the engines that are faster for a call than the kernels of this package."""
    count = next_power_of_2(max(call.cu_seqlens.shape[0] - 1, 1))
    is_long = min(call.max_seqlen, call.query.shape[0]) >= LONG
    is_wide = call.window_left < 0 or call.window_left >= WIDE_WINDOW - 1
    order = []
    if is_long and is_wide and count * TOKENS_OF_DOCUMENT <= call.query.shape[0]:
        order.append("cudnn")
    if max(call.query.shape[-1], call.value.shape[-1]) > LARGE_HEADS:
        order.append("flash")
    return order


def _warn(name: str, reason: str) -> None:
    if (name, reason) not in _warned:
        _warned.add((name, reason))
        warnings.warn(
            f"varlen_attention: 'triton' replaces the engine {name!r}: {reason}", stacklevel=2
        )


def _form(name: str, call: Any) -> tuple[Any, ...]:
    """Return what decides, beside the documents, whether an engine takes a call."""
    sizes = (call.query.shape[1:], call.value.shape[1:], call.query.dtype, call.query.device)
    options = (call.window_left, call.window_right, call.lengths is None)
    return (name, type(call).__name__, *sizes, *options)


def _by_others(call: Any, compute: Callable[[_Engine], Any]) -> Any:
    """Return what the first engine of others computes that takes the call, or None."""
    for name in engines(call):
        if (form := _form(name, call)) in _failed:
            continue
        try:
            return compute(ENGINES_OF_OTHERS[name])
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except Exception as error:
            _failed.add(form)
            _warn(name, f"{type(error).__name__}: {error}")
    return None


# allocates=True, because engines allocate their results.
@library.kernel("varlen_attention_forward", "cuda", allocates=True)
def forward(call: Any) -> tuple[Tensor, Tensor]:
    y, lse = library.allocate("varlen_attention_forward", call)
    if y.numel() == 0:
        return y, lse
    call = bounded(call)
    holes = holes_of(call)
    results = _by_others(call, lambda engine: engine.forward(call, y, lse))
    if results is None:
        varlen_kernels.forward(call, y, lse, holes)
        return y, lse
    complete(call, *results)
    if holes is not None:
        # No engine of others knows key_mask. Whether it has holes is known on the device, where the
        # programs of this kernel end at once without them.
        varlen_kernels.forward(call, *results, holes, only_holes=True)
    return results


@library.kernel("varlen_attention_backward", "cuda", allocates=True)
def backward(call: Any) -> tuple[Tensor | None, ...]:
    outputs = library.allocate("varlen_attention_backward", call)
    *gradients, dsinks = outputs
    if call.dy.numel() == 0:
        return tuple(None if output is None else output.zero_() for output in outputs)
    call = bounded(call)
    holes, results = holes_of(call), None
    if any(gradient is not None for gradient in gradients):
        results = _by_others(call, lambda engine: engine.backward(call, *gradients))
    if results is None:
        varlen_gradients.backward(call, *outputs, holes)
        return outputs
    for result, of_keys in zip(results, (False, True, True), strict=True):
        complete(call, result, of_keys=of_keys)
    wanted = zip(results, gradients, strict=True)
    kept = [None if gradient is None else result for result, gradient in wanted]
    if dsinks is not None:
        varlen_gradients.statistics_of(call, dsinks)
    if holes is not None:
        varlen_gradients.backward(call, *kept, None, holes, only_holes=True)
    return (*kept, dsinks)
