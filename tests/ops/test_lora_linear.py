"""lora_linear against float64, and against peft's layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.flop_counter
from hypothesis import given
from torch import Tensor

import liger_ops
import op_checks
import strategies
from called_ops import saved_bytes
from op_table import OPS
from op_under_test import EVERY_FOLDER

OP = OPS["lora_linear_forward"]
NAMES, SHAPES = ("x", "weight", "a", "b"), ((5, 8), (6, 8), (2, 8), (6, 2))
DTYPES = {
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "float32": (torch.float32, torch.float32),
    "bfloat16-float32": (torch.bfloat16, torch.float32),
    "float16-float32": (torch.float16, torch.float32),
}


GATED = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}


def peft_linear(
    x: Tensor, weight: Tensor, a: Tensor, b: Tensor, scale: float, bias: Tensor | None = None,
    up: Tensor | None = None, activation: str = "silu",
) -> Tensor:  # fmt: skip
    """The forward of peft's layer, below a gated activation if there is an up."""
    x = x if up is None else GATED[activation](x) * up
    result = F.linear(x, weight, bias)
    return (result + F.linear(F.linear(x.to(a.dtype), a), b) * scale).to(result.dtype)


def by_peft(case: Any, given: dict[str, Any]) -> tuple[Tensor, list[Tensor | None]]:
    """y and every gradient."""
    inputs = {n: None if given[n] is None else given[n].clone() for n in OP.tensor_arguments}
    leaves = [one.requires_grad_() for one in inputs.values() if one is not None]
    y = peft_linear(**inputs, scale=case.lora_scale, activation=case.activation)
    found = iter(torch.autograd.grad(y, leaves, given["dy"]))
    return y.detach(), [None if one is None else next(found) for one in inputs.values()]


def in_float64(given: dict[str, Any]) -> dict[str, Any]:
    return {name: op_checks.in_float64(one) for name, one in given.items()}


@pytest.mark.device_kernels
@EVERY_FOLDER
@given(case=strategies.cases(OP))
def test_kernels_match_float64(folder: str, case: Any) -> None:
    """Up to three products in a row are rounded to the dtype."""
    tensors = OP.tensors(case)
    y, gradients = by_peft(case, in_float64(tensors))
    for backward, expected in ((False, [y]), (True, gradients)):
        args = (OP.backward_args if backward else OP.forward_args)(case, tensors)
        before = op_checks.clones(args)
        found = op_checks.run_kernel(OP, folder, backward, case, args)
        op_checks.assert_unchanged(args, before)
        op_checks.assert_allocated_as_meta(OP, backward, args, found)
        for i, (value, exact) in enumerate(zip(found, expected, strict=backward)):
            wanted = exact is not None and (not backward or case.output_mask[i])
            assert (value is not None) == wanted
            if wanted and exact.numel():
                bound = 8 * torch.finfo(case.dtype).eps * float(exact.abs().max() + 1)
                assert float((value.double() - exact).abs().max()) <= bound


@pytest.mark.device_kernels
@EVERY_FOLDER
@pytest.mark.parametrize(("dtype", "lora_dtype"), DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("lora_scale", (0.5, 16.0))
@pytest.mark.parametrize("gated", (False, True))
def test_no_further_from_float64_than_peft(
    folder: str, dtype: torch.dtype, lora_dtype: torch.dtype, lora_scale: float, gated: bool
) -> None:
    """At most twice as far for any element, and hardly further for all of them; where the LoRA is
    smaller than the layer and where it is larger. Errors of layers add up in a model."""
    case = OP.case(
        shape=(65, 96), dtype=dtype, lora_dtype=lora_dtype, out=80, rank=8, bias=True,
        lora_scale=lora_scale, gated=gated, output_mask=(True,) * 6,
    )  # fmt: skip
    tensors = OP.tensors(case)
    (y, gradients), (own, references) = by_peft(case, in_float64(tensors)), by_peft(case, tensors)
    found = OP.kernel(folder, backward=True)(*OP.backward_args(case, tensors))
    own_y = OP.kernel(folder)(*OP.forward_args(case, tensors))[0]
    results = zip((own_y, *found), (own, *references), (y, *gradients), strict=True)
    for value, reference, exact in results:
        if exact is None:
            assert value is None
            continue
        assert value.dtype is reference.dtype
        errors = [float((one.double() - exact).abs().max()) for one in (value, reference)]
        last = torch.finfo(value.dtype).eps * float(exact.abs().max())
        assert errors[0] <= 2 * errors[1] + last
        norms = [float((one.double() - exact).norm()) for one in (value, reference)]
        assert norms[0] <= 1.2 * norms[1] + torch.finfo(torch.float32).eps * float(exact.norm())


@pytest.mark.parametrize("needed", ("x", "a", "b"))
def test_a_frozen_weight_takes_no_product(needed: str) -> None:
    """Nor does a backward compute another product that no gradient needs."""
    given = dict(zip(NAMES, (torch.randn(*s) for s in SHAPES), strict=True))
    given[needed].requires_grad_()
    y = liger_ops.lora_linear(*given.values(), 0.5)
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counted:
        y.sum().backward()
    M, D, N, R = 5, 8, 6, 2
    products = {"x": M * N * D + M * N * R + M * R * D, "a": M * N * R + M * R * D, "b": M * N * R}
    assert counted.get_total_flops() == 2 * products[needed]


def saved(function: Any, *args: Any) -> int:
    return saved_bytes(lambda: function(*args), args)


def test_what_is_saved() -> None:
    """The product with a; peft keeps x in the dtype of a too."""
    x, weight = (torch.randn(*s, dtype=torch.bfloat16) for s in SHAPES[:2])
    a, b = (torch.randn(*s).requires_grad_() for s in SHAPES[2:])
    assert saved(liger_ops.lora_linear, x, weight, a, b, 0.5) == 5 * 2 * 4
    assert saved(peft_linear, x, weight, a, b, 0.5, None) == 5 * 2 * 4 + 5 * 8 * 4


def test_no_activation_is_saved() -> None:
    """The gate and up are, which are the results of other layers."""
    given = [torch.randn(*s).requires_grad_() for s in (*SHAPES, SHAPES[0])]
    x, weight, a, b, up = given
    assert saved(liger_ops.lora_linear, x, weight, a, b, 0.5, None, up) == 5 * 2 * 4
    assert saved(peft_linear, x, weight, a, b, 0.5, None, up) == 5 * 2 * 4 + 2 * 5 * 8 * 4


def test_the_module_is_a_linear_layer_at_first() -> None:
    layer = liger_ops.nn.LoRALinear(8, 6, rank=2, scale=0.5)
    x = torch.randn(3, 8)
    assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))
    layer(x).sum().backward()
    assert [n for n, p in layer.named_parameters() if p.grad is not None] == ["a", "b"]
    assert repr(layer) == (
        "LoRALinear(in_features=8, out_features=6, bias=True, rank=2, scale=0.5)"
    )
