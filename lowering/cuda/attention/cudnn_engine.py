"""varlen_attention by cuDNN, through NVIDIA's package nvidia-cudnn-frontend.

A document is a batch entry of cuDNN, whose rows begin at an offset of its own in each tensor: so
tensors are read by their strides, and documents may have fewer keys than queries. cuDNN builds a
plan for each shape, in 0.1 to 2 s. It takes the number of documents and the longest, so both are
rounded up to powers of 2, with empty documents. What the rounding costs, forward and backward of 4
documents of 4096 tokens on an H200, 32 heads of 128 and 8 of keys: 4.4 ms as it is, 5.1 ms with 64
documents, 7.0 ms with 64 of up to 16384.
"""

from __future__ import annotations

import functools
import importlib.util
import threading
from enum import IntEnum
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....ops.attention.varlen_attention import FLASH_DTYPES, scale_of
from ...common.tensors import cdiv, next_power_of_2
from ..launch import launch, on_nvidia
from .varlen_kernels import MOST_COLUMNS, documents_of

# Heads of Hopper; those of other GPUs are smaller.
MOST_ELSEWHERE = 128
# Elements to which a tensor's first element and its strides must be aligned: 16 bytes.
ALIGNMENT = 8
# Tokens are rounded up to multiples of this in a plan, which knows how many there may be.
TOKENS = 4096


@functools.cache
def is_installed() -> bool:
    return importlib.util.find_spec("cudnn") is not None


def obstacle(call: Any) -> str | None:
    """Return why it does not take a call, or None."""
    D, E = call.query.shape[-1], call.value.shape[-1]
    if not is_installed():
        return "the package nvidia-cudnn-frontend is not installed"
    if not on_nvidia(call.query) or torch.cuda.get_device_capability(call.query.device) < (8, 0):
        return "it needs an NVIDIA GPU of compute capability 8.0"
    if call.query.dtype not in FLASH_DTYPES:
        return f"it takes float16 and bfloat16, got {call.query.dtype}"
    if call.softcap is not None:
        return "it takes no softcap"
    is_hopper = torch.cuda.get_device_capability(call.query.device) == (9, 0)
    most = MOST_COLUMNS if is_hopper else MOST_ELSEWHERE
    if D % 8 or E % 8 or max(D, E) > most:
        return f"it takes heads of multiples of 8 up to {most} here, got {D} and {E}"
    return None


class _Uid(IntEnum):
    """Numbers of a graph's tensors. The first eight have offsets, in this order."""

    QUERY = 0
    KEY = 1
    VALUE = 2
    Y = 3
    LSE = 4
    DQUERY = 5
    DKEY = 6
    DVALUE = 7
    DY = 8
    QUERY_LENGTHS = 9
    KEY_LENGTHS = 10
    OFFSETS = 11


class _Shape(NamedTuple):
    """The facts that a plan depends on: sizes, rounded up; strides of a token and of a head; and
    options."""

    dtype: torch.dtype
    device: int | None
    documents: int
    longest: int
    tokens: int
    heads: int
    key_heads: int
    D: int
    E: int
    strides: tuple[tuple[int, int], ...]
    scale: float
    left: int
    right: int
    is_backward: bool
    is_deterministic: bool


@triton.jit(do_not_specialize=["N", "T", "M", "s0", "s1", "s2", "s3", "s4", "s5", "s6", "s7"])
def _documents_kernel(
    cu_ptr, lengths_ptr, query_lengths_ptr, key_lengths_ptr, offsets_ptr,
    N, T, M, s0, s1, s2, s3, s4, s5, s6, s7, BLOCK: tl.constexpr,
):  # fmt: skip
    # M documents from N; those behind the last are empty. A row of offsets has M + 1.
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    start = tl.load(cu_ptr + tl.minimum(n, N)).to(tl.int64)
    end = tl.load(cu_ptr + tl.minimum(n + 1, N)).to(tl.int64)
    start = tl.minimum(tl.maximum(start, 0), T)
    length = tl.minimum(tl.maximum(end, start), T) - start
    keys = length
    if lengths_ptr is not None:
        own = tl.load(lengths_ptr + n, mask=n < N, other=0).to(tl.int64)
        keys = tl.minimum(tl.maximum(own, 0), length)
    tl.store(query_lengths_ptr + n, length.to(tl.int32), mask=n < M)
    tl.store(key_lengths_ptr + n, keys.to(tl.int32), mask=n < M)
    row = M + 1
    listed = n < row
    tl.store(offsets_ptr + n, start * s0, mask=listed)
    tl.store(offsets_ptr + (row + n), start * s1, mask=listed)
    tl.store(offsets_ptr + (2 * row + n), start * s2, mask=listed)
    tl.store(offsets_ptr + (3 * row + n), start * s3, mask=listed)
    tl.store(offsets_ptr + (4 * row + n), start * s4, mask=listed)
    tl.store(offsets_ptr + (5 * row + n), start * s5, mask=listed)
    tl.store(offsets_ptr + (6 * row + n), start * s6, mask=listed)
    tl.store(offsets_ptr + (7 * row + n), start * s7, mask=listed)


