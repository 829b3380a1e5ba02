"""Tests of properties that every op has."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.fx_passes.post_grad import pass_patterns
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils.flop_counter import FlopCounterMode

from graphs import Recorder, liger_ops_of
from liger_ops import inductor, library
from liger_ops.axes import MANY, lines
from liger_ops.decompositions import definitions
from op_checks import (
    as_tuple,
    assert_backward_matches_truth,
    assert_forward_matches_truth,
    assert_own_memory,
)
from op_table import OPS
from op_under_test import DY_LAYOUTS, FOLDERS, X_LAYOUTS, Case, OpUnderTest, nothing, public

EVERY_OP = pytest.mark.parametrize("op", OPS.values(), ids=OPS.keys())
# One form of each op, for what its schemas and its registration decide.
ONE_FORM = pytest.mark.parametrize("op", {op.name: op for op in OPS.values()}.values(), ids=repr)


class Slot:
    """The position of a tensor among the arguments of a call."""


SLOT = Slot()


def form(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments with a slot for each tensor, for `with_leaves` to fill."""
    return tuple(SLOT if isinstance(arg, Tensor) else arg for arg in args)


def leaves(args: tuple[Any, ...]) -> list[Tensor]:
    return [arg for arg in args if isinstance(arg, Tensor)]


def with_leaves(slots: tuple[Any, ...], tensors: tuple[Tensor, ...]) -> tuple[Any, ...]:
    given = iter(tensors)
    return tuple(next(given) if isinstance(arg, Slot) else arg for arg in slots)


def differentiable(op: OpUnderTest, case: Case) -> tuple[tuple[Any, ...], tuple[Tensor, ...]]:
    """The arguments of a case, and its tensors; those with a gradient require it."""
    args = op.forward_args(case, op.tensors(case))
    return requiring(args, [op.has_gradient(i) for i in range(len(args))])


def requiring(
    args: tuple[Any, ...], needed: Iterable[bool]
) -> tuple[tuple[Any, ...], tuple[Tensor, ...]]:
    """Copies of the arguments; those marked in `needed` require a gradient."""
    args = tuple(
        arg.clone().requires_grad_(wanted) if isinstance(arg, Tensor) else arg
        for arg, wanted in zip(args, needed, strict=True)
    )
    return args, tuple(leaves(args))


def required(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor.requires_grad]


def as_function(
    op: OpUnderTest, call: Callable[..., Any], args: tuple[Any, ...]
) -> Callable[..., tuple[Tensor, ...]]:
    """The call as a function of its tensors alone, which returns the outputs to differentiate."""
    return lambda *tensors: op.exact(call(*with_leaves(form(args), tensors)))


def opcheck(overload: Any, args: tuple[Any, ...], layout: str) -> None:
    """All of opcheck for one layout; for the others what strides can change."""
    some = {} if layout == "transposed" else {"test_utils": ("test_schema", "test_faketensor")}
    torch.library.opcheck(overload, args, **some)


@EVERY_OP
@pytest.mark.parametrize("layout", X_LAYOUTS)
def test_opcheck_forward(op: OpUnderTest, layout: str) -> None:
    case = op.sample(torch.float32, layout=layout)
    args = op.forward_args(case, op.tensors(case))
    opcheck(op.overload(), args, "without a gradient")
    for i, arg in enumerate(args):
        if isinstance(arg, Tensor) and op.has_gradient(i):
            arg.requires_grad_()
    opcheck(op.overload(), args, layout)


@EVERY_OP
@pytest.mark.parametrize("dy_layout", DY_LAYOUTS)
def test_opcheck_backward(op: OpUnderTest, dy_layout: str) -> None:
    case = op.sample(torch.float32, layout="transposed", dy_layout=dy_layout)
    args = op.backward_args(case, op.tensors(case))
    opcheck(op.overload(backward=True), args, dy_layout)


@ONE_FORM
def test_opcheck_of_the_defaults(op: OpUnderTest) -> None:
    """The dispatcher drops arguments equal to their default; the gradient must account for them."""
    case = op.sample(torch.float32)
    given = [
        argument for argument in op.overload()._schema.arguments if not argument.has_default_value()
    ]
    args = op.forward_args(case, op.tensors(case))[: max(len(given), op.needed)]
    for i, arg in enumerate(args):
        if isinstance(arg, Tensor) and op.has_gradient(i):
            arg.requires_grad_()
    torch.library.opcheck(op.overload(), args)


