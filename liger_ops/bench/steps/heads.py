"""Time heads with several words a token on a GPU, beside cross-entropy, and within
`liger_ops.invariant`.

    python -m liger_ops.bench.steps.heads [--tokens 8192] [--hidden 4096] [--vocabulary 151936]

Each call is forward and backward of x and weight, in bfloat16. Its figure is in milliseconds, and
behind it the quotient by linear_cross_entropy of the same measurement. With K words a token:
linear_log_prob is given K and the sampled one, score centering is `LinearScoreCenteringLoss`, and
linear_top_k finds them. forward stands for linear_log_prob without gradients, as in scoring.
liger-kernel is its linear cross-entropy, where it is installed. Within the context the calls are
those of this package.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

import liger_ops

from ...device import Effort
from ..timing import NoAccelerator, find, interleaved, without_preparation

Call = Callable[[], Any]


def calls(tokens: int, hidden: int, vocabulary: int, words: int, device: str) -> dict[str, Call]:
    """Return the calls by name."""
    generator = torch.Generator(device).manual_seed(0)

    def leaf(*shape: int) -> Tensor:
        x = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
        return (x * shape[-1] ** -0.25).requires_grad_()

    def drawn(*shape: int) -> Tensor:
        return torch.randint(vocabulary, shape, generator=generator, device=device)

    x, weight, target = leaf(tokens, hidden), leaf(vocabulary, hidden), drawn(tokens)
    listed = (drawn(tokens, 1) + torch.arange(words, device=device)) % vocabulary
    sampling = torch.full((1, tokens, words), 0.9 / words, device=device).log()
    advantages = torch.linspace(-1, 1, tokens, device=device)[None]
    centering = liger_ops.losses.LinearScoreCenteringLoss()

    def trained(loss: Callable[[], Tensor]) -> None:
        torch.autograd.grad(loss(), (x, weight))

    def log_prob() -> Tensor:
        targets = torch.cat((target[:, None], listed), 1)
        return liger_ops.linear_log_prob(x, weight, targets)[0].sum()

    def centred() -> Tensor:
        batch = (x[None], weight, target[None], listed[None])
        return centering(*batch, sampling, advantages).loss

    @torch.no_grad()
    def forward() -> None:
        liger_ops.linear_log_prob(x, weight, target)

    losses: dict[str, Callable[[], Tensor]] = {
        "linear_cross_entropy": lambda: liger_ops.linear_cross_entropy(x, weight, target),
        "linear_log_prob": log_prob,
        "score centering": centred,
        "linear_top_k": lambda: liger_ops.linear_top_k(x, weight, words)[1].sum(),
    }
    found: dict[str, Call] = {name: partial(trained, loss) for name, loss in losses.items()}
    found["forward"] = forward
    if device != "cpu" and find_spec("liger_kernel") is not None:
        found["liger-kernel"] = partial(trained, partial(_loss_of_liger_kernel, x, weight, target))
    return found


def _loss_of_liger_kernel(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    result = liger_fused_linear_cross_entropy(x, weight, target)
    loss: Tensor = result[0] if isinstance(result, tuple) else result
    return loss


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--words", type=int, default=20, help="K; default: %(default)s")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each call")
    options = parser.parse_args(arguments)
    try:
        accelerator = find("cuda")
    except NoAccelerator as reason:
        print(f"heads: {reason}", file=sys.stderr)
        return 2
    sizes = (options.tokens, options.hidden, options.vocabulary)
    print(f"{accelerator.name}, torch {torch.__version__}, {sizes}, K = {options.words}; ms")
    found, failed = calls(*sizes, options.words, "cuda"), False
    for name, context in (("", nullcontext()), ("within invariant", liger_ops.invariant())):
        with context:
            effort = Effort(seconds=options.seconds)
            times, failures = interleaved(accelerator, without_preparation(found), effort)
        base = times["linear_cross_entropy"].p50
        figures = (f"{each} {time.p50:.2f} {time.p50 / base:.3f}" for each, time in times.items())
        print(name or "default", "; ".join(figures), *failures.items(), sep="; ", flush=True)
        found.pop("liger-kernel", None)
        failed |= bool(failures)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
