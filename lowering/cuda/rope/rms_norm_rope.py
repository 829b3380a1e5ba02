"""rms_norm_rope: a program normalises and rotates whole heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .... import library
from ....ops.rope.rope import pairs_of, rotated_columns
from ...common.tensors import cdiv, contiguous, next_power_of_2, unit_stride
from ..launch import WARP_SIZE, launch, pipeline_stages, processors
from ..sums import partial_sums, summed
from .rms_norm_rope_kernels import rms_norm_rope_backward_kernel, rms_norm_rope_kernel
from .rope import Tables, rotate, tables_of

# Bytes of the widest head that a program holds. For wider heads, rms_norm's and rope's kernels run.
WIDEST = 4096


@dataclass(frozen=True)
class HeadsPlan:
    """The heads of a tile, of one position or several; and threads of a program.

    A persistent kernel has `programs` programs, which load `num_stages` tiles ahead.
    """

    heads: int
    threads: int = 128
    programs: int = 0
    num_stages: int = 1


def plan_forward(q: Tensor) -> HeadsPlan:
    """Plan a tile for each program. 8192 positions with 32 + 8 heads of 128 on an H200 take 49 us
    with 8 heads in 64 threads, 51 with 16, and 59 with 32 in 128 threads."""
    return HeadsPlan(*_tile(q))


def plan_backward(q: Tensor, rotary: int) -> HeadsPlan:
    """Plan persistent programs, in one of two ways.

    The sizes of `plan_forward` take 89 us with 16 heads, 128 threads and 4 programs a
    multiprocessor, and 129 with 8 heads, 64 threads and 6 programs. With 8 + 4 heads of 256 the
    second plan takes 63, and the first 108. In the first, a head of which a part is copied spills
    up to 448 bytes a thread on sm_90.
    """
    width = next_power_of_2(q.shape[3])
    if width <= 128 and rotary == q.shape[3]:
        heads, threads, programs = 2048 // width, 128, 4 * processors(q)
    else:
        heads, threads = _tile(q)
        programs = max(1, 6 * 64 * processors(q) // threads)
    stages = pipeline_stages(q, 4 * heads * width * q.element_size())
    return HeadsPlan(heads, threads, programs, stages)


def _tile(q: Tensor) -> tuple[int, int]:
    """Return the heads and threads of a tile: of 1024 elements or, if that has more, a head, and 16
    elements a thread."""
    width = next_power_of_2(q.shape[3])
    heads = max(1, 1024 // width)
    return heads, max(64, heads * width // 16)


def heads_of_position(heads: int, most: int) -> int:
    """Return how many heads of one position a tile has, at most `most`: the power of 2 that leaves
    fewest lanes idle, and of several the largest, because heads of a position share the tables."""
    sizes = [1 << n for n in range(most.bit_length())]
    return min(sizes, key=lambda size: (cdiv(heads, size) * size, -size))


@dataclass(frozen=True)
class _HeadTables:
    """The tables and the pairs of a call, for a head of D elements: `half` pairs, and `copied`
    elements after them that are not rotated."""

    tables: Tables
    half: int
    copied: int
    constants: dict[str, Any]


def _rotation(call: Any, plan: HeadsPlan) -> _HeadTables:
    """Return the rotation of a call, with the constants of its kernel."""
    B, _, _, D = call.q.shape
    half = rotated_columns(call.cos, call.sin, call.per_pair) // 2
    pairs = pairs_of(call.sin, call.interleaved, call.deinterleave, False)
    tables = tables_of(call.cos, call.sin, B, pairs, call.per_pair, call.sections)
    pair_block, copied = max(16, next_power_of_2(half)), D - 2 * half
    q_block, k_block = (heads_of_position(x.shape[1], plan.heads) for x in (call.q, call.k))
    constants = {
        "X_INTERLEAVED": pairs.x, "Y_INTERLEAVED": pairs.y, **tables.constants,
        "EIGHTS": tables.eighths(pair_block),
        "BLOCK_M": plan.heads, "BLOCK_Q": q_block, "BLOCK_K": k_block, "BLOCK_N": pair_block,
        "BLOCK_C": max(2, next_power_of_2(copied)) if copied else 1,
        "num_warps": max(1, plan.threads // WARP_SIZE),
    }  # fmt: skip
    return _HeadTables(tables, half, copied, constants)


def _strides(*tensors: Tensor | None) -> tuple[int, ...]:
    """Return strides over batch, heads and positions; 0 for a tensor that is not wanted."""
    none = (0, 0, 0)
    return tuple(n for x in tensors for n in (none if x is None else x.stride()[:3]))


def _fits(q: Tensor) -> bool:
    """Return whether a program can hold a head."""
    return next_power_of_2(q.shape[3]) * q.element_size() <= WIDEST


@library.kernel("rms_norm_rope", "cuda")
def rms_norm_rope(call: Any, q_out: Tensor, k_out: Tensor, plan: HeadsPlan | None) -> None:
    q, k = unit_stride(call.q), unit_stride(call.k)
    if not _fits(q):
        _in_two_kernels(call, q_out, k_out)
        return
    plan = plan or plan_forward(q)
    rotation = _rotation(call, plan)
    B, q_heads, S, _ = q.shape
    k_heads = k.shape[1]
    constants = rotation.constants
    q_items, k_items = (
        B * cdiv(S, plan.heads // block) * cdiv(heads, block)
        for heads, block in ((q_heads, constants["BLOCK_Q"]), (k_heads, constants["BLOCK_K"]))
    )
    if q_items + k_items == 0:
        return
    tables = rotation.tables
    launch(
        rms_norm_rope_kernel, (q_items + k_items,), q,
        q, k, contiguous(call.q_weight), contiguous(call.k_weight), tables.cos, tables.sin,
        q_out, k_out,
        S, q_heads, k_heads, q_items, rotation.half, rotation.copied, *tables.ends,
        call.eps, call.offset, *_strides(q, k, q_out, k_out), *tables.strides,
        CASTING_MODE=call.casting_mode, **constants,
    )  # fmt: skip


@library.kernel("rms_norm_rope_backward", "cuda")
def rms_norm_rope_backward(
    call: Any, grad_q: Tensor | None, grad_k: Tensor | None,
    dq_weight: Tensor | None, dk_weight: Tensor | None, plan: HeadsPlan | None,
) -> None:  # fmt: skip
    dq, dk, q, k = map(unit_stride, (call.dq, call.dk, call.q, call.k))
    if not _fits(q):
        _backward_in_two_kernels(call, grad_q, grad_k, dq_weight, dk_weight)
        return
    plan = plan or plan_backward(q, rotated_columns(call.cos, call.sin, call.per_pair))
    rotation = _rotation(call, plan)
    B, q_heads, S, _ = q.shape
    tables = rotation.tables
    dweights = (dq_weight, dk_weight)
    parts = [partial_sums(dweight, plan.programs) for dweight in dweights]
    launch(
        rms_norm_rope_backward_kernel, (plan.programs,), q,
        dq, dk, q, k, contiguous(call.q_weight), contiguous(call.k_weight), tables.cos, tables.sin,
        grad_q, grad_k, *parts,
        B, S, q_heads, k.shape[1], rotation.half, rotation.copied, *tables.ends,
        call.eps, call.offset, *_strides(dq, dk, q, k, grad_q, grad_k), *tables.strides,
        NUM_STAGES=plan.num_stages, **rotation.constants,
    )  # fmt: skip
    summed(*zip(parts, dweights, strict=True))


def _in_two_kernels(call: Any, q_out: Tensor, k_out: Tensor) -> None:
    norm = library.OPS["rms_norm"].kernels["cuda"]
    options = (call.eps, call.offset, call.casting_mode)
    q, k = norm(call.q, call.q_weight, *options), norm(call.k, call.k_weight, *options)
    rotate(call, q, k, q_out, k_out, backward=False)


def _backward_in_two_kernels(
    call: Any, grad_q: Tensor | None, grad_k: Tensor | None,
    dq_weight: Tensor | None, dk_weight: Tensor | None,
) -> None:  # fmt: skip
    norm = library.OPS["rms_norm_backward"].kernels["cuda"]
    # The gradient between the two kernels is not rounded, as in the kernel of both.
    dq, dk = (dy.new_empty(dy.shape, dtype=torch.float32) for dy in (call.dq, call.dk))
    rotate(call, call.dq, call.dk, dq, dk, backward=True)
    for dxhat, x, weight, dx, dweight in (
        (dq, call.q, call.q_weight, grad_q, dq_weight),
        (dk, call.k, call.k_weight, grad_k, dk_weight),
    ):
        wanted = [dx is not None, dweight is not None]
        grads = norm(dxhat, x, weight, call.eps, call.offset, wanted)
        for out, grad in zip((dx, dweight), grads, strict=True):
            if out is not None:
                out.copy_(grad)
