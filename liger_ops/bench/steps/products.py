"""Time matrix products on a GPU, as PyTorch computes them, within `liger_ops.invariant`, and by
others that give a row the same bits in every batch.

    python -m liger_ops.bench.steps.products [--rows 8192]

The products are those of a Qwen3-8B in bfloat16: x @ weight.T, and dy @ weight. Figures are
milliseconds, and behind them the quotient by PyTorch's. triton is this package's kernel, which the
context takes where PyTorch's does not hold. persistent is `matmul_persistent` of
batch_invariant_ops (Thinking Machines Lab), where that is installed.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

import liger_ops

from ...device import Effort
from ...invariance.products import own_product
from ..timing import NoAccelerator, find, interleaved, without_preparation

# Columns of the result, and of x.
WEIGHTS = ((4096, 4096), (1024, 4096), (12288, 4096), (4096, 12288), (151936, 4096))


def calls(a: Tensor, b: Tensor) -> dict[str, Callable[[], Any]]:
    """Return the ways to compute a @ b on a GPU outside of the context."""
    own = own_product(a)
    assert own is not None
    found: dict[str, Callable[[], Any]] = {
        "pytorch": partial(torch.mm, a, b),
        "triton": partial(own, a[None], b[None]),
    }
    if find_spec("batch_invariant_ops") is not None:
        peer = importlib.import_module("batch_invariant_ops.batch_invariant_ops")
        found["persistent"] = partial(peer.matmul_persistent, a, b)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--seconds", type=float, default=0.3, help="for each call")
    options = parser.parse_args(arguments)
    try:
        accelerator = find("cuda")
    except NoAccelerator as reason:
        print(f"products: {reason}", file=sys.stderr)
        return 2
    print(f"{accelerator.name}, torch {torch.__version__}, {options.rows} rows; ms")
    failed = False
    for N, K in WEIGHTS:
        weight = torch.randn(N, K, device="cuda", dtype=torch.bfloat16)
        for name, columns, b in (("x @ weight.T", K, weight.t()), ("dy @ weight", N, weight)):
            a = torch.randn(options.rows, columns, device="cuda", dtype=torch.bfloat16)
            effort = Effort(seconds=options.seconds)
            times, failures = interleaved(accelerator, without_preparation(calls(a, b)), effort)
            with liger_ops.invariant():
                within = {"within the context": partial(torch.mm, a, b)}
                own, failed_within = interleaved(accelerator, without_preparation(within), effort)
            times, failures = {**times, **own}, {**failures, **failed_within}
            failed |= bool(failures)
            figures = (
                f"{way} {t.p50:.3f} {t.p50 / times['pytorch'].p50:.2f}" for way, t in times.items()
            )
            print(f"{name}, {N} x {K}", *figures, *failures.items(), sep="; ", flush=True)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
