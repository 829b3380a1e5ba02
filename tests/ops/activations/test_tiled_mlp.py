"""tiled_mlp against float64, and against the MLP of models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import Tensor, nn

import liger_ops
import op_checks
import strategies
from called_ops import saved_bytes
from liger_ops import library
from op_checks import as_tuple, run_kernel, widened
from op_table import OPS
from op_under_test import EVERY_FOLDER

OP = OPS["tiled_mlp_forward"]
ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}


def assert_close(found: Tensor, truth: Tensor, terms: float, roundings: int) -> None:
    """`terms` bounds the sum of a result's terms, each of which is rounded so many times."""
    if truth.numel():
        error = float((found.double() - truth).abs().max())
        assert error <= terms * roundings * torch.finfo(found.dtype).eps


@pytest.mark.device_kernels
@EVERY_FOLDER
@settings(max_examples=settings().max_examples // 2)
@given(case=strategies.cases(OP))
def test_kernels_match_float64(folder: str, case: Any) -> None:
    """Every intermediate and, on a CPU, every tile's product is rounded to the dtype."""
    tensors = OP.tensors(case)
    for backward, arguments in ((False, OP.forward_args), (True, OP.backward_args)):
        args = arguments(case, tensors)
        before = op_checks.clones(args)
        found = run_kernel(OP, folder, backward, case, args)
        op_checks.assert_unchanged(args, before)
        op_checks.assert_allocated_as_meta(OP, backward, args, found)
        name = OP.backward_name if backward else OP.name
        truths = as_tuple(library.OPS[name].definition(*widened(args)))
        largest = absolute(case, tensors, backward)
        for value, truth, terms in zip(found, truths, largest, strict=True):
            assert (value is None) == (truth is None)
            if value is not None and truth is not None:
                assert_close(value, truth, terms, 16)


def absolute(case: Any, tensors: dict[str, Any], backward: bool) -> list[float]:
    """The largest of each result of the same sums without signs; |silu| and |gelu|, and their
    slopes, are at most |z| + 1."""
    given = {n: None if t is None else t.double().abs() for n, t in tensors.items()}
    x, dy = (given[name].reshape(-1, given[name].shape[-1]) for name in ("x", "dy"))
    if not len(x):
        return [0.0] * 7 if backward else [0.0]
    gate = F.linear(x, given["gate_weight"], given["gate_bias"]) + 1
    up = F.linear(x, given["up_weight"], given["up_bias"])
    h = gate * up
    if not backward:
        return [float(F.linear(h, given["down_weight"], given["down_bias"]).max())]
    dh = dy @ given["down_weight"]
    # A slope's own error is as large as a gate's, of 1.1 at most for each of these activations.
    dgate, dup = dh * up * (1 + gate), dh * gate
    dx = dgate @ given["gate_weight"] + dup @ given["up_weight"]
    products = (dgate.t() @ x, dup.t() @ x, dy.t() @ h)
    return [float(r.max()) for r in (dx, *products, dgate.sum(0), dup.sum(0), dy.sum(0))]


@pytest.mark.device_kernels
@EVERY_FOLDER
def test_the_number_of_tiles_changes_only_roundings(folder: str) -> None:
    case = OP.case(shape=(300, 20), intermediate=33, dtype=torch.float32, tile_rows=None)
    tensors = OP.tensors(case)
    for backward, arguments in ((False, OP.forward_args), (True, OP.backward_args)):
        one, several = (
            run_kernel(OP, folder, backward, c, arguments(c, tensors))
            for c in (case, replace(case, tile_rows=128))
        )
        for a, b in zip(one, several, strict=True):
            torch.testing.assert_close(a, b)


@EVERY_FOLDER
def test_weights_gradients_are_summed_in_float32(folder: str) -> None:
    """In bfloat16 each of the later tiles' ones would be rounded away beside 512."""
    case = OP.case(
        shape=(17, 1), intermediate=1, out=1, dtype=torch.bfloat16, bias=False, tile_rows=1
    )
    tensors = OP.tensors(case)
    tensors = {n: None if t is None else torch.ones_like(t) for n, t in tensors.items()}
    one = {**tensors, "x": tensors["x"][:1], "dy": tensors["dy"][:1].clone()}
    tensors["dy"][0] = 512
    kernel = OP.kernel(folder, backward=True)
    of_all, of_one = (kernel(*OP.backward_args(case, given))[1:4] for given in (tensors, one))
    for total, part in zip(of_all, of_one, strict=True):
        torch.testing.assert_close(total.float(), part.float() * 528, rtol=1e-2, atol=0)


@pytest.mark.parametrize("bias", (False, True))
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_is_the_mlp_of_models(activation: str, bias: bool) -> None:
    torch.manual_seed(0)
    mlp = liger_ops.nn.TiledMLP(6, 10, activation, bias, tile_rows=4)
    x = torch.randn(3, 5, 6, requires_grad=True)

    def written(x: Tensor) -> Tensor:
        return mlp.down_proj(ACTIVATIONS[activation](mlp.gate_proj(x)) * mlp.up_proj(x))

    y, expected = mlp(x), written(x)
    torch.testing.assert_close(y, expected)
    inputs, dy = [x, *mlp.parameters()], torch.randn_like(y)
    found = torch.autograd.grad(y, inputs, dy)
    torch.testing.assert_close(found, torch.autograd.grad(expected, inputs, dy))


def test_nothing_but_the_inputs_is_saved() -> None:
    mlp = liger_ops.nn.TiledMLP(6, 10, tile_rows=2)
    x = torch.randn(8, 6, requires_grad=True)
    assert saved_bytes(lambda: mlp(x), (x, *mlp.parameters())) == 0


def test_tiles_of_a_module_compile_once_without_a_break() -> None:
    """test_composed_ops.py has those of the op."""
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 6))
    module = liger_ops.nn.Tiled(inner, num_tiles=3)
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (9, 14):
            x = torch.randn(2, tokens, 6, requires_grad=True)
            y, expected = compiled(x), module(x)
            inputs = [x, *module.parameters()]
            torch.testing.assert_close(y, expected)
            torch.testing.assert_close(
                torch.autograd.grad(y.sum(), inputs), torch.autograd.grad(expected.sum(), inputs)
            )


def test_any_module_is_tiled() -> None:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 4))
    sizes: list[int] = []
    inner.register_forward_pre_hook(lambda module, args: sizes.append(len(args[0])))
    tiled = liger_ops.nn.Tiled(inner, num_tiles=4)
    x = torch.randn(3, 7, 6, requires_grad=True)
    y, inputs, dy = tiled(x), [x, *inner.parameters()], torch.randn(3, 7, 4)
    assert sizes == [5, 5, 5, 6]
    found = torch.autograd.grad(y, inputs, dy)
    # Each tile is computed again.
    assert len(sizes) == 8
    torch.testing.assert_close(y, inner(x))
    torch.testing.assert_close(found, torch.autograd.grad(inner(x), inputs, dy))
    assert tiled(x[:0]).shape == (0, 7, 4)
    with pytest.raises(ValueError, match="^Tiled: num_tiles must be at least 1, got 0"):
        liger_ops.nn.Tiled(inner, 0)


def test_module_refuses_what_it_would_not_call() -> None:
    mlp = liger_ops.nn.TiledMLP(6, 10)
    assert "activation='silu', tile_rows=None" in repr(mlp)
    mlp.up_proj = nn.Sequential(mlp.up_proj)
    with pytest.raises(TypeError, match="^TiledMLP: up_proj must be a torch.nn.Linear, got a Seq"):
        mlp(torch.zeros(2, 6))
