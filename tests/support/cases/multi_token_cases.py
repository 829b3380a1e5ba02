"""multi_token_attention under test, in the form of multi_token_attention_forward."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from launch_forms import BF16, FP32, Fields, Forms, shapes
from op_under_test import SAME, Magnitude, OpUnderTest, Pick, Tensors, drawn_for, max_abs


def convolution(case: Any) -> tuple[Any, ...]:
    numbers = (case.stride, case.padding, case.dilation)
    return (*(list(v) * (2 // len(v)) for v in numbers), case.groups)


INPUTS = ("scores", "weight", "bias")


def tensors(case: Any) -> Tensors:
    values, dtype = drawn_for(case), case.weight_dtype
    channels = case.shape[1] // case.groups
    terms = channels * case.kernel[0] * case.kernel[1]
    drawn = {
        "scores": values.draw(case.shape, SAME, case.layout, case.scale, case.shift),
        "weight": values.draw((case.out, channels, *case.kernel), dtype, scale=terms**-0.5),
        "bias": values.draw((case.out,), dtype if case.bias else None),
    }
    form = torch.empty(case.shape, device="meta")
    weight = torch.empty(drawn["weight"].shape, device="meta")
    shape = tuple(F.conv2d(form, weight, None, *convolution(case)).shape)
    return {**drawn, "dy": values.draw(shape, dtype, case.dy_layout)}


def probabilities(case: Any, tensors: Tensors) -> tuple[Tensor, float]:
    """Return p, and its largest relative error in units of the checks' float32 rounding errors.

    A score's difference to the maximum is rounded, which is a relative error of its exponential;
    and p is rounded to weight's dtype.
    """
    wide = tensors["scores"].double()
    future = torch.ones(case.shape[-2:], dtype=torch.bool, device=wide.device).triu(1)
    largest = wide.masked_fill(future, -torch.inf).amax(-1, keepdim=True)
    below = (wide - largest).masked_fill(future, -torch.inf)
    # Where the exponential is below 1e-9 of the largest, its error does not matter.
    spread = min(20.0, max_abs(below.masked_fill(future, 0.0)))
    stored = torch.finfo(tensors["weight"].dtype).eps / torch.finfo(torch.float32).eps / 8
    return torch.softmax(below, -1), 2 + spread + stored


def output_magnitudes(case: Any, tensors: Tensors) -> list[Magnitude]:
    if case.shape[0] == 0:
        return [0.0]
    p, roundings = probabilities(case, tensors)
    p = torch.ones_like(p).tril() if case.sparse else p
    sums = F.conv2d(p, tensors["weight"].double().abs(), None, *convolution(case))
    return [max_abs(sums) * roundings + max_abs(tensors["bias"])]


def gradient_magnitudes(case: Any, tensors: Tensors) -> list[Magnitude]:
    if case.shape[0] == 0:
        return [0.0] * 3
    p, roundings = probabilities(case, tensors)
    p = torch.ones_like(p).tril() if case.sparse else p
    dc = tensors["dy"].double().tril().abs()
    dp, dweight, dbias = torch.ops.aten.convolution_backward(
        dc, p, tensors["weight"].double().abs(), [case.out], *convolution(case)[:3], False,
        [0, 0], case.groups, [True] * 3,
    )  # fmt: skip
    return [2 * max_abs(dp) * roundings, max_abs(dweight) * roundings, max_abs(dbias)]


def convolutions(pick: Pick, fields: Fields) -> Fields:
    # The interpreter's time grows with the rows.
    L, groups = pick((1, 2, 7, 16, 37)), pick((1, 2))
    kernel, dilation = (pick(((1, 1), (3, 3), (3, 1), (2, 4))) for _ in range(2))
    # The positions that each dimension loses without padding. The result must be square: of size L,
    # or smaller by 2 * smaller or, for an even kernel, larger.
    lost = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
    if sum(lost) % 2:
        kernel, dilation, lost = (3, 3), (1, 1), [2, 2]
    whole = 0 if all(n % 2 == 0 for n in lost) else max(lost)
    smaller = pick((0, 0, 1)) if min(lost) > 1 and L > 2 else 0
    return {
        "shape": (pick((0, 1, 2, 3)), groups * pick((1, 3)), L, L),
        "out": groups * pick((1, 2)), "kernel": kernel, "dilation": dilation, "groups": groups,
        "padding": tuple((whole + n) // 2 - smaller for n in lost),
    }  # fmt: skip


OPS = (
    OpUnderTest(
        name="multi_token_attention_forward",
        # A call takes no tile.
        choices={
            "tile": (None,), "weight_dtype": (SAME, SAME, FP32, BF16), "out": (4,),
            "kernel": ((3, 3),), "stride": ((1,), (1,), (2,)), "padding": ((1,),),
            "dilation": ((1,),), "groups": (1,), "bias": (True, False), "sparse": (False, True),
            "shift": (0.0, 30.0),
        },
        coupled=convolutions,
        tensors=tensors,
        # The default of groups is not the sample's.
        needed=7,
        output_magnitudes=output_magnitudes,
        gradient_magnitudes=gradient_magnitudes,
        # No size is `rows` or a number of rows that the tests use.
        sample_shape=lambda rows: (rows, 2, 4, 4),
        sampled={"kernel": (2, 2), "dilation": (2,), "groups": 2},
        cost=2,
        # Rows that fit a tile, and rows that do not, which a test of their own runs. The
        # convolution is not Triton's, and so the gradient of bias alone has no launch.
        forms=Forms(
            shapes=shapes(*((2, 2, L, L) for L in (1, 100, 1023, 2048, 4096, 8192, 16384))),
            options=({"sparse": True}, {"weight_dtype": FP32}, {"layout": "sliced"}),
            backward_options=(
                {"sparse": True, "weight_dtype": BF16},
                {"output_mask": (True, False, False)},
                {"output_mask": (False, True, False)},
            ),
            optional_at=(2, 3, 4, 6),
            executed=({"shape": (2, 2, 70, 70)}, {"shape": (1, 4, 33, 33), "bias": False}),
        ),
        compiled=[
            {
                "shape": (1, C, 16, 16), "out": C, "kernel": (3, 3), "dilation": (1,),
                "groups": groups,
            }
            for C, groups in ((16, 1), (32, 1), (128, 2))
        ],
        multiplies=True,
        autocast_as="conv2d",
    ),
)  # fmt: skip
