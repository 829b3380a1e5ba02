"""lora_linear under test, in the form of lora_linear_forward."""

from __future__ import annotations

from typing import Any

from launch_forms import FP32, Fields, Forms
from liger_ops import library
from op_under_test import SAME, OpUnderTest, Pick, Tensors, drawn_for


def tensors(case: Any) -> Tensors:
    values = drawn_for(case)
    D, N, R = case.shape[-1], case.out, case.rank
    drawn: Tensors = {
        "x": values.draw(case.shape, SAME, case.layout, case.scale),
        "weight": values.draw((N, D), scale=D**-0.5),
        "a": values.draw((R, D), case.lora_dtype, scale=D**-0.5),
        "b": values.draw((N, R), case.lora_dtype, scale=R**-0.5),
    }
    bias = values.draw((N,), SAME if case.bias else None)
    up = values.draw(case.shape, SAME if case.gated else None, case.layout)
    drawn |= {"bias": bias, "up": up}
    x, weight, a, b = list(drawn.values())[:4]
    forward = library.OPS["lora_linear_forward"].definition
    drawn["lora_x"] = forward(x, weight, a, b, 1.0, None, up, case.activation)[1]
    return {**drawn, "dy": values.draw((*case.shape[:-1], N), SAME, case.dy_layout)}


def sizes(pick: Pick, fields: Fields) -> Fields:
    leading = pick(((0,), (1,), (7,), (2, 5), ()))
    D, out, rank = (pick((1, 5, 16, 33)) for _ in range(3))
    return {"shape": (*leading, D), "out": out, "rank": rank}


# Every device runs the definition, of which test_lora_linear.py has the bounds. All sizes of the
# sample differ, because tracing would treat equal ones as one size.
OPS = (
    OpUnderTest(
        name="lora_linear_forward",
        choices={
            "out": (11,), "rank": (6,), "lora_dtype": (SAME, FP32), "lora_scale": (0.5, 2.0),
            "bias": (True, False), "gated": (False, True),
            "activation": ("silu", "gelu", "gelu_tanh"), "tile": (None,), "scale": (1.0,),
        },
        coupled=sizes,
        tensors=tensors,
        computed={"scale": lambda case, given: case.lora_scale},
        sample_shape=lambda rows: (rows, 2, 4),
        sampled={"gated": True},
        # Its only kernels are those of swiglu and geglu, which their entries launch.
        forms=Forms(shapes=()),
        multiplies=True,
        autocast_as="linear",
    ),
)  # fmt: skip
