"""moe_experts against a loop over tokens and experts, and the experts of transformers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from torch import Tensor

import liger_ops
import strategies
from called_ops import saved_bytes
from expert_cases import OPTIONS
from liger_ops import library
from op_table import OPS
from op_under_test import DEVICE, EVERY_FOLDER

OP = OPS["moe_experts_forward"]
ARGUMENTS = OP.tensor_arguments


def adapted(case: Any, given: dict[str, Any], name: str, e: int) -> Tensor:
    """An expert's weight with its LoRA."""
    weight, a, b = (given[f"{name}{part}"] for part in ("", "_lora_a", "_lora_b"))
    return weight[e] if a is None else weight[e] + getattr(case, f"{name}_lora_scale") * b[e] @ a[e]


def of_token(case: Any, given: dict[str, Any], t: int) -> Tensor:
    """The experts of a token, one after the other."""
    y = torch.zeros(case.shape[1], dtype=torch.float64)
    for k, e in enumerate(given["top_k_index"][t].tolist()):
        if not 0 <= e < case.experts:
            continue
        h = adapted(case, given, "gate_up", e) @ given["x"][t]
        if case.bias:
            h = h + given["gate_up_bias"][e]
        if case.activation == "relu_squared":
            a = h.relu() ** 2
        else:
            gate, up = (h[::2], h[1::2]) if case.interleaved else h.chunk(2)
            if case.activation == "clamped_swiglu":
                gate, up = gate.clamp(max=case.limit), up.clamp(-case.limit, case.limit)
                a = gate * torch.sigmoid(case.alpha * gate) * (up + case.up_offset)
            else:
                tanh = {"gelu": "none", "gelu_tanh": "tanh"}.get(case.activation)
                a = (F.silu(gate) if tanh is None else F.gelu(gate, approximate=tanh)) * up
        result = adapted(case, given, "down", e) @ a
        if case.bias:
            result = result + given["down_bias"][e]
        y = y + given["top_k_weights"][t, k] * result
    return y


@given(case=strategies.cases(OP, dtype=(torch.float64,)))
def test_a_loop_over_tokens_has_the_same_values_and_gradients(case: Any) -> None:
    """In float64, with every routing, option and subset of gradients."""
    drawn = OP.tensors(case)
    inputs = {name: drawn[name] for name in ARGUMENTS}
    inputs = {
        name: value.double().cpu() if value is not None and value.is_floating_point() else value
        for name, value in inputs.items()
    }
    leaves = [inputs[name] for name in OP.gradients_of if inputs[name] is not None]
    for leaf in leaves:
        leaf.requires_grad_()
    options = {name: getattr(case, name) for name in OPTIONS}
    y = liger_ops.moe_experts(**inputs, **options, recompute=not case.return_pre_activation)
    expected = [of_token(case, inputs, t) for t in range(case.shape[0])]
    dy = drawn["dy"].double().cpu()
    found = torch.autograd.grad(y, leaves, dy)
    if not expected:
        assert all(not gradient.any() for gradient in found)
        return
    torch.testing.assert_close(y, torch.stack(expected))
    if case.routing == "nobody":
        assert all(not gradient.any() for gradient in found)
        return
    truths = torch.autograd.grad(torch.stack(expected), leaves, dy, allow_unused=True)
    for gradient, truth in zip(found, truths, strict=True):
        torch.testing.assert_close(gradient, torch.zeros_like(gradient) if truth is None else truth)


@pytest.mark.device_kernels
@EVERY_FOLDER
@given(case=strategies.cases(OP))
@example(case=replace(OP.sample(torch.float32), shape=(0, 1)))
def test_the_order_is_stable_and_that_of_the_definition(folder: str, case: Any) -> None:
    args = OP.forward_args(case, OP.tensors(case))
    # A GPU's second call is recorded, and its third is replayed.
    for kernel in (OP.kernel(folder),) * 3:
        _, order, offsets, _ = kernel(*args)
        _, expected, ends, _ = OP.definition(*args)
        assert torch.equal(order, expected) and torch.equal(offsets, ends)


@pytest.mark.device_kernels
@EVERY_FOLDER
@pytest.mark.parametrize("n", (255, 256, 257, 700))
def test_the_order_of_several_chunks_and_many_experts(folder: str, n: int) -> None:
    index = torch.randint(-1, 301, (n, 1), generator=torch.Generator().manual_seed(n)).to(DEVICE)
    x, weights = torch.ones(n, 1, device=DEVICE), torch.ones(n, 1, device=DEVICE)
    gate_up, down = torch.ones(300, 2, 1, device=DEVICE), torch.ones(300, 1, 1, device=DEVICE)
    args = (x, gate_up, down, index, weights)
    results, expected = OP.kernel(folder)(*args), OP.definition(*args)
    assert all(torch.equal(a, b) for a, b in zip(results[1:3], expected[1:3], strict=True))


