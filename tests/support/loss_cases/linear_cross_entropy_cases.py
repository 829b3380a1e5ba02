"""linear_cross_entropy under test, in the form of linear_cross_entropy_forward."""

from __future__ import annotations

from dataclasses import dataclass, make_dataclass
from typing import Any

import torch
from torch import Tensor

from cross_entropy_cases import OPTIONS, TERMS, WITHOUT_TERMS
from launch_forms import Fields, head_forms
from liger_ops import library
from op_under_test import DEVICE, OpUnderTest, Tensors, Values, laid_out

Terms = make_dataclass(
    "Terms", [(n, float, v) for n, v in WITHOUT_TERMS.items()], frozen=True, kw_only=True
)


@dataclass(frozen=True, kw_only=True)
class HeadCase(Terms):
    """A drawn call of a head. A chunk of chunk_bytes has the logits of a few tokens or words."""

    shape: tuple[int, ...] = (3, 5)
    D: int = 7
    V: int = 11
    dtype: torch.dtype = torch.float32
    layout: str = "contiguous"
    dy_layout: str = "contiguous"
    bias: bool = True
    class_weight: bool = False
    token_weight: bool = False
    num_items: bool = False
    ignored: str = "some"
    target_dtype: torch.dtype = torch.int64
    reduction: str = "mean"
    softcap: float | None = None
    logit_scale: float = 1.0
    accumulate_narrow: bool = False
    temperature: float = 1.0
    chunk_bytes: int | None = 100
    scale: float = 1.0
    # The rank of the head's LoRA, or None for a head without one.
    rank: int | None = None
    # Which of x, weight, bias, lora_x and lora_b have a gradient; the last two may be left out.
    mask: tuple[bool, ...] = (True, True, True)
    # Whether loss, z_loss, lse and target_logit have a gradient.
    upstream: tuple[bool, ...] = (True, False, False, False)
    seed: int = 0

    def __post_init__(self) -> None:
        if len(self.mask) == 3:
            has_lora = self.rank is not None
            object.__setattr__(self, "mask", (*self.mask, has_lora, has_lora))


def tensors_of(case: HeadCase) -> list[Tensor | None]:
    """Draw x, weight, target, bias, class_weight, token_weight and num_items_in_batch."""
    values = Values(case.seed)
    x = values.draw((*case.shape, case.D), case.dtype, "contiguous", case.scale)
    weight = values.draw((case.V, case.D), case.dtype, "contiguous")
    bias = values.draw((case.V,), case.dtype if case.bias else None)
    class_weight = values.draw((case.V,), torch.float32 if case.class_weight else None)
    token_weight = values.draw(case.shape, torch.float32 if case.token_weight else None)
    kept = (
        torch.rand(case.shape, generator=values.generator)
        < {"none": 2, "some": 0.7, "all": 0}[case.ignored]
    )
    target = torch.randint(case.V, case.shape, generator=values.generator)
    target = torch.where(kept, target, -100).to(DEVICE, case.target_dtype)
    layout = case.layout if case.shape else "contiguous"
    return [
        laid_out(x, layout),
        laid_out(weight, case.layout),
        target,
        bias,
        None if class_weight is None else class_weight.abs(),
        None if token_weight is None else token_weight.abs(),
        torch.tensor(37, device=DEVICE) if case.num_items else None,
    ]


def lora_of(case: HeadCase) -> list[Tensor | None]:
    """Draw lora_x and lora_b, None and None without a LoRA."""
    if case.rank is None:
        return [None, None]
    values = Values(case.seed + 2)
    lora_x = values.draw((*case.shape, case.rank), case.dtype, "contiguous", case.scale)
    lora_b = values.draw((case.V, case.rank), case.dtype)
    layout = case.layout if case.shape else "contiguous"
    return [laid_out(lora_x, layout), laid_out(lora_b, case.layout)]


def options_of(case: HeadCase) -> list[Any]:
    """Return the options from ignore_index to chunk_bytes."""
    accum_dtype = case.dtype if case.accumulate_narrow else None
    return [-100, *(getattr(case, n) for n in OPTIONS[1:]), accum_dtype, case.chunk_bytes]


