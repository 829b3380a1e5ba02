"""Time the norms on a GPU beside ATen's and Inductor's, as in the README's table.

    python examples/time_norms.py

For each op and shape: first the relative errors against float64, of the op and of its eager
definition, outputs and gradients alike; then the GPU time of forward and of backward, by CUDA
events, the L2 cache flushed before each of 25 calls, the median. The host runs ahead of the GPU, so
that what an eager call costs it is left out. The share is of the rate at which the same GPU copies
memory, counted from the fewest bytes that the op must move.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch._functorch.config
import torch.nn.functional as F
from torch import Tensor

from liger_ops import library

CALLS = 25
# Longer than any eager call takes on the host, in cycles of the GPU's clock.
HEAD_START = 3_000_000
CACHE_BYTES = 256 * 2**20
# Above this relative error an op is not timed: three roundings to bfloat16.
WRONG = 6e-3


@dataclass(frozen=True)
class Row:
    """An op at a shape; the tensors that forward and backward read and write, at the least."""

    op: str
    shape: tuple[int, ...]
    options: tuple[Any, ...]
    aten: Callable[..., Tensor] | None
    moved: tuple[int, int]
    num_groups: int | None = None


def rms_norm(rows: int, columns: int) -> Row:
    aten = lambda x, weight: F.rms_norm(x, (columns,), weight, 1e-6)
    return Row("rms_norm", (rows, columns), (1e-6, 0.0, "llama"), aten, (2, 3))


def fused_add_rms_norm(rows: int, columns: int) -> Row:
    return Row("fused_add_rms_norm", (rows, columns), (1e-6, 0.0, "llama"), None, (4, 4))


def layer_norm(rows: int, columns: int) -> Row:
    aten = lambda x, weight, bias: F.layer_norm(x, (columns,), weight, bias, 1e-5)
    return Row("layer_norm", (rows, columns), (1e-5,), aten, (2, 3))


def group_norm(*shape: int) -> Row:
    aten = lambda x, weight, bias: F.group_norm(x, 32, weight, bias, 1e-5)
    return Row("group_norm", shape, (1e-5,), aten, (2, 3), num_groups=32)


ROWS = (
    rms_norm(32768, 1024),
    rms_norm(32768, 4096),
    rms_norm(16384, 8192),
    rms_norm(8192, 16384),
    rms_norm(4096, 32768),
    rms_norm(2048, 65536),
    fused_add_rms_norm(32768, 4096),
    fused_add_rms_norm(8192, 16384),
    layer_norm(32768, 4096),
    layer_norm(8192, 16384),
    group_norm(64, 512, 64, 64),
    group_norm(16, 1280, 32, 32),
)


def main() -> int:
    if not torch.cuda.is_available():
        print(f"{sys.argv[0]}: PyTorch finds no GPU here", file=sys.stderr)
        return 2
    # Inductor's backward runs many times on one forward here.
    torch._functorch.config.donated_buffer = False
    flush = torch.empty(CACHE_BYTES, dtype=torch.uint8, device="cuda")
    rate = copy_rate(flush)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bfloat16")
    print(f"copies at {rate / 1e6:.0f} GB/s")
    print("op shape | error: op, definition | forward ms, ATen, Inductor | backward ms, ...")
    for row in ROWS:
        print(describe(row, rate, flush), flush=True)
        torch._dynamo.reset()
        torch.cuda.empty_cache()
    return 0


def copy_rate(flush: Tensor) -> float:
    """Bytes read and written a millisecond."""
    source = torch.randn(2**29, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / milliseconds(lambda: target.copy_(source), flush)


def describe(row: Row, rate: float, flush: Tensor) -> str:
    op, definition = library.OPS[row.op].overload, library.OPS[row.op].definition
    tensors = inputs(row)
    call = {
        "ours": partial(called, op, row),
        "definition": partial(called, definition, row),
        "ATen": row.aten,
        "Inductor": torch.compile(partial(called, definition, row), dynamic=False),
    }
    dys = [torch.randn_like(y) for y in as_tuple(call["ours"](*tensors))]
    errors = {
        name: relative_error(row, call[name], tensors, dys) for name in ("ours", "definition")
    }
    shape = " x ".join(map(str, row.shape))
    label = f"{row.op} {shape} | {errors['ours']:.1e}, {errors['definition']:.1e}"
    if errors["ours"] > WRONG:
        return f"{label} | WRONG, not timed"
    bytes_of_x = tensors[0].nbytes
    parts = [label]
    for backward, moved in enumerate(row.moved):
        times = {}
        for name in ("ours", "ATen", "Inductor"):
            function = call[name]
            if function is not None:
                times[name] = milliseconds(timed(function, tensors, dys, bool(backward)), flush)
        share = moved * bytes_of_x / times["ours"] / rate
        others = " / ".join(
            f"{times[name]:.3f}" if name in times else "-" for name in ("ATen", "Inductor")
        )
        parts.append(f"{times['ours']:.3f} ({share:.0%}) | {others}")
    return " | ".join(parts)


def inputs(row: Row) -> list[Tensor]:
    """x, the residual of an op that has one, and the parameters, all with gradients."""
    draw = lambda *shape: torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    channels = row.shape[1]
    tensors = [draw(*row.shape)]
    if row.op == "fused_add_rms_norm":
        tensors.append(draw(*row.shape))
    parameters = 2 if row.op in ("layer_norm", "group_norm") else 1
    tensors += [draw(channels) for _ in range(parameters)]
    return [tensor.requires_grad_() for tensor in tensors]


def called(function: Callable[..., Any], row: Row, *tensors: Tensor) -> Any:
    if row.num_groups is not None:
        return function(tensors[0], row.num_groups, *tensors[1:], *row.options)
    return function(*tensors, *row.options)


def as_tuple(outputs: Any) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def relative_error(
    row: Row, function: Callable[..., Any], tensors: Sequence[Tensor], dys: Sequence[Tensor]
) -> float:
    """The largest of outputs' and gradients', in norm, against the definition in float64."""

    def results(function: Callable[..., Any], dtype: torch.dtype) -> list[Tensor]:
        leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in tensors]
        outputs = as_tuple(function(*leaves))
        grads = torch.autograd.grad(outputs, leaves, [dy.to(dtype) for dy in dys])
        return [*(output.detach() for output in outputs), *grads]

    definition = partial(called, library.OPS[row.op].definition, row)
    truths = results(definition, torch.float64)
    found = results(function, torch.bfloat16)
    return max(
        float((value.double() - truth).norm() / truth.norm())
        for value, truth in zip(found, truths, strict=True)
    )


def timed(
    function: Callable[..., Any], tensors: Sequence[Tensor], dys: Sequence[Tensor], backward: bool
) -> Callable[[], Any]:
    if not backward:
        return torch.no_grad()(lambda: function(*tensors))
    outputs = as_tuple(function(*tensors))
    return lambda: torch.autograd.grad(outputs, tensors, dys, retain_graph=True)


def milliseconds(function: Callable[[], Any], flush: Tensor) -> float:
    """The median GPU time of a call."""
    for _ in range(3):
        function()
    times = []
    for _ in range(CALLS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        torch.cuda._sleep(HEAD_START)
        start.record()
        function()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[CALLS // 2]


if __name__ == "__main__":
    sys.exit(main())