@ONE_FORM
@pytest.mark.parametrize("backward", [False, True])
def test_flops_are_those_of_the_products_of_the_definition(op: OpUnderTest, backward: bool) -> None:
    case = op.sample(torch.float32)
    args = (op.backward_args if backward else op.forward_args)(case, op.tensors(case))
    overload = op.overload(backward=backward)
    with FlopCounterMode(display=False) as counted:
        overload(*args)
    record = library.OPS[overload._opname]
    if record.flops is not None:
        assert counted.get_total_flops() == record.flops(record.arguments(*args)) > 0
        return
    with FlopCounterMode(display=False) as expected:
        record.definition(*args)
    assert counted.get_total_flops() == expected.get_total_flops()


@ONE_FORM
@pytest.mark.parametrize("backward", [False, True])
def test_decomposition_is_functional_and_of_any_size(op: OpUnderTest, backward: bool) -> None:
    few, many = (
        (op.backward_args if backward else op.forward_args)(case, op.tensors(case))
        for case in (op.sample(rows=rows) for rows in (5, 7))
    )
    overload = op.overload(backward=backward)
    call = lambda *tensors: overload(*with_leaves(form(few), tensors))
    # test_one_dynamic_compilation has symbols in the definitions that Inductor compiles.
    symbolic = is_chunked(op) or op.name == "moe_experts_forward"
    mode = "symbolic" if symbolic else "fake"
    traced = make_fx(call, definitions(), tracing_mode=mode)(*leaves(few))
    for node in traced.graph.nodes:
        assert not node.name.startswith("liger")
        assert not getattr(node.target, "_schema", overload._schema).is_mutable, node
    for args in (few, many) if symbolic else (few,):
        torch.testing.assert_close(traced(*leaves(args)), overload(*args))


@EVERY_OP
@pytest.mark.device_kernels
@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.quick("op", "folder")
def test_kernels_match_truth(op: OpUnderTest, folder: str) -> None:
    """The results are in memory of their own, too, which no run-time check covers. Other cases and
    dtypes are those of test_kernels.py."""
    case = op.sample(torch.float32 if op.output_magnitudes is nothing else torch.bfloat16)
    tensors = op.tensors(case)
    if op.output_magnitudes is not nothing:
        assert_forward_matches_truth(op, folder, case)
        assert_backward_matches_truth(op, folder, case)
        return
    # The ops of heads have bounds of their own, which their own tests derive.
    for backward, arguments in ((False, op.forward_args), (True, op.backward_args)):
        args = arguments(case, tensors)
        outputs = as_tuple(op.kernel(folder, backward)(*args))
        assert_own_memory(args, outputs)
        record = library.OPS[op.backward_name if backward else op.name]
        torch.testing.assert_close(outputs, as_tuple(record.definition(*args)))


def test_an_output_that_is_not_of_its_own_is_found() -> None:
    x = torch.randn(4, 4)
    y = x.clone()
    assert_own_memory((x, 1e-6), (y, None))
    for outputs in ((x,), (x[1:],), (y, y.view(-1))):
        with pytest.raises(AssertionError, match="memory of its own"):
            assert_own_memory((x, 1e-6), outputs)


@EVERY_OP
@pytest.mark.quick("op", path="definition")
def test_gradcheck(op: OpUnderTest) -> None:
    args, tensors = differentiable(op, op.sample(rows=2))
    assert torch.autograd.gradcheck(as_function(op, op.overload(), args), tensors)


@EVERY_OP
def test_double_backward(op: OpUnderTest) -> None:
    """Along random directions; test_gradcheck looks at every element."""
    args, tensors = differentiable(op, op.sample(rows=2))
    call = as_function(op, op.overload(), args)
    assert torch.autograd.gradgradcheck(call, tensors, fast_mode=True)


@EVERY_OP
def test_backward_within_inference_mode_and_vmap(op: OpUnderTest) -> None:
    """A definition that autograd derives works where autograd is off, and leaves no graph."""
    case = op.sample()
    args = op.backward_args(case, op.tensors(case))
    first = next(i for i, arg in enumerate(args) if isinstance(arg, Tensor))

    def call(*given: Any) -> list[Tensor]:
        outputs = as_tuple(op.overload(backward=True)(*given))
        return [output for output in outputs if output is not None]

    expected = call(*args)
    with torch.inference_mode():
        inferred = call(*(arg.clone() if isinstance(arg, Tensor) else arg for arg in args))
    double = torch.stack([args[first], 2 * args[first]])
    batched = torch.vmap(lambda dy: call(*args[:first], dy, *args[first + 1 :]))(double)
    for value, own, both in zip(expected, inferred, batched, strict=True):
        assert not value.requires_grad
        torch.testing.assert_close((own, both[0]), (value, value))


