"""Time a head and its loss whose vocabulary is sharded over the GPUs of one host.

    torchrun --standalone --nproc-per-node 2 examples/measure_vocabulary.py
    torchrun --standalone --nproc-per-node 2 examples/measure_vocabulary.py \
        --tokens 24 --hidden 16 --words 97    # on CPUs: compared, and not timed
    torchrun --standalone --nproc-per-node 2 examples/measure_vocabulary.py --divergence forward_kl

Forward and backward of a mean over the tokens, a seventh of which are ignored, in bfloat16. Every
way is first compared with one float32 computation of the whole vocabulary, on 256 of the tokens.
The time is the median of 9 on the slowest rank, and the memory the first rank's peak beyond what
was there before. The losses of Liger-Kernel, Megatron Core, torchtitan and verl run if they are
installed; the line of a way that does not run says why. With --divergence, the loss is the
head's divergence from a teacher of the same size, over all tokens.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel

from liger_ops import distributed

COMPARED = 256
IGNORED = -100
# Relative errors of loss and gradients that bfloat16 explains.
BOUND = 3e-2

Loss = Callable[[Tensor, Tensor, Tensor], Any]
Context = Callable[[], AbstractContextManager[Any]]


class Whole(torch.autograd.Function):
    """x, the same on every rank; its gradient is the sum of the ranks'."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> Any:
        return collectives.wait_tensor(collectives.all_reduce(dx, "sum", ctx.group)), None