@pytest.mark.parametrize("transposed", (False, True))
def test_the_gradient_of_a_weight_has_its_layout(transposed: bool) -> None:
    gate_up, down = torch.randn(3, 4, 10), torch.randn(3, 5, 4)
    if not transposed:
        gate_up, down = gate_up.mT.contiguous(), down.mT.contiguous()
    for weight in (gate_up, down):
        weight.requires_grad_()
    views = (gate_up.mT, down.mT) if transposed else (gate_up, down)
    index = torch.tensor([[0, 2], [1, 1]])
    liger_ops.moe_experts(torch.randn(2, 4), *views, index, torch.rand(2, 2)).sum().backward()
    assert gate_up.grad.is_contiguous() and down.grad.is_contiguous()


def saved(recompute: bool) -> int:
    """The bytes that a call keeps beside its arguments."""
    x, index = torch.randn(6, 4, requires_grad=True), torch.zeros(6, 2, dtype=torch.int64)
    args = (x, torch.randn(3, 10, 4), torch.randn(3, 4, 5), index, torch.rand(6, 2))
    return saved_bytes(lambda: liger_ops.moe_experts(*args, recompute=recompute), args)


def test_what_is_saved() -> None:
    """A number of 4 bytes for each row, the experts' ends and, without `recompute`, h."""
    assert saved(recompute=True) == 4 * 12 + 4 * 4
    assert saved(recompute=False) == saved(recompute=True) + 12 * 10 * 4


def test_no_zeros_are_made_for_results_without_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    op, given = library.OPS["moe_experts_forward"], []
    backward = op.backward

    def noted(ctx: Any, *grads: Tensor | None) -> Any:
        given.append([grad is not None for grad in grads])
        return backward(ctx, *grads)

    monkeypatch.setattr(op, "backward", noted)
    x, index = torch.randn(2, 4, requires_grad=True), torch.tensor([[0], [2]])
    args = (torch.randn(3, 10, 4), torch.randn(3, 4, 5), index, torch.rand(2, 1))
    liger_ops.moe_experts(x, *args).sum().backward()
    assert given == [[True, False, False, False]]


def test_no_pre_activation_is_made_where_no_gradient_is_needed() -> None:
    calls = []
    op = library.OPS["moe_experts_forward"]
    definition = op.definition
    args = (torch.randn(2, 4), torch.randn(3, 10, 4), torch.randn(3, 4, 5))
    index, weights = torch.tensor([[0], [2]]), torch.rand(2, 1)

    def noted(*given: Any) -> Any:
        calls.append(op.arguments(*given).return_pre_activation)
        return definition(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(op, "definition", noted)
        liger_ops.moe_experts(*args, index, weights)
        liger_ops.moe_experts(args[0].requires_grad_(), *args[1:], index, weights)
    assert calls == [False, True]


@pytest.mark.device_kernels
@EVERY_FOLDER
@pytest.mark.parametrize("bias", (False, True))
def test_the_gradients_of_weights_of_the_router(folder: str, bias: bool) -> None:
    """A sentinel's is 0, whatever is in its row of h. That of a bias is a sum in float32."""
    case = OP.case(
        shape=(33, 64), dtype=torch.bfloat16, router_dtype=torch.float32, width=16, experts=5,
        routing="sentinels", bias=bias, loras=(), return_pre_activation=True,
        output_mask=[False, False, False, True, *[False] * 6],
    )  # fmt: skip
    given = OP.tensors(case)
    given["down"] = torch.zeros_like(given["down"])
    given["pre_activation"][int(given["offsets"][-1]) :] = float("nan")
    ids, dy = given["top_k_index"].long(), given["dy"].double()
    exists = (ids >= 0) & (ids < case.experts)
    expected = torch.zeros(ids.shape, dtype=torch.float64, device=DEVICE)
    if bias:
        products = dy @ given["down_bias"].double().t()
        expected = products.gather(1, ids.where(exists, 0)).where(exists, 0.0)
    args = OP.backward_args(case, given)
    definition = library.OPS["moe_experts_backward"].definition
    for backward in (definition, OP.kernel(folder, backward=True)):
        with torch.no_grad():
            found = backward(*args)[3]
        assert not found[~exists].any() and found.isfinite().all()
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.device_kernels
@EVERY_FOLDER
def test_a_dropped_token_does_not_hear_of_its_weight(folder: str) -> None:
    index, weights = torch.tensor([[0, 3]]), torch.tensor([[1.0, float("nan")]])
    x, gate_up, down = torch.ones(1, 4), torch.ones(3, 2, 4), torch.ones(3, 4, 1)
    args = [tensor.to(DEVICE) for tensor in (x, gate_up, down, index, weights)]
    for forward in (OP.definition, OP.kernel(folder)):
        assert forward(*args)[0].isfinite().all()
