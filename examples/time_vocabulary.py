"""Time a head and its loss whose vocabulary is sharded over the GPUs of one host.

    torchrun --standalone --nproc-per-node 2 examples/time_vocabulary.py
        --divergence forward_kl
        --tokens 24 --hidden 16 --words 97    # on CPUs: compared, and not timed

Forward and backward of a mean over the tokens, a seventh of which are ignored, in bfloat16. Every
way is first compared with one float32 computation of the whole vocabulary, on 256 of the tokens.
The time is the median of 9 on the slowest rank, and the memory the first rank's peak beyond what
was there before. The losses of Liger-Kernel, Megatron Core, torchtitan and verl run if they are
installed; the line of a way that does not run says why. With --divergence, the loss is the
head's divergence from a teacher of the same size, over all tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from liger_ops.device import MIB, Effort, MeasuredDevice, spread
from torchrun_ranks import largest, ranks, relative, say
from vocabulary_ways import IGNORED, Loss, ways, ways_of_divergence, written

COMPARED = 256
# Relative errors of loss and gradients that bfloat16 explains.
BOUND = 3e-2


@dataclass
class VocabularyStep:
    """Forward and backward of a loss of x (M, D), the rank's words (v, D) and targets (M,)."""

    x: Tensor
    weight: Tensor
    target: Tensor
    within: Callable[[], AbstractContextManager[Any]]

    def take(self, loss_of: Loss) -> Tensor:
        self.x.grad = self.weight.grad = None
        with self.within():
            loss = loss_of(self.x, self.weight, self.target)
            loss.backward()
        whole: Tensor = loss.full_tensor() if isinstance(loss, DTensor) else loss.detach()
        return whole

    def measured(self, loss_of: Loss) -> str:
        """Measure the median time on the slowest rank, and this rank's peak memory; return them as
        text."""
        device = MeasuredDevice("cuda")
        step = partial(self.take, loss_of)

        def together() -> None:
            device.synchronize()
            dist.barrier()

        for _ in range(3):
            step()
        times = device.times(step, Effort(9, seconds=float("inf")), before=together)
        self.x.grad = self.weight.grad = None
        peak = device.peak_bytes(step)
        return f"; {largest(spread(times).p50)[0]:.2f} ms, {peak / MIB:.0f} MiB"


def gradient_of(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None
    return leaf.grad


@dataclass
class Truth:
    """The loss of the first tokens, and its gradients, computed in float32 of all words."""

    loss: Tensor
    dx: Tensor
    dweight: Tensor

    def errors(self, loss_of: Loss, step: VocabularyStep) -> str:
        loss = step.take(loss_of)
        errors = (
            abs(loss - self.loss).item(),
            relative(gradient_of(step.x), self.dx),
            relative(gradient_of(step.weight), self.dweight),
        )
        text = " errors of loss, dx, dweight " + ", ".join(f"{error:.1e}" for error in errors)
        return text + (" WRONG" if max(errors) > BOUND else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--words", type=int, default=151936)
    parser.add_argument("--way", nargs="+", help="all by default")
    parser.add_argument("--divergence", choices=("forward_kl", "reverse_kl", "jsd"))
    options = parser.parse_args()
    with ranks() as mesh:
        named, truth, step = prepare(options, mesh)
        few = VocabularyStep(step.x[:COMPARED], step.weight, step.target[:COMPARED], step.within)
        few.x = few.x.detach().clone().requires_grad_()
        for name, loss_of in named.items():
            if options.way and name not in options.way:
                continue
            line = f"{name:32}"
            try:
                if name != "products":
                    line += truth.errors(loss_of, few)
                if torch.cuda.is_available():
                    line += step.measured(loss_of)
            except (ImportError, NotImplementedError) as error:
                line += f" not run: {error}"
            say(line)
        dist.barrier()


def prepare(
    options: argparse.Namespace, mesh: DeviceMesh
) -> tuple[dict[str, Loss], Truth, VocabularyStep]:
    """Return the ways, the true results for the first tokens, and the step of all tokens."""
    generator = torch.Generator(mesh.device_type).manual_seed(0)
    draw: dict[str, Any] = {"device": mesh.device_type, "generator": generator}

    def hidden_and_head() -> tuple[Tensor, Tensor]:
        x = torch.randn(options.tokens, options.hidden, **draw).bfloat16()
        weight = torch.randn(options.words, options.hidden, **draw) * options.hidden**-0.5
        return x, weight.bfloat16()

    x, weight = hidden_and_head()
    target = torch.randint(0, options.words, (options.tokens,), **draw)
    target[::7] = IGNORED
    leaves = [tensor.float().requires_grad_() for tensor in (x[:COMPARED], weight)]
    logits = leaves[0] @ leaves[1].t()
    held = -(-options.words // mesh.size())
    rank = mesh.get_local_rank()
    local = slice(min(rank * held, options.words), min((rank + 1) * held, options.words))
    # The gradient of a log_softmax within loss_parallel is that of a cross-entropy.
    within: Callable[[], AbstractContextManager[Any]] = loss_parallel
    if kind := options.divergence:
        within = nullcontext
        teacher_x, teacher = hidden_and_head()
        log_p = (teacher_x[:COMPARED].float() @ teacher.float().t()).log_softmax(-1)
        loss = written(logits.log_softmax(-1), log_p, kind)
        named = ways_of_divergence(mesh, options.words, kind, teacher_x, teacher[local].clone())
    else:
        loss = F.cross_entropy(logits, target[:COMPARED])
        named = ways(mesh, options.words)
    loss.backward()
    dx, dweight = gradient_of(leaves[0]), gradient_of(leaves[1])[local].clone()
    step = VocabularyStep(
        x.requires_grad_(), weight[local].clone().requires_grad_(), target, within
    )
    return named, Truth(loss.detach(), dx, dweight), step


if __name__ == "__main__":
    main()