@EVERY_OP
def test_gradient_present_exactly_when_required(op: OpUnderTest) -> None:
    case = op.sample()
    args = op.forward_args(case, op.tensors(case))
    full_args, full = differentiable(op, case)
    sum(output.sum() for output in op.results(op.overload()(*full_args))).backward()
    choices = [
        (False, True) if isinstance(arg, Tensor) and op.has_gradient(i) else (False,)
        for i, arg in enumerate(args)
    ]
    for needed in itertools.product(*choices):
        given, tensors = requiring(args, needed)
        outputs = op.results(op.overload()(*given))
        assert all(output.requires_grad == any(needed) for output in outputs)
        if any(needed):
            sum(output.sum() for output in outputs).backward()
        for tensor, reference in zip(tensors, full, strict=True):
            assert (tensor.grad is not None) == tensor.requires_grad
            if tensor.requires_grad:
                torch.testing.assert_close(tensor.grad, reference.grad)


@ONE_FORM
def test_results_may_be_written_in_place(op: OpUnderTest) -> None:
    """Autograd refuses to write to one of several views, as which a definition may make them."""
    args, _ = differentiable(op, op.sample(torch.float32))
    for output in op.results(op.overload()(*args)):
        output.mul_(2.0)


@ONE_FORM
def test_backward_twice_is_bitwise_equal(op: OpUnderTest) -> None:
    """The first backward does not write to saved tensors."""
    args, tensors = differentiable(op, op.sample(torch.float32))
    outputs = op.results(op.overload()(*args))
    loss = sum(output.square().sum() for output in outputs)
    first = torch.autograd.grad(loss, required(tensors), retain_graph=True)
    second = torch.autograd.grad(loss, required(tensors))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@ONE_FORM
def test_saves_nothing_but_tensors_that_exist_anyway(op: OpUnderTest) -> None:
    args, tensors = differentiable(op, op.sample(torch.float32))
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        outputs = as_tuple(op.overload()(*args))
    existing = {tensor.data_ptr() for tensor in leaves((*tensors, *outputs))}
    assert {tensor.data_ptr() for tensor in saved} <= existing


def is_chunked(op: OpUnderTest) -> bool:
    return op.name.startswith(("linear_", "tiled_"))


@mock.patch.object(inductor, "MOST_NODES", 10_000)
def compile_dynamically(op: OpUnderTest, recorder: Recorder, sizes: tuple[int, ...]) -> None:
    """Compare what is compiled with eager, forward and backward, at these batch sizes."""
    samples = [op.sample(torch.float32, rows=rows) for rows in sizes]
    slots = form(op.forward_args(samples[0], op.tensors(samples[0])))

    def model(*tensors: Tensor) -> tuple[Tensor, ...]:
        tensors = (tensors[0] * 2, *tensors[1:])
        return tuple(out + 1 for out in op.results(op.overload()(*with_leaves(slots, tensors))))

    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=recorder.backend())
    for case in samples:
        _, tensors = differentiable(op, case)
        expected = model(*tensors)
        outputs = compiled(*tensors)
        weights = [torch.randn_like(output) for output in outputs]
        grads = torch.autograd.grad(outputs, required(tensors), weights)
        expected_grads = torch.autograd.grad(expected, required(tensors), weights)
        torch.testing.assert_close((*outputs, *grads), (*expected, *expected_grads))


@EVERY_OP
def test_one_dynamic_compilation(op: OpUnderTest) -> None:
    """Two batch sizes give one compilation; each op is in the graph once, whole. On a device
    without kernels Inductor is given the operators of its definition, and the results are eager's.
    """
    recorder = Recorder() if is_chunked(op) else Recorder(pass_patterns[0].apply)
    compile_dynamically(op, recorder, (3, 5))
    assert len(recorder.forwards) == len(recorder.backwards) == 1
    assert recorder.ops == [Counter([op.name]), Counter([op.backward_name])]
    if not is_chunked(op):
        assert_definition(op, recorder)


@pytest.mark.parametrize("op", list(filter(is_chunked, OPS.values())), ids=repr)
def test_inductor_compiles_the_chunks_of_a_definition(op: OpUnderTest) -> None:
    """There is another number of them at each size, and another compilation."""
    recorder = Recorder(pass_patterns[0].apply)
    compile_dynamically(op, recorder, (2,))
    assert_definition(op, recorder)