def _aligned(x: Tensor) -> Tensor:
    """Return x, or a contiguous copy if cuDNN cannot read it by its strides."""
    strides = (*x.stride()[:2], x.storage_offset())
    is_aligned = x.stride(-1) == 1 and not any(n % ALIGNMENT for n in strides)
    if is_aligned and x.data_ptr() % 16 == 0 and 0 not in x.stride():
        return x
    return x.clone(memory_format=torch.contiguous_format)


_handles = threading.local()
_building = threading.Lock()


def _handle(device: torch.device) -> Any:
    """Return this thread's handle for a device, on the current stream."""
    import cudnn

    handles = _handles.__dict__
    key = str(device)
    if key not in handles:
        handles[key] = cudnn.create_handle()
    cudnn.set_stream(handle=handles[key], stream=torch.cuda.current_stream(device).cuda_stream)
    return handles[key]


@functools.lru_cache(maxsize=256)
def _built(shape: _Shape) -> tuple[Any, int] | str:
    """Return a plan and the bytes of its workspace, or why there is none: an exception that is kept
    would keep the tensors of the call that it left."""
    import cudnn

    with _building:
        try:
            return _build(cudnn, shape)
        except Exception as error:
            return f"{type(error).__name__}: {error}"


def _build(cudnn: Any, shape: _Shape) -> tuple[Any, int]:
    handle = _handle(torch.device("cuda", shape.device))
    kind = {torch.float16: cudnn.data_type.HALF, torch.bfloat16: cudnn.data_type.BFLOAT16}
    io, real, whole = kind[shape.dtype], cudnn.data_type.FLOAT, cudnn.data_type.INT32
    graph = cudnn.pygraph(
        handle=handle, io_data_type=io, intermediate_data_type=real, compute_data_type=real
    )
    N, S = shape.documents, shape.longest

    def per_document(uid: int, name: str, dtype: Any, count: int = N) -> Any:
        return graph.tensor(
            name=name, uid=uid, dim=[count, 1, 1, 1], stride=[1, 1, 1, 1], data_type=dtype
        )

    offsets = [
        per_document(_Uid.OFFSETS + uid, f"offsets_{uid}", cudnn.data_type.INT64, N + 1)
        for uid in range(8)
    ]
    sizes = {
        _Uid.QUERY: (shape.heads, shape.D), _Uid.KEY: (shape.key_heads, shape.D),
        _Uid.VALUE: (shape.key_heads, shape.E), _Uid.Y: (shape.heads, shape.E),
        _Uid.LSE: (shape.heads, 1), _Uid.DQUERY: (shape.heads, shape.D),
        _Uid.DKEY: (shape.key_heads, shape.D), _Uid.DVALUE: (shape.key_heads, shape.E),
        _Uid.DY: (shape.heads, shape.E),
    }  # fmt: skip

    def layout(uid: _Uid) -> tuple[list[int], list[int], Any]:
        heads, columns = sizes[uid]
        # dy is read as y is.
        row = _Uid.Y if uid is _Uid.DY else uid
        token, head = shape.strides[row]
        return [N, heads, S, columns], [S * token, head, token, 1], offsets[row]

    def given(uid: _Uid, dtype: Any = io) -> Any:
        dim, stride, offset = layout(uid)
        tensor = graph.tensor(name=uid.name, uid=uid, dim=dim, stride=stride, data_type=dtype)
        tensor.set_ragged_offset(offset)
        return tensor

    def result(tensor: Any, uid: _Uid, dtype: Any = io) -> None:
        dim, stride, offset = layout(uid)
        tensor.set_uid(uid).set_output(True).set_dim(dim).set_stride(stride).set_data_type(dtype)
        tensor.set_ragged_offset(offset)

    options = {
        "attn_scale": shape.scale, "use_padding_mask": True,
        "seq_len_q": per_document(_Uid.QUERY_LENGTHS, "query_lengths", whole),
        "seq_len_kv": per_document(_Uid.KEY_LENGTHS, "key_lengths", whole),
        "diagonal_alignment": cudnn.diagonal_alignment.TOP_LEFT,
        # The left bound counts the query's own key, measured against float64.
        "diagonal_band_left_bound": None if shape.left < 0 else shape.left + 1,
        "diagonal_band_right_bound": None if shape.right < 0 else shape.right,
    }  # fmt: skip
    query, key, value = given(_Uid.QUERY), given(_Uid.KEY), given(_Uid.VALUE)
    if shape.is_backward:
        gradients = graph.sdpa_backward(
            name="backward", q=query, k=key, v=value, o=given(_Uid.Y), dO=given(_Uid.DY),
            stats=given(_Uid.LSE, real), max_total_seq_len_q=shape.tokens,
            max_total_seq_len_kv=shape.tokens, **options,
            use_deterministic_algorithm=shape.is_deterministic,
        )  # fmt: skip
        for tensor, uid in zip(gradients, (_Uid.DQUERY, _Uid.DKEY, _Uid.DVALUE), strict=True):
            result(tensor, uid)
    else:
        y, lse = graph.sdpa(name="forward", q=query, k=key, v=value, generate_stats=True, **options)
        result(y, _Uid.Y)
        result(lse, _Uid.LSE, real)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()
    return graph, graph.get_workspace_size()