class Products(torch.autograd.Function):
    """The three products and the sum of dx over the ranks, with nothing between: a bound."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: Any) -> Tensor:
        logits = torch.mm(x, weight.t())
        ctx.save_for_backward(x, weight, logits)
        ctx.group = group
        return logits[0, 0].float()

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        x, weight, logits = ctx.saved_tensors
        dx = collectives.all_reduce(torch.mm(logits, weight), "sum", ctx.group)
        return collectives.wait_tensor(dx), torch.mm(logits.t(), x), None


def ways(mesh: DeviceMesh, words: int) -> dict[str, Loss]:
    """The ways to compute the mean loss of x (M, D), the rank's words (v, D) and targets (M,)."""
    group = mesh.get_group()
    sharded: dict[str, Any] = {"group": group, "vocab_size": words}

    def linear(x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(Whole.apply(x, group), weight)

    def log_prob(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        found, _ = distributed.linear_log_prob(x, weight, target, **sharded)
        return -found.sum() / (target != IGNORED).sum()

    def of_torch(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        whole = torch.Size((len(x), words))
        logits = DTensor.from_local(
            linear(x, weight).float(), mesh, [Shard(-1)], shape=whole, stride=(words, 1)
        )
        return F.cross_entropy(logits, target)

    head = functools.partial(distributed.linear_cross_entropy, **sharded)
    return {
        "products": lambda x, weight, target: Products.apply(x, weight, group),
        "linear_cross_entropy": head,
        "linear_cross_entropy, compiled": torch.compile(head, fullgraph=True, dynamic=False),
        "linear_log_prob": log_prob,
        "linear, cross_entropy": lambda x, weight, target: distributed.cross_entropy(
            linear(x, weight), target, **sharded
        ),
        "linear, loss_parallel": of_torch,
        "linear, loss_parallel, compiled": torch.compile(of_torch, dynamic=False),
    } | ways_of_others(group, words)


def ways_of_others(group: Any, words: int) -> dict[str, Loss]:
    """The losses of other packages, which are imported when they are called."""

    def liger_kernel(logits: Tensor, target: Tensor) -> Tensor:
        from liger_kernel.transformers.vocab_parallel_cross_entropy import (
            LigerVocabParallelCrossEntropy as Function,
        )

        fits("Liger-Kernel", logits, on_gpus=True)
        return Function()(logits.unsqueeze(1), target.unsqueeze(1), tp_group=group).squeeze(1)

    # verl's log-probabilities of sharded logits are this function's too.
    def megatron(logits: Tensor, target: Tensor) -> Tensor:
        from megatron.core.tensor_parallel import cross_entropy

        fits("Megatron Core", logits)
        return cross_entropy.vocab_parallel_cross_entropy(logits, target, tp_group=group)

    def megatron_fused(logits: Tensor, target: Tensor) -> Tensor:
        from megatron.core.fusions import fused_cross_entropy

        fits("Megatron Core", logits)
        return fused_cross_entropy.fused_vocab_parallel_cross_entropy(logits, target, group)

    def torchtitan(logits: Tensor, target: Tensor) -> Tensor:
        from torchtitan.components.loss import _LossParallelCrossEntropy as Function

        return Function.apply(logits.float(), target, group, words, "none")

    def of_verl(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy

        fits("verl", x, on_gpus=True)
        found, _ = linear_cross_entropy(Whole.apply(x, group), weight, target, 1.0, "none", group)
        return mean(-found, target)

    def fits(owner: str, x: Tensor, on_gpus: bool = False) -> None:
        if on_gpus and not x.is_cuda:
            raise NotImplementedError(f"{owner} computes it on GPUs alone")
        if words % dist.get_world_size(group):
            raise NotImplementedError(f"{owner} takes the same number of words on every rank")

    def mean(losses: Tensor, target: Tensor) -> Tensor:
        kept = target != IGNORED
        return torch.where(kept, losses, 0.0).sum() / kept.sum()

    def after_linear(function: Callable[[Tensor, Tensor], Tensor]) -> Loss:
        return lambda x, weight, target: mean(
            function(F.linear(Whole.apply(x, group), weight), target), target
        )

    return {
        "linear, Liger-Kernel": after_linear(liger_kernel),
        "linear, Megatron": after_linear(megatron),
        "linear, Megatron, fused": after_linear(megatron_fused),
        "linear, torchtitan": after_linear(torchtitan),
        "verl": of_verl,
    }


def ways_of_divergence(
    mesh: DeviceMesh, words: int, kind: str, teacher_x: Tensor, teacher_weight: Tensor
) -> dict[str, Loss]:
    """The ways to compute the mean divergence of a head from its teacher, with the rank's words."""
    group = mesh.get_group()
    sharded: dict[str, Any] = {"group": group, "vocab_size": words}

    def both_logits(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        student = F.linear(Whole.apply(x, group), weight)
        return student, F.linear(teacher_x[: len(x)], teacher_weight)

    def head(x: Tensor, weight: Tensor, _: Tensor) -> Tensor:
        teacher = (teacher_x[: len(x)], teacher_weight)
        return distributed.linear_divergence(x, weight, *teacher, kind=kind, **sharded)[0]

    def of_logits(x: Tensor, weight: Tensor, _: Tensor) -> Tensor:
        return distributed.divergence(*both_logits(x, weight), kind, **sharded).mean()

    def of_torch(x: Tensor, weight: Tensor, _: Tensor) -> Tensor:
        whole = torch.Size((len(x), words))
        log_q, log_p = (
            DTensor.from_local(
                logits.float(), mesh, [Shard(-1)], shape=whole, stride=(words, 1)
            ).log_softmax(-1)
            for logits in both_logits(x, weight)
        )
        return written(log_q, log_p, kind)

    return {
        "linear_divergence": head,
        "linear_divergence, compiled": torch.compile(head, fullgraph=True, dynamic=False),
        "linear, divergence": of_logits,
        "linear, log_softmax": of_torch,
        "linear, log_softmax, compiled": torch.compile(of_torch, dynamic=False),
    }


def written(log_q: Tensor, log_p: Tensor, kind: str) -> Tensor:
    """A mean divergence as trainers write it."""
    if kind == "jsd":
        log_m = torch.logaddexp(log_p, log_q) - math.log(2)
        terms = (log_p.exp() * (log_p - log_m) + log_q.exp() * (log_q - log_m)) / 2
    else:
        log_a, log_b = (log_p, log_q) if kind == "forward_kl" else (log_q, log_p)
        terms = log_a.exp() * (log_a - log_b)
    return terms.sum(-1).mean()


def step(loss_of: Loss, x: Tensor, weight: Tensor, target: Tensor, within: Context) -> Tensor:
    x.grad = weight.grad = None
    with within():
        loss = loss_of(x, weight, target)
        loss.backward()
    whole: Tensor = loss.full_tensor() if isinstance(loss, DTensor) else loss.detach()
    return whole


def milliseconds(
    loss_of: Loss, x: Tensor, weight: Tensor, target: Tensor, within: Context
) -> float:
    for _ in range(3):
        step(loss_of, x, weight, target, within)
    times = []
    for _ in range(9):
        dist.barrier()
        start, end = torch.cuda.Event(True), torch.cuda.Event(True)
        start.record()
        step(loss_of, x, weight, target, within)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    slowest = torch.tensor(statistics.median(times), device=x.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


def mebibytes(loss_of: Loss, x: Tensor, weight: Tensor, target: Tensor, within: Context) -> float:
    x.grad = weight.grad = None
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step(loss_of, x, weight, target, within)
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def relative(found: Tensor, truth: Tensor) -> float:
    return ((found.float() - truth).norm() / truth.norm()).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--words", type=int, default=151936)
    parser.add_argument("--way", nargs="+", help="all by default")
    parser.add_argument("--divergence", choices=("forward_kl", "reverse_kl", "jsd"))
    options = parser.parse_args()
    on_gpus = torch.cuda.is_available()
    kind = "cuda" if on_gpus else "cpu"
    if on_gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mesh = init_device_mesh(kind, (int(os.environ["WORLD_SIZE"]),))
    rank, ranks = dist.get_rank(), dist.get_world_size()

    generator = torch.Generator(kind).manual_seed(0)
    given = {"device": kind, "generator": generator}
    x = torch.randn(options.tokens, options.hidden, **given).bfloat16()
    whole = torch.randn(options.words, options.hidden, **given) * options.hidden**-0.5
    whole = whole.bfloat16()
    target = torch.randint(0, options.words, (options.tokens,), **given)
    target[::7] = IGNORED
    few = x[:COMPARED], target[:COMPARED]
    leaves = [tensor.float().requires_grad_() for tensor in (few[0], whole)]
    logits = leaves[0] @ leaves[1].t()
    held = -(-options.words // ranks)
    own = slice(min(rank * held, options.words), min((rank + 1) * held, options.words))
    # The gradient of a log_softmax within loss_parallel is that of a cross-entropy.
    within: Context = nullcontext if options.divergence else loss_parallel
    if options.divergence:
        teacher_x = torch.randn(options.tokens, options.hidden, **given).bfloat16()
        teacher = torch.randn(options.words, options.hidden, **given) * options.hidden**-0.5
        teacher = teacher.bfloat16()
        log_p = (teacher_x[:COMPARED].float() @ teacher.float().t()).log_softmax(-1)
        truth = written(logits.log_softmax(-1), log_p, options.divergence)
        teacher_words = teacher[own].clone()
        named = ways_of_divergence(
            mesh, options.words, options.divergence, teacher_x, teacher_words
        )
        del teacher, log_p
    else:
        truth, named = F.cross_entropy(logits, few[1]), ways(mesh, options.words)
    truth.backward()
    dx, dweight = leaves[0].grad, leaves[1].grad[own].clone()
    weight = whole[own].clone().requires_grad_()
    truth = truth.detach()
    del whole, leaves, logits

    for name, loss_of in named.items():
        if options.way and name not in options.way:
            continue
        line = f"{name:32}"
        try:
            if name != "products":
                some = few[0].clone().requires_grad_()
                loss = step(loss_of, some, weight, few[1], within)
                errors = (
                    abs(loss - truth).item(),
                    relative(some.grad, dx),
                    relative(weight.grad, dweight),
                )
                line += " errors of loss, dx, dweight " + ", ".join(f"{e:.1e}" for e in errors)
                if max(errors) > BOUND:
                    line += " WRONG"
            if on_gpus:
                call = (loss_of, x.clone().requires_grad_(), weight, target, within)
                line += f"; {milliseconds(*call):.2f} ms, {mebibytes(*call):.0f} MiB"
        except (ImportError, NotImplementedError) as error:
            line += f" not run: {error}"
        if rank == 0:
            print(line, flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