def assert_definition(op: OpUnderTest, recorder: Recorder) -> None:
    # Inductor compiles nothing that is complex, and experts read their numbers of tokens.
    kept = op.id == "rope-complex" or op.name == "moe_experts_forward"
    assert liger_ops_of(recorder.forwards) == Counter([op.name] * kept)


def test_inductor_calls_every_op() -> None:
    """Compile one function with all ops by Inductor, each in one form, at two sizes: as they are
    where they have kernels.

    The losses are outside of it: the kernels that Inductor would make for them take a minute of
    C++ to compile.
    """
    forms = []
    for op in {op.name: op for op in OPS.values()}.values():
        case = op.sample(torch.float32)
        forms.append((op, form(op.forward_args(case, op.tensors(case)))))

    def model(*groups: tuple[Tensor, ...]) -> list[Tensor]:
        return [
            output
            for (op, slots), tensors in zip(forms, groups, strict=True)
            for output in op.results(op.overload()(*with_leaves(slots, tensors)))
        ]

    few, many = (
        [differentiable(op, op.sample(torch.float32, rows=rows))[1] for op, _ in forms]
        for rows in (3, 5)
    )
    for a, b in zip(itertools.chain(*few), itertools.chain(*many), strict=True):
        for dim in range(a.dim()):
            if a.shape[dim] != b.shape[dim]:
                torch._dynamo.maybe_mark_dynamic(a, dim)
    torch._dynamo.reset()
    counters.clear()
    options = {"pattern_matcher": False}
    compiled = torch.compile(model, fullgraph=True, options=options)
    for groups in (few, many):
        tensors = required(tensor for group in groups for tensor in group)
        expected, actual = model(*groups), compiled(*groups)
        torch.testing.assert_close(actual, expected)
        losses = [sum((y * 2).square().sum() for y in outputs) for outputs in (actual, expected)]
        gradients = [torch.autograd.grad(loss, tensors) for loss in losses]
        torch.testing.assert_close(*gradients)
    assert counters["stats"]["unique_graphs"] == 1


@EVERY_OP
def test_transforms_are_those_of_the_definition(op: OpUnderTest) -> None:
    args, tensors = differentiable(op, op.sample(rows=2))
    slots = tuple(
        SLOT if isinstance(arg, Tensor) and op.has_gradient(i) else arg
        for i, arg in enumerate(args)
    )
    tensors = tuple(tensor.detach() for tensor in required(tensors))
    f, definition = (
        lambda *given, call=call: sum(
            (out.pow(3)).sum() for out in op.results(call(*with_leaves(slots, given)))
        )
        for call in (op.overload(), op.definition)
    )
    every = tuple(range(len(tensors)))
    compare = torch.testing.assert_close
    compare(torch.func.grad(f, every)(*tensors), torch.func.grad(definition, every)(*tensors))
    tangents = tuple(torch.randn_like(tensor) for tensor in tensors)
    true = torch.func.jvp(definition, tensors, tangents)
    assert true[1] != 0
    compare(torch.func.jvp(f, tensors, tangents), true)
    # Differentiate by the first tensor only: no argument of jacfwd may be complex.
    hessian, expected = (
        torch.func.hessian(lambda x, g=g: g(x, *tensors[1:]))(tensors[0]) for g in (f, definition)
    )
    compare(hessian, expected)
    batch = torch.stack([tensors[0], tensors[0] * 2, tensors[0] - 1])
    in_dims = (0, *(None for _ in tensors[1:]))
    for transformed in (torch.vmap, lambda g, dims: torch.vmap(torch.func.grad(g), dims)):
        compare(
            transformed(f, in_dims)(batch, *tensors[1:]),
            transformed(definition, in_dims)(batch, *tensors[1:]),
        )
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(tensors[0], tangents[0])
        tangent = forward_ad.unpack_dual(f(dual, *tensors[1:])).tangent
        expected = forward_ad.unpack_dual(definition(dual, *tensors[1:])).tangent
        compare(tangent, expected)


@ONE_FORM
def test_wrong_types_name_the_op_and_the_argument(op: OpUnderTest) -> None:
    call = public(op.name)
    first = op.overload()._schema.arguments[0].name
    with pytest.raises(TypeError, match=rf"{op.name}.*'{first}'.*list"):
        call([1.0, 2.0])
    with pytest.raises(TypeError, match=rf"{op.name}.*missing.*'{first}'"):
        call()


