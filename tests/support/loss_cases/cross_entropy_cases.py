"""cross_entropy under test, in the form of cross_entropy_forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from launch_forms import FP32, Fields, loss_forms, shapes
from liger_ops import library
from op_under_test import DEVICE, SAME, Magnitude, OpUnderTest, Pick, Tensors, drawn_for, drawn_rows

# Option of a token's loss that adds a term to it -> the values that are drawn, the default first. A
# new option needs a line here, and one in the bounds below: with these, heads, sharded losses,
# modules and `fuse` are tested with it.
TERM_CHOICES: Fields = {"label_smoothing": (0.0, 0.1, 1.0), "lse_square_scale": (0.0, 1e-2, 0.1)}
TERMS: Fields = {name: values[1] for name, values in TERM_CHOICES.items()}
WITHOUT_TERMS: Fields = {name: values[0] for name, values in TERM_CHOICES.items()}
UPSTREAM = ("dloss", "dz_loss", "dlse", "dtarget_logit")
OPTIONS = ("ignore_index", "reduction", *TERM_CHOICES, "softcap", "logit_scale")
# Fields for the targets of all losses. ignored: one token in so many is, 0 for none, 1 for all.
# ignore_index: one that is no class, and one that is a class too.
TARGETS: Fields = {
    "target_dtype": (torch.int64, torch.int32), "ignored": (3, 0, 1, 2),
    "ignore_index": (-100, 0),
}  # fmt: skip
LOGITS: Fields = {"softcap": (None, 3.0, 30.0), "logit_scale": (1.0, 0.0625, 2.0)}


def targets(case: Any) -> Tensor:
    """Draw the targets of a case, some of them ignored."""
    *leading, V = case.shape
    generator = torch.Generator().manual_seed(case.seed)
    target = torch.randint(0, V, leading, generator=generator)
    if case.ignored:
        target.view(-1)[:: case.ignored] = case.ignore_index
    return target.to(DEVICE, case.target_dtype)


def tensors(case: Any) -> Tensors:
    values = drawn_for(case)
    *leading, V = case.shape
    positive = {"scale": 0.2, "shift": 5.0}
    drawn: Tensors = {
        "logits": values.draw(case.shape, SAME, case.layout, case.scale),
        "target": targets(case),
        "weight": values.draw((V,), case.weight_dtype, **positive),
        "token_weight": values.draw(tuple(leading), case.token_weight_dtype, **positive),
        "num_items_in_batch": torch.tensor(7, device=DEVICE) if case.has_items else None,
    }
    forward = library.OPS["cross_entropy_forward"].definition
    results = forward(*drawn.values(), *(getattr(case, name) for name in OPTIONS))
    loss, _, drawn["lse"], _, drawn["total_weight"], *_, drawn["lse_error"] = results
    dtype = loss.dtype
    layout = case.dy_layout if loss.dim() else "contiguous"
    drawn["dloss"] = values.draw(tuple(loss.shape), dtype, layout)
    # output_mask says which of the other incoming gradients are present.
    for name, wanted in zip(("dz_loss", "dlse", "dtarget_logit"), case.output_mask, strict=True):
        shape = tuple(loss.shape) if name == "dz_loss" else tuple(leading)
        drawn[name] = values.draw(shape, dtype if wanted else None)
    return drawn


def scaled(case: Any, tensors: Tensors) -> tuple[Tensor, Tensor, Tensor]:
    """Return the magnitudes of the effective logits, and the weights of tokens and classes."""
    x = tensors["logits"].double().abs() * case.logit_scale
    if case.softcap is not None:
        x = x.clamp(max=case.softcap)
    one = torch.ones((), dtype=torch.float64, device=x.device)
    token, weight = (tensors[name] for name in ("token_weight", "weight"))
    tokens = one if token is None else token.double()
    classes = one if weight is None else weight.double()
    return x, tokens.expand(x.shape[:-1]), classes.expand(x.shape[-1:])


def output_magnitudes(case: Any, tensors: Tensors) -> list[Magnitude]:
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
            number = tensors["num_items_in_batch"]
            divisor = float(tensors["total_weight"] if number is None else number) or 1.0
        per_token = [float(value.sum()) / divisor for value in per_token]
    else:
        per_token = [float(value.max()) for value in per_token]
    return [*per_token, float(lse.max()), float(x.max()), float(counts.sum())]


def of_terms(case: Any, dloss: Any, dz_loss: Any, lse: Any) -> Any:
    """Return the size of the gradient of a token's loss, in units of its probabilities."""
    return dloss + (dloss + dz_loss) * 2 * case.lse_square_scale * lse


