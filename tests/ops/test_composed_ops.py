"""Ops that are made of others: one node in a graph, and their derivatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from graphs import Recorder, liger_ops_of
from liger_ops import library
from op_table import OPS
from op_under_test import OpUnderTest, public

# Their arguments are not those of the op that an entry describes.
OTHER_ARGUMENTS = ("router_losses", "linear_top_k_divergence")
ENTRIES = [op for op in OPS.values() if op.base in set(library.COMPOSED) - set(OTHER_ARGUMENTS)]
COMPOSED = pytest.mark.parametrize("op", ENTRIES, ids=repr)


Given = dict[str, Any]


def call_of(op: OpUnderTest, options: Given, names: list[str]) -> Callable[..., Any]:
    """The composed op as a function of tensors, which returns its results."""
    composed = getattr(torch.ops.liger, op.base)

    def call(*tensors: Tensor) -> tuple[Tensor, ...]:
        results = composed(**options, **dict(zip(names, tensors, strict=True)))
        results = results if isinstance(results, tuple) else (results,)
        return tuple(y for y in results if y is not None)

    return call


def parts(given: Given, is_wanted: Callable[[Any], bool]) -> tuple[Given, Given]:
    wanted = {name: value for name, value in given.items() if is_wanted(value)}
    return wanted, {name: value for name, value in given.items() if name not in wanted}


def has_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


@COMPOSED
def test_one_node_whose_part_is_compiled_once(op: OpUnderTest) -> None:
    seen: set[str] = set()
    recorder = Recorder()

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        seen.update(str(node.target) for node in graph.graph.nodes if "liger" in str(node.target))
        return recorder.backend()(graph, inputs)

    given = [op.public_arguments(op.sample(torch.float32, rows=rows)) for rows in (3, 5)]
    few, many = (parts(each, lambda value: isinstance(value, Tensor)) for each in given)
    model = call_of(op, few[1], list(few[0]))
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=backend)
    for tensors, _ in (few, many):
        leaves = list(filter(has_gradient, tensors.values()))
        ways = [way(*tensors.values()) for way in (compiled, model)]
        torch.testing.assert_close(*ways)
        sums = [sum(y.square().sum() for y in results) for results in ways]
        torch.testing.assert_close(*(torch.autograd.grad(y, leaves) for y in sums))
    assert seen == {f"liger.{op.base}"}
    assert liger_ops_of(recorder.forwards) == {op.name: 1}
    assert liger_ops_of(recorder.backwards) == {op.backward_name: 1}


@COMPOSED
def test_derivatives_in_every_mode(op: OpUnderTest) -> None:
    """Reverse and forward mode, second derivatives, and a batch of gradients."""
    leaves, others = parts(op.public_arguments(op.sample(rows=2)), has_gradient)
    whole, tensors = call_of(op, others, list(leaves)), tuple(leaves.values())
    call = lambda *given: op.exact(whole(*given))
    torch.autograd.gradcheck(call, tensors, fast_mode=True, check_forward_ad=True)
    torch.autograd.gradgradcheck(call, tensors, fast_mode=True)
    total = lambda *given: sum(y.square().sum() for y in call(*given))
    one, *rest = (tensor.detach() for tensor in tensors)
    gradient = torch.func.grad(total)
    found = torch.vmap(lambda x: gradient(x, *rest))(torch.stack([one, 2 * one]))
    torch.testing.assert_close(found, torch.stack([gradient(x, *rest) for x in (one, 2 * one)]))


def results_and_gradients(call: Callable[..., Any], given: Given) -> list[Tensor]:
    results = call(**given)
    results = [y for y in (results if isinstance(results, tuple) else (results,)) if y is not None]
    leaves = list(filter(has_gradient, given.values()))
    return [*results, *torch.autograd.grad(sum(y.square().sum() for y in results), leaves)]


def casts(op: OpUnderTest) -> bool:
    # Scores stay in float32 below multi_token_attention's softmax, which has a test of its own.
    return op.base != "multi_token_attention" and op.has_autocast_rule("AutocastCPU")


@pytest.mark.parametrize("op", [*filter(casts, ENTRIES)], ids=repr)
def test_autocast_casts_as_a_caller_would(op: OpUnderTest) -> None:
    """Results and gradients are bitwise those of tensors that are cast before. Nothing inside the
    op is cast again, in particular not the float32 sums of the chunks."""
    call, given = public(op.base), op.public_arguments(op.sample(torch.float32))

    def cast(name: str, value: Any) -> Any:
        is_cast = isinstance(value, Tensor) and value.is_floating_point()
        return value.bfloat16() if is_cast and name not in op.autocast_keeps else value

    expected = results_and_gradients(
        lambda **given: call(**{name: cast(name, value) for name, value in given.items()}), given
    )
    torch._dynamo.reset()
    for run in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        with torch.autocast("cpu", torch.bfloat16):
            found = results_and_gradients(run, given)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    # Neither float64 nor the arguments of the forward itself are cast.
    wide, case = op.public_arguments(op.sample()), op.sample(torch.float32)
    args = op.forward_args(case, op.tensors(case))
    with torch.autocast("cpu", torch.bfloat16):
        results = call(**wide), op.overload()(*args)
    torch.testing.assert_close(results, (call(**wide), op.overload()(*args)), rtol=0, atol=0)
