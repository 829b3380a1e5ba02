"""Autograd formulas of ops, and their kernels for the dispatch keys Autograd and Autocast."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from .record import Op
from .torch_private import (
    AUTOGRAD,
    BelowAutograd,
    after_autograd_keyset,
    any_requires_grad,
    are_functorch_transforms_active,
    has,
    without_dynamo,
)


def _nothing() -> object:
    return None


# Called before a tensor subclass or a mode handles an op. `distributed` puts a function here that
# registers the rules of DTensor at the first such call, as DTensor takes 0.7 s to import. It
# returns whether anything was registered.
before_subclasses: Callable[[], object] = _nothing


class Formula:
    """An op's autograd formula, derived from the schema of its backward op.

    The first arguments of the backward op are the gradients of the op's first results, each named
    "d" and the result's name; the op's other results are not differentiable. If these arguments
    may be None, a result without a gradient passes None, and otherwise zeros. The further arguments
    have the names of the op's arguments and results, whose values the forward saves, and
    `output_mask` says for each result of the backward op whether it is needed.

    A result of the backward op is the gradient of the argument that it names after "d". If the
    results have no names, they are the gradients of the first tensor arguments, in order. No other
    tensor argument may require a gradient.
    """

    def __init__(self, op: Op, gradient: Op) -> None:
        self.gradient = gradient
        inputs = [argument.name for argument in op.schema.arguments]
        tensors = [i for i, a in enumerate(op.schema.arguments) if "Tensor" in str(a.type)]
        names = [argument.name for argument in gradient.schema.arguments]
        results = [result.name for result in op.schema.returns]
        if not all(results):
            results = [name.removeprefix("d") for name in names[: len(results)]]
        self.results = results
        self.count = sum(f"d{result}" in names for result in results)
        # With zeros, autograd would also allocate them for every result that is not differentiable.
        is_one_of_several = self.count == 1 and len(results) > 1
        self.may_be_none = is_one_of_several or str(gradient.schema.arguments[0].type) != "Tensor"
        saved = [a for a in gradient.schema.arguments[self.count :] if a.name != "output_mask"]
        # Tensors first, for `save`; the sort is stable.
        saved.sort(key=lambda argument: "Tensor" not in str(argument.type))
        self.saved_tensors = sum("Tensor" in str(argument.type) for argument in saved)
        self.saved_names = [argument.name for argument in saved]
        # Inputs last: where an argument has a result's name, the argument is saved.
        positions = {name: i for i, name in enumerate((*results, *inputs))}
        self.pick_saved = _picker([positions[name] for name in self.saved_names])
        available = [*names[: self.count], *self.saved_names, "output_mask"]
        self.pick_arguments = _picker([available.index(name) for name in names])
        returned = [result.name for result in gradient.schema.returns]
        # "student_" if the result dx is the gradient of student_x.
        self.prefix, first = "", returned[0].removeprefix("d")
        if all(returned):
            argument = next(name for name in inputs if name.endswith(first))
            self.prefix = argument.removesuffix(first)
            differentiated = [inputs.index(f"{self.prefix}{name[1:]}") for name in returned]
        else:
            differentiated = tensors[: len(returned)]
        self.pick_mask = _picker(differentiated)
        # The last index is that of the None that `backward` appends, for other arguments.
        order = [
            differentiated.index(i) if i in differentiated else len(differentiated)
            for i in range(max(differentiated) + 1)
        ]
        self.pick_gradients = _picker(order)
        self.constants = [(i, inputs[i]) for i in tensors if i not in differentiated]

    def setup_context(self, ctx: Any, call: Any, output: Any) -> None:
        outputs = output if isinstance(output, tuple) else (output,)
        needed = ctx.needs_input_grad
        for i, name in self.constants:
            if i < len(needed) and needed[i]:
                raise ValueError(f"{type(call).__name__}: {self.refusal(name)}")
        if self.may_be_none:
            ctx.set_materialize_grads(False)
        if len(outputs) > self.count:
            ctx.mark_non_differentiable(*[x for x in outputs[self.count :] if x is not None])
        self.save(ctx, self.pick_saved((*outputs, *call)))

    def refusal(self, name: str) -> str:
        """Return the message for an argument that requires a gradient and has none."""
        return f"{name} must not require a gradient, which the loss does not give"

    def save(self, ctx: Any, values: Sequence[Any]) -> None:
        """Save the values of `saved_names`."""
        ctx.save_for_backward(*values[: self.saved_tensors])
        ctx.options = values[self.saved_tensors :]

    def backward(self, ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        mask, grads = list(self.pick_mask(ctx.needs)), grads[: self.count]
        if self.may_be_none and (True not in mask or not [x for x in grads if x is not None]):
            return ()
        result = self.run(
            ctx, self.pick_arguments((*grads, *ctx.saved_tensors, *ctx.options, mask))
        )
        return self.pick_gradients((*(result if isinstance(result, tuple) else (result,)), None))

    def run(self, ctx: Any, values: tuple[Any, ...]) -> Any:
        """Call the backward op with these arguments."""
        return self.gradient.overload(*values)


def _picker(positions: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Return a function that returns the values at these positions as a tuple."""
    if len(positions) > 1:
        return operator.itemgetter(*positions)
    return lambda values: tuple([values[i] for i in positions])


