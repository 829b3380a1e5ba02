"""cross_entropy under test, in the form of cross_entropy_forward."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from liger_ops import library
from op_under_test import DEVICE, Case, Magnitude, OpUnderTest, Tensors, Values


@dataclass(frozen=True, kw_only=True)
class LossCase(Case):
    """A drawn use of cross_entropy. shape is the shape of the logits."""

    target_dtype: torch.dtype = torch.int64
    # One token in this many is ignored; 0 for none, 1 for all.
    ignored: int = 3
    ignore_index: int = -100
    weight_dtype: torch.dtype | None = None
    token_weight_dtype: torch.dtype | None = None
    # Whether the mean divides by a given number.
    has_items: bool = False
    reduction: str = "mean"
    label_smoothing: float = 0.0
    lse_square_scale: float = 0.0
    softcap: float | None = None
    logit_scale: float = 1.0
    return_predicted: bool = False
    return_entropy: bool = False

    @property
    def options(self) -> tuple[Any, ...]:
        return (
            self.ignore_index,
            self.reduction,
            self.label_smoothing,
            self.lse_square_scale,
            self.softcap,
            self.logit_scale,
        )


def targets(case: LossCase) -> Tensor:
    *leading, V = case.shape
    generator = torch.Generator().manual_seed(case.seed)
    target = torch.randint(0, V, leading, generator=generator)
    if case.ignored:
        target.view(-1)[:: case.ignored] = case.ignore_index
    return target.to(DEVICE, case.target_dtype)


def tensors(case: LossCase) -> Tensors:
    values = Values(case.seed)
    *leading, V = case.shape
    positive = {"scale": 0.2, "shift": 5.0}
    given: Tensors = {
        "logits": values.draw(case.shape, case.dtype, case.layout, case.scale),
        "target": targets(case),
        "weight": values.draw((V,), case.weight_dtype, **positive),
        "token_weight": values.draw(tuple(leading), case.token_weight_dtype, **positive),
        "num_items_in_batch": torch.tensor(7, device=DEVICE) if case.has_items else None,
    }
    forward = library.OPS["cross_entropy_forward"].definition
    loss, _, given["lse"], _, given["total_weight"], *_, error = forward(*forward_args(case, given))
    given["lse_error"] = error
    dtype = loss.dtype
    layout = case.dy_layout if loss.dim() else "contiguous"
    given["dloss"] = values.draw(tuple(loss.shape), dtype, layout)
    # The other gradients are present if the case has them.
    for name, wanted in zip(("dz_loss", "dlse", "dtarget_logit"), case.output_mask, strict=True):
        shape = tuple(loss.shape) if name == "dz_loss" else tuple(leading)
        given[name] = values.draw(shape, dtype if wanted else None)
    return given


INPUTS = ("logits", "target", "weight", "token_weight", "num_items_in_batch")
UPSTREAM = ("dloss", "dz_loss", "dlse", "dtarget_logit")


def forward_args(case: LossCase, tensors: Tensors) -> tuple[Any, ...]:
    inputs = (tensors[name] for name in INPUTS)
    return (*inputs, *case.options, case.return_predicted, case.return_entropy)


def backward_args(case: LossCase, tensors: Tensors) -> tuple[Any, ...]:
    names = (*UPSTREAM, *INPUTS, "lse", "lse_error", "total_weight")
    return (*(tensors[name] for name in names), *case.options)


def scaled(case: LossCase, tensors: Tensors) -> tuple[Tensor, Tensor, Tensor]:
    """The magnitudes of the effective logits, and of the weights of tokens and classes."""
    x = tensors["logits"].double().abs() * case.logit_scale
    if case.softcap is not None:
        # The rounding error of tanh is relative to 1.
        x = x.clamp(max=case.softcap) + case.softcap
    one = torch.ones((), dtype=torch.float64, device=x.device)
    token, weight = (tensors[name] for name in ("token_weight", "weight"))
    tokens = one if token is None else token.double()
    classes = one if weight is None else weight.double()
    return x, tokens.expand(x.shape[:-1]), classes.expand(x.shape[-1:])


def output_magnitudes(case: LossCase, tensors: Tensors) -> list[Magnitude]:
    x, tokens, classes = scaled(case, tensors)
    if x.numel() == 0:
        return [0.0] * 5
    V = x.shape[-1]
    # Magnitudes of lse and of the largest x; the sum over the classes rounds in every term.
    lse = x.amax(-1) + torch.log(torch.tensor(float(V)))
    counts = tokens * classes.max()
    z_loss = counts * case.lse_square_scale * lse.square()
    loss = 2 * counts * lse + 2 * z_loss
    per_token = [loss, z_loss]
    if case.reduction != "none":
        divisor = 1.0
        if case.reduction == "mean":
            given = tensors["num_items_in_batch"]
            divisor = float(tensors["total_weight"] if given is None else given) or 1.0
        per_token = [float(value.sum()) / divisor for value in per_token]
    else:
        per_token = [float(value.max()) for value in per_token]
    return [*per_token, float(lse.max()), float(x.max()), float(counts.sum())]


def gradient_magnitudes(case: LossCase, tensors: Tensors) -> list[Magnitude]:
    x, tokens, classes = scaled(case, tensors)
    if x.numel() == 0:
        return [0.0]
    upstream = {name: tensors[name] for name in UPSTREAM}
    sizes = {
        name: torch.zeros(()) if grad is None else grad.double().abs().max().cpu()
        for name, grad in upstream.items()
    }
    divisor = 1.0
    if case.reduction == "mean":
        given = tensors["num_items_in_batch"]
        divisor = float(tensors["total_weight"] if given is None else given) or 1.0
    lse = float(x.max()) + float(torch.log(torch.tensor(float(x.shape[-1]))))
    count = float(tokens.max() * classes.max()) / divisor
    loss, z_loss, dlse, dtarget_logit = (float(size) for size in sizes.values())
    upstream_size = loss * count + (loss + z_loss) * count * 2 * case.lse_square_scale * lse
    # A rounding error of the exponent is a relative error of the probability.
    return [(upstream_size + dlse + dtarget_logit) * (1 + lse) * case.logit_scale]


def sample(
    reduction: str, dtype: torch.dtype = torch.float64, rows: int = 3, **form: Any
) -> LossCase:
    """Every option in use; a few of the rows are ignored."""
    return LossCase(
        shape=(rows, 2, 7),
        dtype=dtype,
        weight_dtype=dtype,
        token_weight_dtype=dtype,
        has_items=reduction == "mean",
        reduction=reduction,
        label_smoothing=0.1,
        lse_square_scale=0.01,
        softcap=3.0,
        logit_scale=0.7,
        return_predicted=True,
        return_entropy=True,
        **form,
    )


def cross_entropy(reduction: str) -> OpUnderTest:
    return OpUnderTest(
        name="cross_entropy_forward",
        form=reduction,
        tensors=tensors,
        forward_args=forward_args,
        backward_args=backward_args,
        gradients_of=("logits",),
        gradients_from=UPSTREAM,
        no_gradient=INPUTS[1:],
        output_magnitudes=output_magnitudes,
        gradient_magnitudes=gradient_magnitudes,
        sample=partial(sample, reduction),
        per_row=(*INPUTS[:2], "token_weight", "lse", "lse_error", *UPSTREAM),
        leading=(),
        autocast_as="mul.Tensor",
    )


OPS = tuple(cross_entropy(reduction) for reduction in ("mean", "none"))