# Masks of the gradients of x, weight, bias, lora_x and lora_b.
NO_GRADIENTS = [False] * 5
WITHOUT_LORA = [True, True, True, False, False]
LORA = ("lora_x", "lora_b")
INPUTS = (
    "x", "weight", "target", "bias", "class_weight", "token_weight", "num_items_in_batch",
)  # fmt: skip
UPSTREAM = ("dloss", "dz_loss", "dlse", "dtarget_logit")


def tensors(case: HeadCase) -> Tensors:
    drawn: Tensors = dict(zip((*INPUTS, *LORA), (*tensors_of(case), *lora_of(case)), strict=True))
    values, lora = list(drawn.values())[: len(INPUTS)], {name: drawn[name] for name in LORA}
    forward = library.OPS["linear_cross_entropy_forward"].definition
    outputs = forward(*values, *options_of(case), gradient_mask=gradient_mask(case, drawn), **lora)
    drawn["lse"], drawn["total_weight"], drawn["lse_error"] = outputs[2], outputs[4], outputs[7]
    values = Values(case.seed + 1)
    for name, output in zip(UPSTREAM, outputs, strict=False):
        drawn[name] = values.draw(tuple(output.shape), output.dtype)
        if output.dim():
            drawn[name] = laid_out(drawn[name], case.dy_layout)
    return drawn


# All sizes differ, because tracing would treat equal ones as one size. There are several chunks of
# tokens and of words.
SIZES: Fields = {
    "D": 4, "V": 7, "rank": 5, "chunk_bytes": lambda dtype: 4 * 7 * dtype.itemsize,
}  # fmt: skip
# The fields of a sample with every option in use.
USED: Fields = {
    **SIZES, **TERMS, "class_weight": True, "token_weight": True, "softcap": 3.0,
    "logit_scale": 0.7,
}  # fmt: skip
UNUSED = {
    "class_weight": False, "token_weight": False, "num_items": False, "chunk_bytes": None,
    **WITHOUT_TERMS, "softcap": None, "logit_scale": 1.0,
}  # fmt: skip


def gradient_mask(case: HeadCase, tensors: Tensors) -> list[bool]:
    """Return which gradients the forward computes: none with the reduction "none"."""
    return [wanted and case.reduction != "none" for wanted in case.mask]


def head(name: str, **fields: Any) -> OpUnderTest:
    """Return the entry of a head; the op's own tests have the bounds of its kernels."""
    defaults: Fields = {
        "computed": {
            "accum_dtype": lambda case, tensors: case.dtype if case.accumulate_narrow else None,
            "gradient_mask": gradient_mask,
            "output_mask": lambda case, tensors: list(case.mask),
            "ignore_index": lambda case, tensors: -100,
            # A forward computes no gradients here.
            **dict.fromkeys(("dx", "dweight", "dbias", "dlora_x", "dlora_b"), lambda c, t: None),
            **fields.pop("computed", {}),
        },
        "sample_shape": lambda rows: (rows, 2),
        "autocast_keeps": ("class_weight", "token_weight", "teacher_logits"),
    }
    return OpUnderTest(name=name, multiplies=True, autocast_as="linear", **defaults | fields)


def linear_cross_entropy(reduction: str) -> OpUnderTest:
    always = lambda case, tensors: True
    return head(
        "linear_cross_entropy_forward",
        form=reduction,
        case_type=HeadCase,
        tensors=tensors,
        computed={"return_predicted": always, "return_entropy": always},
        no_gradient=("target", *INPUTS[4:]),
        sampled={**USED, "reduction": reduction, "num_items": reduction == "mean"},
        forms=head_forms(
            {**TERMS, "class_weight": True, "softcap": 30.0, "logit_scale": 0.5},
            sizes=({"D": 512, "V": 1023}, {"D": 4096, "V": 128256}),
            common=UNUSED,
        ),
    )  # fmt: skip


OPS = tuple(linear_cross_entropy(reduction) for reduction in ("mean", "none"))