def documents(call: Any, rows: list[Tensor], M: int) -> tuple[Tensor, Tensor]:
    """Return the numbers of queries and of keys of M documents, (2, M), and their offsets in eight
    tensors, (8, M + 1). Those behind the call's own documents are empty."""
    cu_seqlens, own, _ = documents_of(call)
    lengths = torch.empty(2, M, dtype=torch.int32, device=cu_seqlens.device)
    offsets = torch.empty(8, M + 1, dtype=torch.int64, device=cu_seqlens.device)
    BLOCK = min(1024, next_power_of_2(M + 1))
    launch(
        _documents_kernel, (cdiv(M + 1, BLOCK),), call.query,
        cu_seqlens, own,
        lengths[0], lengths[1], offsets, cu_seqlens.shape[0] - 1, call.query.shape[0], M,
        *(x.stride(0) for x in rows), BLOCK=BLOCK,
    )  # fmt: skip
    return lengths, offsets


def _run(call: Any, tensors: dict[_Uid, Tensor], is_backward: bool) -> None:
    query, key, value = (tensors[uid] for uid in (_Uid.QUERY, _Uid.KEY, _Uid.VALUE))
    (T, H, D), N = query.shape, call.cu_seqlens.shape[0] - 1
    # The row of y is that of dy, too, and a gradient that is not computed has that of y.
    rows = [tensors.get(_Uid(uid), tensors[_Uid.Y]) for uid in range(8)]
    longest = min(call.max_seqlen, T)
    shape = _Shape(
        query.dtype, query.device.index, next_power_of_2(max(N, 1)),
        next_power_of_2(max(longest, 128)), cdiv(T, TOKENS) * TOKENS, H, key.shape[1], D,
        value.shape[-1], tuple((x.stride(0), x.stride(1)) for x in rows),
        scale_of(call), call.window_left, call.window_right,
        is_backward, is_backward and torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip
    with torch.cuda.device(query.device):
        built = _built(shape)
        if isinstance(built, str):
            raise RuntimeError(built)
        graph, workspace_bytes = built
        lengths, offsets = documents(call, rows, shape.documents)
        operands: dict[int, Tensor] = {int(uid): tensor for uid, tensor in tensors.items()}
        operands[_Uid.QUERY_LENGTHS], operands[_Uid.KEY_LENGTHS] = lengths
        used = [uid for uid in range(8) if _Uid(uid) in tensors]
        operands |= {_Uid.OFFSETS + uid: offsets[uid] for uid in used}
        workspace = torch.empty(max(workspace_bytes, 1), dtype=torch.uint8, device=query.device)
        graph.execute(operands, workspace, handle=_handle(query.device))


def forward(call: Any, y: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    query, key, value = map(_aligned, (call.query, call.key, call.value))
    by_token = torch.empty(*query.shape[:2], 1, dtype=torch.float32, device=y.device)
    tensors = {
        _Uid.QUERY: query, _Uid.KEY: key, _Uid.VALUE: value, _Uid.Y: y, _Uid.LSE: by_token,
    }  # fmt: skip
    _run(call, tensors, is_backward=False)
    lse.copy_(by_token.squeeze(-1).t())
    return y, lse


def backward(call: Any, *gradients: Tensor | None) -> tuple[Tensor, ...]:
    query, key, value = map(_aligned, (call.query, call.key, call.value))
    results = tuple(
        torch.empty(x.shape, dtype=x.dtype, device=x.device) if gradient is None else gradient
        for x, gradient in zip((query, key, value), gradients, strict=True)
    )
    tensors = {
        _Uid.QUERY: query, _Uid.KEY: key, _Uid.VALUE: value, _Uid.Y: call.y.contiguous(),
        _Uid.LSE: call.lse.t().contiguous().unsqueeze(-1), _Uid.DY: call.dy.contiguous(),
        _Uid.DQUERY: results[0], _Uid.DKEY: results[1], _Uid.DVALUE: results[2],
    }  # fmt: skip
    _run(call, tensors, is_backward=True)
    return results
