"""moe_experts under test, in the form of moe_experts_forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from launch_forms import BF16, FP32, Fields, Forms
from liger_ops import library
from op_under_test import DEVICE, SAME, Magnitude, OpUnderTest, Pick, Tensors, drawn_for, laid_out

# How the experts of tokens are drawn: evenly; half of the time from a tenth of the experts; always
# one expert; with some sentinels, which are no expert; or sentinels alone.
ROUTING = ("even", "skewed", "one", "sentinels", "nobody")
OPTIONS = (
    "activation", "alpha", "limit", "up_offset", "interleaved", "gate_up_lora_scale",
    "down_lora_scale",
)  # fmt: skip
# The weights that have a LoRA, in each form.
LORAS = ((), ("gate_up", "down"), ("gate_up",), ("down",))


def ids(case: Any) -> Tensor:
    """Draw the experts of each token."""
    generator = torch.Generator().manual_seed(case.seed)
    shape, E = (case.shape[0], case.top_k), case.experts
    chosen = torch.randint(E, shape, generator=generator)
    if case.routing == "skewed":
        few = torch.randint(max(1, E // 10), shape, generator=generator)
        chosen = few.where(torch.rand(shape, generator=generator) < 0.5, chosen)
    elif case.routing == "one":
        chosen = torch.full(shape, E - 1)
    elif case.routing == "nobody":
        chosen = torch.full(shape, E)
    elif case.routing == "sentinels":
        chosen = torch.randint(-1, E + 2, shape, generator=generator)
    return chosen.to(DEVICE, case.index_dtype)


def tensors(case: Any) -> Tensors:
    values = drawn_for(case)
    (T, D), E, I = case.shape, case.experts, case.width
    F = I if case.activation == "relu_squared" else 2 * I
    bias = SAME if case.bias else None

    def weight(*shape: int) -> Tensor:
        drawn = values.draw(shape, scale=shape[-1] ** -0.5)
        return drawn.mT.contiguous().mT if case.transposed else laid_out(drawn, case.weight_layout)

    given: Tensors = {
        "x": values.draw((T, D), SAME, case.layout, case.scale),
        "gate_up": weight(E, F, D),
        "down": weight(E, D, I),
        "top_k_index": ids(case),
        "top_k_weights": values.draw((T, case.top_k), case.router_dtype, case.layout),
        "gate_up_bias": values.draw((E, F), bias),
        "down_bias": values.draw((E, D), bias),
    }
    lora: Tensors = {}
    for name, out, into, R in zip(LORAS[1], (F, D), (D, I), case.ranks, strict=True):
        dtype = SAME if name in case.loras else None
        lora[f"{name}_lora_a"] = values.draw((E, R, into), dtype, scale=into**-0.5)
        b = values.draw((out, R, E), dtype, scale=1 / R)
        # peft's layout, in which the experts are neighbours.
        lora[f"{name}_lora_b"] = None if b is None else b.permute(2, 0, 1)
    op = library.OPS["moe_experts_forward"]
    # The definition reads the numbers of tokens, which tensors without memory do not have.
    forward = op.fake if isinstance(given["x"], FakeTensor) else lambda call: op.definition(*call)
    *options, scale, down_scale = (getattr(case, name) for name in OPTIONS)
    results = forward(
        op.arguments(*given.values(), *options, True, *lora.values(), scale, down_scale)
    )
    given |= lora
    given["y"], given["order"], given["offsets"], pre_activation = results
    given["pre_activation"] = pre_activation if case.return_pre_activation else None
    return {**given, "dy": values.draw((T, D), SAME, case.dy_layout)}


class Absolute:
    """Magnitudes of the results: the op's sums of absolute values, times a number of roundings."""

    # How often a term is rounded to the dtype of the inputs on its way to a result.
    ROUNDINGS = 8

    def __init__(self, case: Any, given: Tensors) -> None:
        self.case, self.given = case, given
        self.wide = {
            name: value.double().abs()
            for name, value in given.items()
            if value is not None and value.is_floating_point()
        }
        T, K = given["top_k_index"].shape
        index = given["top_k_index"].long()
        self.inside = (index >= 0) & (index < case.experts)
        self.ids = index.where(self.inside, 0).flatten()
        self.x = self.wide["x"].repeat_interleave(K, 0)
        self.h = self.rows("gate_up", self.x) + self.bias("gate_up_bias")
        if case.activation == "relu_squared":
            self.a, self.slopes = self.h.square(), 2 * self.h
        else:
            gate, up = (
                (self.h[:, ::2], self.h[:, 1::2]) if case.interleaved else self.h.chunk(2, -1)
            )
            # A slope is at most 1.1 + |alpha * gate|, and its error is as large.
            gate, up = gate + 1, up + abs(case.up_offset) + 1
            self.a = gate * up
            self.slopes = torch.stack((up * (1 + 2 * gate), gate), -1)
            self.slopes = self.slopes.flatten(1) if case.interleaved else self.slopes.mT.flatten(1)
        self.weights = (self.wide["top_k_weights"] * self.inside).reshape(-1, 1)
        self.result = self.rows("down", self.a) + self.bias("down_bias")

    def rows(self, name: str, values: Tensor) -> Tensor:
        """Multiply each row by the weight of its expert."""
        return torch.einsum("rd,rfd->rf", values, self.weight(name))

    def weight(self, name: str) -> Tensor:
        """Return the weight of each row's expert, with its LoRA."""
        weight = self.wide[name]
        if name in self.case.loras:
            scale = abs(getattr(self.case, f"{name}_lora_scale"))
            weight = weight + scale * self.wide[f"{name}_lora_b"] @ self.wide[f"{name}_lora_a"]
        return weight[self.ids]

    def bias(self, name: str) -> Tensor | float:
        return self.wide[name][self.ids] if name in self.wide else 0.0

    def magnitude(self, terms: Tensor) -> float:
        """Return the largest sum times its roundings, in units of op_checks.FLOAT32_ROUNDINGS."""
        eps, single = torch.finfo(self.case.dtype).eps, torch.finfo(torch.float32).eps
        roundings = 4 + self.ROUNDINGS * (eps / single / 8 if eps > single else 1)
        return float(terms.max()) * roundings if terms.numel() else 0.0

    def outputs(self) -> list[Magnitude]:
        y = (self.result * self.weights).unflatten(0, self.inside.shape).sum(1)
        # order and offsets are tested by themselves, and the rows of sentinels hold anything.
        return [self.magnitude(y)]

    def gradients(self) -> list[Magnitude]:
        E, K = self.case.experts, self.inside.shape[1]
        dy = self.wide["dy"].repeat_interleave(K, 0)
        upstream = dy * self.weights
        da = torch.einsum("rd,rdi->ri", upstream, self.weight("down"))
        is_gated = self.case.activation != "relu_squared"
        both = da
        if is_gated:
            both = da.repeat_interleave(2, 1) if self.case.interleaved else da.repeat(1, 2)
        dh = both * self.slopes
        dx = torch.einsum("rf,rfd->rd", dh, self.weight("gate_up"))
        experts = torch.nn.functional.one_hot(self.ids, E).double() * self.inside.reshape(-1, 1)
        dgate_up = torch.einsum("re,rf,rd->efd", experts, dh, self.x)
        ddown = torch.einsum("re,rd,ri->edi", experts, upstream, self.a)
        terms = (
            dx.unflatten(0, self.inside.shape).sum(1), dgate_up, ddown, (dy * self.result).sum(1),
            experts.mT @ dh, experts.mT @ upstream, *self.of_lora("gate_up", dgate_up),
            *self.of_lora("down", ddown),
        )  # fmt: skip
        return [self.magnitude(term) for term in terms]

    def of_lora(self, name: str, dweight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sums for the gradients of a LoRA's factors, empty if there is none."""
        if name not in self.case.loras:
            return dweight[:0], dweight[:0]
        scale = abs(getattr(self.case, f"{name}_lora_scale"))
        a, b = self.wide[f"{name}_lora_a"], self.wide[f"{name}_lora_b"]
        return scale * b.mT @ dweight, scale * dweight @ a.mT


def experts(pick: Pick, fields: Fields) -> Fields:
    E, K = pick(((1, 1), (3, 1), (3, 2), (7, 3), (17, 2)))
    return {
        "shape": (pick((0, 1, 2, 5, 33)), pick((1, 5, 16, 33))), "experts": E, "top_k": K,
        "width": pick((1, 5, 16, 33)), "interleaved": fields["interleaved"]
        and fields["activation"] != "relu_squared",
    }  # fmt: skip


ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "clamped_swiglu", "relu_squared")
OPS = (
    OpUnderTest(
        name="moe_experts_forward",
        choices={
            "experts": (7,), "top_k": (2,), "width": (11,), "routing": ROUTING,
            "activation": ACTIVATIONS, "alpha": (1.702, 1.0), "limit": (7.0, 0.5),
            "up_offset": (1.0, 0.0), "interleaved": (False, True), "bias": (True, False),
            "transposed": (False, True), "weight_layout": ("contiguous", "sliced"),
            "router_dtype": (SAME, FP32), "index_dtype": (torch.int64, torch.int32),
            "return_pre_activation": (True, False), "loras": LORAS, "ranks": ((13, 17), (16, 16)),
            "gate_up_lora_scale": (1.0, 2.0), "down_lora_scale": (1.0, 0.5),
            "scale": (1.0,), "tile": (None,),
            "layout": ("contiguous", "transposed", "sliced"),
        },
        coupled=experts,
        tensors=tensors,
        output_magnitudes=lambda case, given: Absolute(case, given).outputs(),
        gradient_magnitudes=lambda case, given: Absolute(case, given).gradients(),
        sample_shape=lambda rows: (rows, 4),
        sampled={
            "activation": "clamped_swiglu", "limit": 0.5, "router_dtype": lambda d: d,
            "transposed": True, "loras": LORAS[1], "gate_up_lora_scale": 1.5,
            "ranks": (2, 9),
        },
        no_gradient=("top_k_index",),
        # Several blocks of rows of an expert, and of columns, by the host code's own plan.
        cases={
            f"{activation}-{routing}": {
                "shape": (150, 70), "experts": 4, "width": 80, "routing": routing, "dtype": BF16,
                "activation": activation, "interleaved": activation == "clamped_swiglu",
                "loras": loras, "gate_up_lora_scale": 2.0,
            }
            for activation, routing, loras in (
                ("silu", "skewed", LORAS[1]), ("clamped_swiglu", "sentinels", ()),
            )
        }
        | {
            # In float32 the bounds are tight enough to notice each term of a gradient.
            f"{activation}-float32": {
                "shape": (17, 20), "experts": 4, "width": 24, "routing": "sentinels", "dtype": FP32,
                "activation": activation, "layout": "transposed", "dy_layout": "transposed",
                "loras": LORAS[i % 4], "down_lora_scale": 0.5,
            }
            for i, activation in enumerate(ACTIVATIONS)
        }
        # A slice of one expert's result is contiguous with any stride.
        | {"one-expert": {"shape": (5, 20), "experts": 1, "top_k": 1, "width": 24, "dtype": FP32}},
        forms=Forms(
            shapes=[
                {"shape": (4096, D), "experts": E, "top_k": K, "width": width}
                for D, E, K, width in (
                    (1, 1, 1, 1), (1023, 7, 3, 1023), (2048, 128, 8, 768), (2880, 32, 4, 2880),
                    (4096, 8, 2, 14336), (7168, 64, 8, 2048), (32768, 2, 2, 512),
                )
            ],
            options=(
                *({"activation": activation} for activation in ACTIVATIONS[1:]),
                *({"activation": gated, "interleaved": True} for gated in ACTIVATIONS[:4]),
                {"router_dtype": FP32, "bias": True},
            ),
            backward_options=(
                {"output_mask": (True, False, False, True, False, False, *[False] * 4)},
                {"output_mask": (False, True, True, False, True, True, *[False] * 4)},
            ),
            optional_at=(1, 2, 3),
            common={"activation": "silu", "bias": False, "routing": "sentinels", "loras": ()},
            # Several rows and columns of a tile, and several tiles across each.
            executed=[
                {"shape": (T, D), "experts": 4, "top_k": 3, "width": width}
                for T, D, width in ((30, 70, 40), (5, 9000, 20), (5, 24, 1100))
            ],
        ),
        compiled=(
            {"shape": (4, 512), "width": 256, "activation": "silu", "bias": False, "loras": ()},
            {"shape": (4, 512), "width": 256, "bias": False, "loras": LORAS[1], "ranks": (16, 16)},
            {
                "shape": (4, 544), "width": 288, "activation": "clamped_swiglu",
                "interleaved": True, "transposed": True, "bias": True,
            },
        ),
        shaping=("x", "gate_up", "down", "top_k_index"),
        rowwise=(),
        multiplies=True,
        cost=3,
        autocast_as="linear",
        autocast_keeps=("top_k_weights",),
    ),
)  # fmt: skip
