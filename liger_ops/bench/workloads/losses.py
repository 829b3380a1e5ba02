"""cross_entropy, log_prob and divergence, of logits and with the head."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pkgutil import resolve_name
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import liger_ops

from .entry import HEAD, VOCABULARY, Draw, Entry, Function, Shape, as_tuple, peer, wide

# The truth has at most this many logits in float64 at a time: a gigabyte.
LOGITS_AT_ONCE = 2**27


def model_loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(wide(logits), target)


def model_head_and_loss(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return model_loss(x @ weight.T, target)


def model_log_prob(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Compute log-probabilities and entropy as trainers do."""
    log_p = wide(logits).log_softmax(-1)
    log_prob = log_p.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    return log_prob, -(log_p.exp() * log_p).sum(-1)


def model_divergence(student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """Compute the mean Jensen-Shannon divergence as trainers of distillation do."""
    student, teacher = wide(student_logits), teacher_logits.to(wide(student_logits).dtype)
    return model_jsd(student.log_softmax(-1), teacher.log_softmax(-1))


def model_jsd(log_q: Tensor, log_p: Tensor) -> Tensor:
    """Compute the mean Jensen-Shannon divergence of log-probabilities."""
    student, teacher = wide(log_q), log_p.to(wide(log_q).dtype)
    mean = torch.logaddexp(student, teacher) - math.log(2)
    of_student = F.kl_div(mean, student, reduction="none", log_target=True)
    of_teacher = F.kl_div(mean, teacher, reduction="none", log_target=True)
    return (of_student.sum(-1) + of_teacher.sum(-1)).mean() / 2


def model_heads_and_divergence(
    x: Tensor, weight: Tensor, teacher_weight: Tensor, teacher_x: Tensor
) -> Tensor:
    return model_divergence(x @ weight.T, teacher_x.to(teacher_weight.dtype) @ teacher_weight.T)


def _linear_divergence(
    x: Tensor, weight: Tensor, teacher_weight: Tensor, teacher_x: Tensor, **options: Any
) -> Tensor:
    return liger_ops.linear_divergence(x, weight, teacher_x, teacher_weight, **options)[0]


def truth_by_rows(
    definition: Function, tensors: Sequence[Tensor], dys: Sequence[Tensor]
) -> list[Tensor]:
    """Compute the mean loss, or values per row, and the gradients in float64, for a chunk of the
    rows at a time.

    The first tensor, and the last, which is the target or the teacher's, are split by rows. No
    token is ignored.
    """
    *floats, target = tensors
    leaves = [t.detach().double().requires_grad_(t.requires_grad) for t in floats]
    classes = leaves[1].shape[0] if len(leaves) > 1 else leaves[0].shape[1]
    rows = len(target)
    step = max(1, LOGITS_AT_ONCE // classes)
    chunks: list[list[Tensor]] = []
    for start in range(0, rows, step):
        chunk = slice(start, start + step)
        # The mean of a chunk counts by the chunk's share of the rows.
        share = len(target[chunk]) / rows
        values = as_tuple(definition(leaves[0][chunk], *leaves[1:], target[chunk]))
        results = [y if y.dim() else y * share for y in values]
        upstream = [dy.double()[chunk] if dy.dim() else dy.double() for dy in dys]
        torch.autograd.backward(results, upstream)
        chunks.append([y.detach() for y in results])
    outputs = [torch.cat(ys) if ys[0].dim() else sum(ys) for ys in zip(*chunks, strict=True)]
    return [*outputs, *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def x_weight_and_target(draw: Draw, shape: Shape) -> list[Tensor]:
    rows, width, classes = shape
    # The logits have standard deviation 1.
    weight = draw.leaf(classes, width, scale=width**-0.5)
    return [draw.leaf(rows, width), weight, draw.classes(rows, classes)]


def _both_heads(draw: Draw, shape: Shape) -> list[Tensor]:
    """Draw a student's head and a teacher's, which is not trained."""
    rows, width, classes = shape
    teacher = draw.normal(classes, width) * width**-0.5
    return [*x_weight_and_target(draw, shape)[:2], teacher, draw.normal(rows, width)]


def _summed_in_its_dtype(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Call the op with the gradient of weight summed in weight's dtype, and chunks of the default
    size. Smaller chunks would save memory in the forward only: the peak is that of the backward,
    which holds the gradients as computed and as returned. On an H100, 8192 x 2048 x 128256: 1067
    MiB with chunks of 512 MiB and of 128, in 20.5 ms and 24.5."""
    return liger_ops.linear_cross_entropy(x, weight, target, accum_dtype=weight.dtype)


def _trl_linear(package: Any) -> Function:
    function, chunk = package._ChunkedLogProbFunction, package._CHUNKED_LOGPROB_CHUNK_SIZE

    def log_prob(x: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        options = (1.0, chunk, None, 1.0, ("entropy",))
        return function.apply(x, weight, None, target, *options)[:2]

    return log_prob


def _liger_jsd(package: Any) -> Function:
    """Return a call of Liger-Kernel's jsd, whose arguments are log-probabilities."""
    return lambda student_logits, teacher_logits: package.liger_jsd(
        wide(student_logits).log_softmax(-1), wide(teacher_logits).log_softmax(-1)
    )


def _trl_divergence(package: Any) -> Function:
    function = resolve_name("trl.kernels.chunked_divergence:ChunkedDivergenceFunction")

    def mean(x: Tensor, weight: Tensor, teacher_weight: Tensor, teacher_x: Tensor) -> Tensor:
        return function.apply(x, weight, None, teacher_x, teacher_weight, None, 0.5)[0].mean()

    return mean


# Common fields of the losses of logits, and of those of a head.
OF_LOGITS: dict[str, Any] = {
    "dims": ("M", "V"), "figures": ((8192, 32768), (8192, 151936)), "models": VOCABULARY,
    "small": (256, 32768), "truth": truth_by_rows,
}  # fmt: skip
OF_HEADS: dict[str, Any] = {
    "dims": ("M", "D", "V"), "inputs": x_weight_and_target, "is_matrix_product": True,
    # Three products: the logits, and the gradients of x and of the weight. Computing the logits
    # again takes a fourth.
    "passes": {"full": 6}, "figures": ((8192, 2048, 151936), (8192, 4096, 151936)), "models": HEAD,
    "small": (256, 512, 8192), "truth": truth_by_rows,
}  # fmt: skip


ENTRIES = (
    Entry(
        op="cross_entropy",
        eager=model_loss,
        aten=F.cross_entropy,
        peers={"liger-kernel": "liger_cross_entropy", "quack": "cross_entropy"},
        inputs=lambda draw, shape: [draw.leaf(*shape), draw.classes(*shape)],
        # "full" reads the logits again, because the gradient needs the forward's sums.
        passes={"forward": 1, "full": 3},
        **{**OF_LOGITS, "figures": ((8192, 32768), (8192, 128256))},
    ),
    Entry(
        op="log_prob",
        eager=model_log_prob,
        peers={"trl": "selective_log_softmax_and_entropy"},
        inputs=lambda draw, shape: [draw.leaf(*shape), draw.classes(*shape)],
        # The backward reads the logits again and writes their gradient.
        passes={"forward": 1, "backward": 2, "full": 3},
        **OF_LOGITS,
    ),
    Entry(
        op="divergence",
        ours=lambda student, teacher: liger_ops.divergence(student, teacher).mean(),
        eager=model_divergence,
        peers={"liger-kernel": _liger_jsd},
        # The teacher is not trained.
        inputs=lambda draw, shape: [draw.leaf(*shape), draw.normal(*shape)],
        # The backward reads both logits again and writes the student's gradient.
        passes={"forward": 2, "backward": 3, "full": 5},
        **OF_LOGITS,
    ),
    Entry(
        op="linear_cross_entropy",
        low_memory=_summed_in_its_dtype,
        eager=model_head_and_loss,
        peers={
            "liger-kernel": "liger_fused_linear_cross_entropy",
            "quack": lambda _: resolve_name(
                "quack.linear_cross_entropy:chunked_linear_cross_entropy"
            ),
        },
        **{
            **OF_HEADS,
            "figures": ((8192, 2048, 128256), (8192, 4096, 128256), (32768, 4096, 128256)),
        },
    ),
    Entry(
        op="linear_log_prob",
        low_memory=lambda x, weight, target: liger_ops.linear_log_prob(
            x, weight, target, accum_dtype=x.dtype
        ),
        eager=lambda x, weight, target: model_log_prob(x @ weight.T, target),
        peers={"trl": _trl_linear},
        **{**OF_HEADS, "figures": (*OF_HEADS["figures"], (32768, 4096, 128256))},
    ),
    Entry(
        op="linear_divergence",
        ours=_linear_divergence,
        low_memory=lambda *heads: _linear_divergence(*heads, accum_dtype=heads[1].dtype),
        eager=model_heads_and_divergence,
        peers={
            "liger-kernel": peer("liger_fused_linear_jsd", order=(0, 1, 3, 2)),
            "trl": _trl_divergence,
        },
        # Three products of the student, and the teacher's logits.
        **{**OF_HEADS, "inputs": _both_heads, "passes": {"full": 8}},
    ),
)
