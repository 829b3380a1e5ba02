"""The ways to compute a head and its loss with a vocabulary that is sharded over ranks."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from liger_ops import distributed
from liger_ops.distributed.vocab_parallel.shard import Replicated
from liger_ops.torch_private import functional_collectives as collectives

IGNORED = -100

Loss = Callable[[Tensor, Tensor, Tensor], Any]


class Products(torch.autograd.Function):
    """The three matrix products and the sum of dx over the ranks: a lower bound of the time."""

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


def sharded_logits(logits: Tensor, mesh: DeviceMesh, words: int) -> DTensor:
    whole = torch.Size((len(logits), words))
    return DTensor.from_local(logits.float(), mesh, [Shard(-1)], shape=whole, stride=(words, 1))


def ways(mesh: DeviceMesh, words: int) -> dict[str, Loss]:
    """Return the ways to compute the mean loss of x (M, D), the rank's words (v, D) and targets
    (M,)."""
    group = mesh.get_group()
    sharded: dict[str, Any] = {"group": group, "vocab_size": words}

    def linear(x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(Replicated.apply(x, group), weight)

    def log_prob(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        values, _ = distributed.linear_log_prob(x, weight, target, **sharded)
        return -values.sum() / (target != IGNORED).sum()

    def of_torch(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(sharded_logits(linear(x, weight), mesh, words), target)

    head: Loss = functools.partial(distributed.linear_cross_entropy, **sharded)
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
    """Return the losses of other packages, which are imported when they are called."""

    def of(owner: str, path: str, x: Tensor, on_gpus: bool = False) -> Any:
        function = resolve_name(path)
        if on_gpus and not x.is_cuda:
            raise NotImplementedError(f"{owner} computes it on GPUs alone")
        if owner and words % dist.get_world_size(group):
            raise NotImplementedError(f"{owner} takes the same number of words on every rank")
        return function

    def liger_kernel(logits: Tensor, target: Tensor) -> Tensor:
        path = "liger_kernel.transformers.vocab_parallel_cross_entropy"
        function = of("Liger-Kernel", f"{path}:LigerVocabParallelCrossEntropy", logits, True)
        return function()(logits.unsqueeze(1), target.unsqueeze(1), tp_group=group).squeeze(1)

    # verl's log-probabilities of sharded logits are this function's too.
    def megatron(logits: Tensor, target: Tensor) -> Tensor:
        path = "megatron.core.tensor_parallel.cross_entropy:vocab_parallel_cross_entropy"
        return of("Megatron Core", path, logits)(logits, target, tp_group=group)

    def megatron_fused(logits: Tensor, target: Tensor) -> Tensor:
        path = "megatron.core.fusions.fused_cross_entropy:fused_vocab_parallel_cross_entropy"
        return of("Megatron Core", path, logits)(logits, target, group)

    def torchtitan(logits: Tensor, target: Tensor) -> Tensor:
        function = of("", "torchtitan.components.loss:_LossParallelCrossEntropy", logits)
        return function.apply(logits.float(), target, group, words, "none")

    def of_verl(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        path = "verl.utils.kernel.linear_cross_entropy:linear_cross_entropy"
        function = of("verl", path, x, True)
        values, _ = function(Replicated.apply(x, group), weight, target, 1.0, "none", group)
        return mean(-values, target)

    def mean(losses: Tensor, target: Tensor) -> Tensor:
        counted = target != IGNORED
        return torch.where(counted, losses, 0.0).sum() / counted.sum()

    def after_linear(function: Callable[[Tensor, Tensor], Tensor]) -> Loss:
        return lambda x, weight, target: mean(
            function(F.linear(Replicated.apply(x, group), weight), target), target
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
    """Return the ways to compute the mean divergence of a head from its teacher, with the rank's
    words."""
    group = mesh.get_group()
    sharded: dict[str, Any] = {"group": group, "vocab_size": words}

    def both_logits(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        student = F.linear(Replicated.apply(x, group), weight)
        return student, F.linear(teacher_x[: len(x)], teacher_weight)

    def head(x: Tensor, weight: Tensor, _: Tensor) -> Tensor:
        teacher = (teacher_x[: len(x)], teacher_weight)
        return distributed.linear_divergence(x, weight, *teacher, kind=kind, **sharded)[0]

    def of_logits(x: Tensor, weight: Tensor, _: Tensor) -> Tensor:
        return distributed.divergence(*both_logits(x, weight), kind, **sharded).mean()

    def of_torch(x: Tensor, weight: Tensor, _: Tensor) -> Tensor:
        log_q, log_p = (
            sharded_logits(logits, mesh, words).log_softmax(-1) for logits in both_logits(x, weight)
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
    """Compute a mean divergence as trainers write it."""
    if kind == "jsd":
        log_m = torch.logaddexp(log_p, log_q) - math.log(2)
        terms = (log_p.exp() * (log_p - log_m) + log_q.exp() * (log_q - log_m)) / 2
    else:
        log_a, log_b = (log_p, log_q) if kind == "forward_kl" else (log_q, log_p)
        terms = log_a.exp() * (log_a - log_b)
    return terms.sum(-1).mean()
