"""linear_score_centering under test, in the form of linear_score_centering_forward."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from launch_forms import Forms
from linear_cross_entropy_cases import LORA, SIZES, HeadCase, head, lora_of, tensors_of
from op_under_test import DEVICE, OpUnderTest, Tensors, Values, laid_out


@dataclass(frozen=True, kw_only=True)
class CenteringCase(HeadCase):
    """A drawn call of linear_score_centering. upstream says which results have a gradient."""

    # The words that the sampler lists of a token: some are left out, some are listed twice, and
    # some are the sampled word.
    K: int = 3
    importance_sampling: str = "truncate"
    importance_min: float = 0.25
    importance_max: float = 1.5
    upstream: tuple[bool, ...] = (True, True, True)


OF_TOKENS = ("words", "sampling_top_log_prob", "advantages", "sampling_log_prob")
UPSTREAM = ("dloss", "dlog_prob", "dlse")
SAVED = ("lse", "coefficients", "total_weight", "lse_error")


def sampled(case: CenteringCase, target: torch.Tensor) -> Tensors:
    """Draw what the sampler says of each token: nothing that is finite of a dropped one."""
    generator = torch.Generator().manual_seed(case.seed + 3)
    log_q = torch.randn((*case.shape, case.V), generator=generator).log_softmax(-1)
    words = torch.randint(case.V, (*case.shape, case.K), generator=generator)
    top = log_q.gather(-1, words)
    missing = torch.rand(words.shape, generator=generator)
    top = top.masked_fill(missing < 0.1, -torch.inf)
    words = torch.where((missing < 0.2) & (missing > 0.05), -100, words)
    advantages = torch.randn(case.shape, generator=generator)
    of_target = log_q.gather(-1, target.cpu().clamp(min=0).long().unsqueeze(-1)).squeeze(-1)
    dropped = target.cpu() == -100
    advantages, of_target = (
        x.masked_fill(dropped, torch.inf).to(DEVICE) for x in (advantages, of_target)
    )
    values = (words.to(DEVICE, case.target_dtype), top.to(DEVICE), advantages, of_target)
    return dict(zip(OF_TOKENS, values, strict=True))


def tensors(op: OpUnderTest, case: CenteringCase) -> Tensors:
    x, weight, target, bias, *_, items = tensors_of(case)
    drawn: Tensors = {"x": x, "weight": weight, "target": target, "bias": bias}
    drawn.update(sampled(case, target), num_items_in_batch=items)
    drawn.update(zip(LORA, lora_of(case), strict=True))
    loss, log_prob, *saved = op.definition(*op.forward_args(case, drawn))
    drawn.update(zip(SAVED, saved, strict=False))
    values = Values(case.seed + 1)
    for name, result, wanted in zip(
        UPSTREAM, (loss, log_prob, saved[0]), case.upstream, strict=True
    ):
        gradient = values.draw(tuple(result.shape), result.dtype if wanted else None)
        layout = case.dy_layout if result.dim() else "contiguous"
        drawn[name] = None if gradient is None else laid_out(gradient, layout)
    return drawn


def linear_score_centering(reduction: str) -> OpUnderTest:
    op = head(
        "linear_score_centering_forward",
        form=reduction,
        case_type=CenteringCase,
        tensors=lambda case: tensors(op, case),
        no_gradient=("target", "num_items_in_batch", *OF_TOKENS),
        constant_factors=True,
        autocast_keeps=OF_TOKENS[1:],
        sampled={
            **SIZES, "K": 8, "temperature": 0.8, "softcap": 3.0, "logit_scale": 0.7,
            "reduction": reduction, "num_items": reduction == "mean",
        },
        # The kernels are those of log_prob.
        forms=Forms(shapes=()),
    )  # fmt: skip
    return op


OPS = tuple(linear_score_centering(reduction) for reduction in ("mean", "none"))