def gradient_magnitudes(case: Any, tensors: Tensors) -> list[Magnitude]:
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
        number = tensors["num_items_in_batch"]
        divisor = float(tensors["total_weight"] if number is None else number) or 1.0
    lse = float(x.max()) + float(torch.log(torch.tensor(float(x.shape[-1]))))
    count = float(tokens.max() * classes.max()) / divisor
    loss, z_loss, dlse, dtarget_logit = (float(size) for size in sizes.values())
    upstream_size = count * of_terms(case, loss, z_loss, lse)
    # A rounding error of the exponent is a relative error of the probability.
    return [(upstream_size + dlse + dtarget_logit) * (1 + lse) * case.logit_scale]


def vocabularies(*sizes: int, rows: int = 3, **fields: Any) -> dict[str, Fields]:
    """Return cases of these numbers of classes, with the host code's own plan."""
    return {str(V): {"shape": (rows, V), "dtype": torch.bfloat16, **fields} for V in sizes}


def rows_and_items(pick: Pick, fields: Fields) -> Fields:
    """Draw rows, and for a mean whether it divides by num_items_in_batch."""
    items = fields["reduction"] == "mean" and fields["has_items"]
    return {**drawn_rows(pick, fields), "has_items": items}


# Every option in use, and none; a few of the rows are ignored.
USED = {
    **TERMS, "softcap": 3.0, "logit_scale": 0.7, "weight_dtype": SAME, "token_weight_dtype": SAME,
    "return_predicted": True, "return_entropy": True,
}  # fmt: skip
UNUSED = {
    **dict.fromkeys(USED), **WITHOUT_TERMS, "logit_scale": 1.0,
    "return_predicted": False, "return_entropy": False, "has_items": False,
}  # fmt: skip
ALL = {
    **TERMS, "weight_dtype": FP32, "token_weight_dtype": FP32, "softcap": 30.0,
    "logit_scale": 0.5, "return_predicted": True, "return_entropy": True,
}  # fmt: skip


def cross_entropy(reduction: str) -> OpUnderTest:
    return OpUnderTest(
        name="cross_entropy_forward",
        form=reduction,
        choices={
            **TARGETS, **LOGITS, **TERM_CHOICES, "weight_dtype": (None, None, FP32, SAME),
            "token_weight_dtype": (None, None, FP32, SAME), "has_items": (False, True),
            "reduction": ("mean", "sum", "none"), "return_predicted": (False, True),
            "return_entropy": (False, True),
        },
        coupled=rows_and_items,
        tensors=tensors,
        no_gradient=("target", "weight", "token_weight", "num_items_in_batch"),
        output_magnitudes=output_magnitudes,
        gradient_magnitudes=gradient_magnitudes,
        cases=vocabularies(4096, 32000, 50257, 151936, output_mask=(False,) * 3),
        sampled={**USED, "reduction": reduction, "has_items": reduction == "mean"},
        forms=loss_forms(
            TERMS, {**TERMS, "weight_dtype": FP32}, {"softcap": 30.0}, {"logit_scale": 0.5},
            {"return_predicted": True}, {"return_entropy": True}, ALL,
            common=UNUSED, optional_at=(1, 2, 3, 5),
        ),
        compiled=[
            {**form, **more}
            for form in shapes((4, 100), (4, 4096), (4, 32768), (4, 128256))
            for more in ({"output_mask": (False,) * 3}, {**ALL, "has_items": True})
            if reduction == "mean"
        ],
        # The total weight is the sum of the rows.
        rows_permute=lambda case: False,
        shaping=(),
        autocast_as="mul.Tensor",
    )  # fmt: skip


OPS = tuple(cross_entropy(reduction) for reduction in ("mean", "none"))