def formula_of_definition(op: Op) -> tuple[Any, Any]:
    """Return the formula that differentiates an op's definition, for double backward."""

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _save(ctx, inputs)

    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        wanted = [i for i, needed in enumerate(ctx.needs) if needed]
        inputs = _saved(ctx)
        result: list[Tensor | None] = [None] * len(inputs)
        gradients = vector_jacobian(op.definition, inputs, wanted, grads)
        for i, gradient in zip(wanted, gradients, strict=True):
            result[i] = gradient
        return tuple(result)

    return backward, setup_context


def vector_jacobian(
    function: Callable[..., Any], inputs: Sequence[Any], wanted: Sequence[int],
    grads: Sequence[Tensor | None],
) -> Sequence[Tensor | None]:  # fmt: skip
    """Compute the gradients of the inputs at the indices `wanted`, from `grads`, the gradients of
    the function's first results, each of which may be None. The gradient is None for an input on
    which no result with a gradient depends.

    It works within kernels, where autograd is off, and within `torch.func` transforms.
    """

    def run(*tensors: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        arguments = list(inputs)
        for i, tensor in zip(wanted, tensors, strict=True):
            arguments[i] = tensor
        outputs = function(*arguments)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        pairs = [
            (output, grad.to(output.dtype))
            for output, grad in zip(outputs, grads, strict=False)
            if output is not None and grad is not None
        ]
        return [output for output, _ in pairs], [grad for _, grad in pairs]

    if not wanted or all(grad is None for grad in grads):
        return [None] * len(wanted)
    if are_functorch_transforms_active():
        vjp: Any = torch.func.vjp(run, *(inputs[i] for i in wanted), has_aux=True)
        _, pull_back, cotangents = vjp
        return pull_back(cotangents)
    # The tangents of forward-mode AD need a graph, too.
    keeps_graph = forward_ad._current_level >= 0 or (
        torch.is_grad_enabled()
        and any(isinstance(x, Tensor) and x.requires_grad for x in (*inputs, *grads))
    )
    # inference_mode(False) also ends the exclusion of autograd's dispatch keys within a kernel.
    with torch.inference_mode(False), torch.enable_grad():
        inputs = [_cut_off(x, keeps_graph) if isinstance(x, Tensor) else x for x in inputs]
        tensors = [inputs[i] for i in wanted]
        for x in tensors:
            if not x.requires_grad:
                x.requires_grad_()
        outputs, cotangents = run(*tensors)
        dependent = [i for i, output in enumerate(outputs) if output.requires_grad]
        if not dependent:
            return [None] * len(wanted)
        # `inference_mode` turns autograd's threads on, but a GPU's thread does not know of a trace
        # that this thread is in.
        with torch.autograd.set_multithreading_enabled(False):
            return torch.autograd.grad(
                [outputs[i] for i in dependent],
                tensors,
                [cotangents[i] for i in dependent],
                create_graph=keeps_graph,
                allow_unused=True,
            )


def is_differentiated() -> bool:
    """Return whether the current computation may itself be differentiated. Then a saved result that
    is not differentiable, such as a pre-activation, must be computed again from the inputs: as a
    constant it would lose their gradient."""
    has_tangents = forward_ad._current_level >= 0
    return torch.is_grad_enabled() or has_tangents or are_functorch_transforms_active()


def _cut_off(x: Tensor, as_view: bool) -> Tensor:
    """Return x as a tensor of its own at which a gradient stops, although one input may have been
    computed from another: detached, or with `as_view` as a view that keeps x's graph."""
    if x.is_inference():
        return x.clone()
    return x.view_as(x) if as_view else x.detach()


def _save(ctx: Any, values: Sequence[Any]) -> None:
    """Save the arguments of a backward: tensors with `save_for_backward`, other values on ctx."""
    ctx.is_tensor = [isinstance(value, Tensor) for value in values]
    ctx.save_for_backward(*(value for value in values if isinstance(value, Tensor)))
    ctx.others = [None if isinstance(value, Tensor) else value for value in values]


def _saved(ctx: Any) -> list[Any]:
    """Return the values that `_save` saved, in their order."""
    tensors = iter(ctx.saved_tensors)
    return [
        next(tensors) if is_tensor else other
        for is_tensor, other in zip(ctx.is_tensor, ctx.others, strict=True)
    ]


def below(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function to run below autograd, as the dispatcher runs a kernel."""
    if not has(*AUTOGRAD):
        return function

    def run(*args: Any, **kwargs: Any) -> Any:
        with BelowAutograd():
            return function(*args, **kwargs)

    return run


def register(op: Op) -> None:
    """Register the op's formula with PyTorch, and an Autograd kernel in place of custom_op's.

    custom_op's kernel refuses `torch.func.grad`, and under `jvp` or a dual level it returns a zero
    tangent without an error; this kernel sends both to the definition. It is faster too: rms_norm
    with device kernels that do nothing takes 15 us of host time for the forward, and 65 us with its
    backward; with custom_op's kernel it takes 33 and 98 us.
    """
    library, overload = op.custom_op._lib, op.overload
    count = len(op.schema.arguments)
    nothing = (None,) * count

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        if op.setup_context is not None:
            # The dispatcher drops trailing arguments that have their default value.
            op.setup_context(ctx, op.arguments(*inputs), output)

    def gradients(ctx: Any, needs: tuple[bool, ...], grads: Any) -> tuple[Tensor | None, ...]:
        if op.backward is None:
            raise RuntimeError(f"{op.name}: there is no gradient of this op")
        ctx.needs = needs + nothing[len(needs) :]
        # The formula may return fewer gradients than there are arguments, and the dispatcher drops
        # trailing arguments that have their default value.
        return (op.backward(ctx, *grads) + nothing)[: len(needs)]

    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return gradients(ctx, ctx.needs_input_grad, grads)

    op.custom_op.register_autograd(backward, setup_context=setup_context)
    library.impl(op.name, op.check_and_define, "FuncTorchDynamicLayerFrontMode")
    if not has(*AUTOGRAD):
        return

    entries = op.entries

    def call(keyset: Any, args: tuple[Any, ...]) -> Any:
        bits = keyset.raw_repr()
        entry = entries.get(bits)
        if entry is None:
            # The first call with these keys. If the device's key is the only one below Autograd,
            # its kernel is remembered for all keys of this call; anything else, such as a tensor
            # subclass or a mode, goes through the dispatcher every time.
            keyset = keyset & after_autograd_keyset
            entry = entries.get(keyset.raw_repr())
            if entry is None:
                with BelowAutograd():
                    if keyset.has(torch.DispatchKey.Python):
                        before_subclasses()
                    return overload.redispatch(keyset, *args)
            entries[bits] = entry
        return entry(*args)

    class Differentiated(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args_and_keyset: Any) -> Any:
            args = args_and_keyset[:-1]
            outputs = call(args_and_keyset[-1], args)
            setup_context(ctx, args, outputs)
            return outputs

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
            return *gradients(ctx, ctx.needs_input_grad[:-1], grads), None

    Differentiated.__name__ = f"{op.name}_autograd"
    # The base class's `apply` without the part for `torch.func` transforms, which never come here:
    # they run FuncTorchDynamicLayerFrontMode's kernel above.
    apply = super(torch.autograd.Function, Differentiated).apply

    def run(keyset: Any, *args: Any) -> Any:
        if forward_ad._current_level >= 0:
            return op.check_and_define(*args)
        if torch.is_grad_enabled() and any_requires_grad(*args):
            return apply(*args, keyset)
        return call(keyset, args)

    with warnings.catch_warnings():
        # It is meant to replace custom_op's kernel.
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        run = without_dynamo(run)
        library.impl(op.name, run, "Autograd", with_keyset=True, allow_override=True)


def under_autocast(
    op: Op, key: str, convert: Callable[[Any], Any], keep: Collection[str] = ()
) -> None:
    """Register the op's kernel for an Autocast key, which calls `convert` on every argument that is
    not named in `keep`, and then runs the op without autocast."""
    device = key.removeprefix("Autocast").lower()
    # PyTorch's name, which stays valid when a backend renames the device.
    device = device.replace("privateuse1", "privateuseone")
    names = [argument.name for argument in op.schema.arguments]

    def run(*args: Any, **kwargs: Any) -> Any:
        args = tuple(
            value if name in keep else convert(value)
            for name, value in zip(names, args, strict=False)
        )
        kwargs = {name: value if name in keep else convert(value) for name, value in kwargs.items()}
        # Autocast is on, or the key would not have led here.
        torch.set_autocast_enabled(device, False)
        try:
            return op.overload(*args, **kwargs)
        finally:
            torch.set_autocast_enabled(device, True)

    op.custom_op._lib.impl(op.name, run, key)


def autocast_value(value: Any, dtype: torch.dtype) -> Any:
    """Cast a floating-point tensor to `dtype`, and return any other value unchanged."""
    # Like ATen's autocast, this does not cast float64.
    if isinstance(value, Tensor) and value.is_floating_point() and value.dtype is not torch.float64:
        return value.to(dtype)
    return value
