"""Time attention of documents and windows on a GPU, by varlen_attention's engines and by peers.

    python -m liger_ops.bench.steps.attention [--seconds 1.0] [--rows TEXT] [--ways WAY ...]

Each row is a batch of documents, causal, in bfloat16, forward and backward of query, key and value.
Its figures are milliseconds and, behind them, TFLOP/s of the pairs of query and key that see each
other. Engines are "triton", "flash" and, where nvidia-cudnn-frontend is installed, "cudnn". flex
is flex_attention, compiled, with a block mask that is made before; dense is cuDNN's causal
attention without documents and windows, by scaled_dot_product_attention, at its own pairs: a bound
of the rate. Before it is timed, each result is compared with that of "triton".
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import liger_ops

from ...device import Effort
from ..timing import NoAccelerator, find, interleaved, without_preparation

ENGINES = ("triton", "flash", "cudnn")
WAYS = (*ENGINES, "flex", "dense")
# Relative errors of bfloat16 against each other.
BOUND = 2e-2


class Row(NamedTuple):
    """A batch: the lengths of documents, the heads of queries and of keys, their size, and the
    window, or 0."""

    lengths: tuple[int, ...]
    heads: int
    key_heads: int
    D: int
    window: int = 0

    @property
    def name(self) -> str:
        if len(set(self.lengths)) == 1:
            documents = f"{len(self.lengths)} x {self.lengths[0]}"
        else:
            documents = f"{len(self.lengths)} of {min(self.lengths)} to {max(self.lengths)}"
        window = f", window {self.window}" if self.window else ""
        return f"{documents}{window}, {self.heads}/{self.key_heads} x {self.D}"

    @property
    def pairs(self) -> int:
        """The pairs of query and key that see each other."""
        return sum(_pairs(length, self.window or length) for length in self.lengths)


MIXED = (2891, 310, 1704, 95, 3020, 777, 2244, 64, 1500, 3779)
ROWS = (
    *(Row((length,) * (16384 // length), 32, 8, 128) for length in (16384, 4096, 2048, 1024, 512)),
    Row((131072,), 32, 8, 128, 4096),
    Row(MIXED, 32, 8, 128),
    *(Row((8192,) * 2, 32, 8, 128, window) for window in (4096, 1024, 512)),
    Row((4096,) * 4, 32, 8, 64),
    Row((512,) * 32, 32, 8, 64),
    Row((4096,) * 4, 32, 4, 128),
    Row((2048,) * 8, 64, 8, 64, 128),
    *(Row((4096,) * 4, 8, 4, 256, window) for window in (0, 512)),
    *(Row((4096,) * 4, 4, 1, 256, window) for window in (0, 512)),
)


# A longer dense call takes a second.
LONGEST_DENSE = 65536


def _pairs(length: int, window: int) -> int:
    seen = min(length, window)
    return seen * (seen + 1) // 2 + (length - seen) * seen


def calls(
    row: Row, device: str, ways: Sequence[str] = WAYS
) -> dict[str, Callable[[], tuple[Tensor, ...]]]:
    """Return the calls of a row by way; each returns the result and the gradients by token."""
    T = sum(row.lengths)
    torch.manual_seed(0)
    sizes = ((T, row.heads, row.D), *((T, row.key_heads, row.D),) * 2)
    query, key, value = inputs = [
        torch.randn(size, device=device, dtype=torch.bfloat16, requires_grad=True) for size in sizes
    ]
    dy = torch.randn_like(query)
    bounds = (0, *accumulate(row.lengths))
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=device)

    def by_engine(engine: str) -> tuple[Tensor, ...]:
        y = liger_ops.varlen_attention(
            query, key, value, cu_seqlens, max(row.lengths), window_left=row.window - 1,
            engine=engine,
        )  # fmt: skip
        return y, *torch.autograd.grad(y, inputs, dy)

    def by_heads(attend: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        y = attend(*(x.transpose(0, 1).unsqueeze(0) for x in inputs)).squeeze(0).transpose(0, 1)
        return y, *torch.autograd.grad(y, inputs, dy)

    found: dict[str, Callable[[], tuple[Tensor, ...]]] = {}
    for way in ways:
        if way == "flex":
            found[way] = partial(by_heads, _flex(row, device))
        elif way == "dense" and T <= LONGEST_DENSE:
            found[way] = partial(by_heads, _dense)
        elif way in ENGINES and (way != "cudnn" or find_spec("cudnn")):
            found[way] = partial(by_engine, way)
    return found


def _flex(row: Row, device: str) -> Callable[..., Tensor]:
    T, lengths = sum(row.lengths), torch.tensor(row.lengths)
    document = torch.repeat_interleave(torch.arange(len(lengths)), lengths).to(device)

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        seen = (i >= j) & (document[i] == document[j])
        return seen & (i - j < row.window) if row.window else seen

    mask = torch.compile(create_block_mask)(visible, None, None, T, T, device=device)
    attend: Any = torch.compile(flex_attention)
    return lambda *qkv: attend(*qkv, block_mask=mask, enable_gqa=True)


def _dense(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=1.0, help="for each call")
    parser.add_argument("--rows", default="", help="of names that contain this")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help="default: all")
    options = parser.parse_args(arguments)
    try:
        accelerator = find("cuda")
    except NoAccelerator as reason:
        print(f"attention: {reason}", file=sys.stderr)
        return 2
    print(f"{accelerator.name}, torch {torch.__version__}; forward + backward, ms and TFLOP/s")
    wrong = 0
    for row in ROWS:
        if options.rows not in row.name:
            continue
        torch.compiler.reset()
        of_row = calls(row, "cuda", [way for way in WAYS if way in ("triton", *options.ways)])
        expected = of_row["triton"]()
        for name in list(of_row):
            difference = "" if name == "dense" else differs(of_row[name], expected)
            if difference:
                print(f"{row.name}: {name} {difference}")
                del of_row[name]
                wrong += 1
        effort = Effort(seconds=options.seconds)
        times, failures = interleaved(accelerator, without_preparation(of_row), effort)
        figures = []
        for name, time in times.items():
            pairs = _pairs(sum(row.lengths), sum(row.lengths)) if name == "dense" else row.pairs
            rate = 14 * row.heads * row.D * pairs / time.p50 / 1e9
            figures.append(f"{name} {time.p50:.2f} {rate:.0f}")
        print(f"{row.name}: {'; '.join(figures)}", *failures.items(), flush=True)
    return 1 if wrong else 0


def differs(call: Callable[[], tuple[Tensor, ...]], expected: tuple[Tensor, ...]) -> str:
    """Return why the results of a call are not the expected ones, or an empty string."""
    try:
        found = call()
    except Exception as error:
        return f"failed: {type(error).__name__}: {str(error).splitlines()[0]}"
    for one, other in zip(found, expected, strict=True):
        distance = ((one.float() - other.float()).norm() / other.float().norm()).item()
        if not distance <= BOUND:
            return f"is not triton's: {distance:.1e}"
    return ""


if __name__ == "__main__":
    raise SystemExit(main())