def refusals(op: OpUnderTest, backward: bool, given: tuple[Any, ...]) -> set[str]:
    """The messages for arguments that an op must refuse: in a call, and while it is traced."""
    with pytest.raises(TypeError) as eager:
        op.overload(backward)(*given)
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with mode, pytest.raises(TypeError) as traced:
        fakes = [mode.from_tensor(g) if isinstance(g, Tensor) else g for g in given]
        op.overload(backward)(*fakes)
    return {str(eager.value), str(traced.value)}


@ONE_FORM
@pytest.mark.parametrize("backward", (False, True))
def test_what_no_op_takes_is_refused(op: OpUnderTest, backward: bool) -> None:
    """None for a required tensor, and a nested or sparse tensor in each position."""
    case = op.sample(torch.float32)
    args = (op.backward_args if backward else op.forward_args)(case, op.tensors(case))
    name = (op.backward_name if backward else op.name).removesuffix("_forward")
    others = (
        torch.nested.nested_tensor([torch.randn(2, 8), torch.randn(3, 8)], layout=torch.jagged),
        torch.randn(2, 8).to_sparse(),
    )
    for i, (argument, arg) in enumerate(
        zip(op.overload(backward)._schema.arguments, args, strict=False)
    ):
        if not isinstance(arg, Tensor):
            continue
        said = refusals(op, backward, (*args[:i], others[i % 2], *args[i + 1 :]))
        must = f"{name}: {argument.name} must be a dense tensor, of layout torch.strided, got a "
        assert len(said) == 1 and said.pop().startswith(must)
        if str(argument.type) == "Tensor":
            given = (*args[:i], None, *args[i + 1 :])
            message = f"{name}: {argument.name} must be a tensor, got None"
            assert refusals(op, backward, given) == {message}
            for run in library.OPS[op.backward_name if backward else op.name].entries.values():
                with pytest.raises(TypeError, match=message):
                    run(*given)


@EVERY_OP
def test_every_tensor_is_checked(op: OpUnderTest) -> None:
    """Integers or bools, another device, another shape and a number are refused in each position,
    eagerly and in tracing."""
    case = op.sample(torch.float32)
    for backward in (False, True):
        args = (op.backward_args if backward else op.forward_args)(case, op.tensors(case))
        arguments = op.overload(backward)._schema.arguments
        name = op.backward_name if backward else op.name
        axes = library.declared(library.OPS[name]).axes
        for i, arg in enumerate(args):
            if not isinstance(arg, Tensor):
                continue
            is_integer = not (
                arg.is_floating_point() or arg.is_complex() or arg.dtype is torch.bool
            )
            changes = [(arg.bool() if is_integer else arg.real.long(), TypeError)]
            if len(leaves(args)) > 1:
                changes.append((arg.to("meta"), ValueError))
            if arguments[i].name not in op.leading:
                twice = torch.cat([arg, arg]) if arg.dim() else torch.stack([arg, arg])
                changes.append((twice, ValueError))
            entry = isinstance(axes, str) and lines(axes)[0].of(arguments[i].name)
            if entry and entry.reduced is None and set(entry.axes) - set(MANY):
                changes.append((arg.flatten()[0], ValueError))
            for wrong, error in changes:
                given = (*args[:i], wrong, *args[i + 1 :])
                with pytest.raises(error) as eager:
                    library.OPS[name].check_and_define(*given)
                # The op that a user calls, if it is composed of this one.
                assert str(eager.value).startswith(f"{name.removesuffix('_forward')}: ")
                if wrong.is_meta:
                    continue
                assert arguments[i].name in str(eager.value)
                with pytest.raises(error) as dispatched:
                    op.overload(backward)(*given)
                with FakeTensorMode() as mode, pytest.raises(error) as traced:
                    fakes = [mode.from_tensor(g) if isinstance(g, Tensor) else g for g in given]
                    op.overload(backward)(*fakes)
                assert str(eager.value) == str(dispatched.value) == str(traced.value)


@ONE_FORM
def test_documentation(op: OpUnderTest) -> None:
    for name in (op.name, op.backward_name):
        text = library.OPS[name].definition.__doc__
        assert all(section in text for section in ("Args:", "Returns:", "Raises:"))
    assert "Example:" in op.definition.__doc__
    assert public(op.name).__doc__ == op.definition.__doc__
