"""The autograd formulas of ops, and the kernels above a device's: Autograd and Autocast."""

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
    DispatchKey,
    DispatchKeySet,
    ExcludeDispatchKeyGuard,
    after_autograd_keyset,
    any_requires_grad,
    are_functorch_transforms_active,
    has,
    without_dynamo,
)

_PYTHON = DispatchKey.Python if has(*AUTOGRAD) else None


def _nothing() -> object:
    return None


# Called before a tensor subclass or a mode is given a call, so that `distributed` can register the
# rules of DTensor when they are needed, and not import DTensor before.
before_subclasses: Callable[[], object] = _nothing


class Formula:
    """An op's autograd formula, derived from the schema of its backward op.

    The first arguments of the backward op are the gradients of the op's first results, each named
    "d" and the result's name; the other results are not differentiable. Where these arguments may
    be None, a result without a gradient has none, and otherwise zeros. The other arguments are
    arguments of the op and results, which are saved, and `output_mask`, which says for each result
    of the backward op whether it is needed. Its results are the gradients of the arguments that
    they name, after "d", or without names of the first tensor arguments, in their order. No other
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
        # Autograd would fill zeros for results that have no gradient, too.
        is_one_of_several = self.count == 1 and len(results) > 1
        self.may_be_none = is_one_of_several or str(gradient.schema.arguments[0].type) != "Tensor"
        saved = [a for a in gradient.schema.arguments[self.count :] if a.name != "output_mask"]
        # Tensors first: the sort is stable.
        saved.sort(key=lambda argument: "Tensor" not in str(argument.type))
        self.saved_tensors = sum("Tensor" in str(argument.type) for argument in saved)
        self.saved_names = [argument.name for argument in saved]
        # Later names count: an argument, where a result has its name.
        positions = {name: i for i, name in enumerate((*results, *inputs))}
        self.saved = _picker([positions[name] for name in self.saved_names])
        at_hand = [*names[: self.count], *self.saved_names, "output_mask"]
        self.given = _picker([at_hand.index(name) for name in names])
        returned = [result.name for result in gradient.schema.returns]
        # What the names of the arguments with a gradient start with.
        self.prefix, first = "", returned[0].removeprefix("d")
        if all(returned):
            named = next(name for name in inputs if name.endswith(first))
            self.prefix = named.removesuffix(first)
            of = [inputs.index(f"{self.prefix}{name[1:]}") for name in returned]
        else:
            of = tensors[: len(returned)]
        self.wanted = _picker(of)
        places = [of.index(i) if i in of else len(of) for i in range(max(of) + 1)]
        self.gradients = _picker(places)
        self.constants = [(i, inputs[i]) for i in tensors if i not in of]

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
        self.save(ctx, self.saved((*outputs, *call)))

    def refusal(self, name: str) -> str:
        """Why a tensor without a gradient must not require one."""
        return f"{name} must not require a gradient, which the loss does not give"

    def save(self, ctx: Any, values: Sequence[Any]) -> None:
        """Save the values of `saved_names`."""
        ctx.save_for_backward(*values[: self.saved_tensors])
        ctx.options = values[self.saved_tensors :]

    def backward(self, ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        wanted, grads = list(self.wanted(ctx.needs)), grads[: self.count]
        if self.may_be_none and (True not in wanted or not [x for x in grads if x is not None]):
            return ()
        found = self.run(ctx, self.given((*grads, *ctx.saved_tensors, *ctx.options, wanted)))
        return self.gradients((*(found if isinstance(found, tuple) else (found,)), None))

    def run(self, ctx: Any, values: tuple[Any, ...]) -> Any:
        """Call the backward op with these arguments."""
        return self.gradient.overload(*values)


def _picker(positions: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """A function that returns the values at these positions."""
    if len(positions) > 1:
        return operator.itemgetter(*positions)
    return lambda values: tuple([values[i] for i in positions])


def formula_of_definition(op: Op) -> tuple[Any, Any]:
    """The formula that differentiates an op's definition, for double backward."""

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _save(ctx, inputs)

    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        wanted = [i for i, needed in enumerate(ctx.needs) if needed]
        inputs = _saved(ctx)
        result: list[Tensor | None] = [None] * len(inputs)
        found = vector_jacobian(op.definition, inputs, wanted, grads)
        for i, value in zip(wanted, found, strict=True):
            result[i] = value
        return tuple(result)

    return backward, setup_context


def vector_jacobian(
    function: Callable[..., Any], inputs: Sequence[Any], wanted: Sequence[int],
    grads: Sequence[Tensor | None],
) -> Sequence[Tensor | None]:  # fmt: skip
    """The gradients of the inputs at the indices `wanted`, from those of the function's first
    results, each of which may be None. None for an input on which no such result depends.

    It works within kernels, where autograd is off, and within `torch.func` transforms.
    """

    def run(*tensors: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        given = list(inputs)
        for i, tensor in zip(wanted, tensors, strict=True):
            given[i] = tensor
        outputs = function(*given)
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
        found: Any = torch.func.vjp(run, *(inputs[i] for i in wanted), has_aux=True)
        _, pull_back, chosen = found
        return pull_back(chosen)
    # The tangents of forward-mode AD need a graph, too.
    keeps_graph = forward_ad._current_level >= 0 or (
        torch.is_grad_enabled()
        and any(isinstance(x, Tensor) and x.requires_grad for x in (*inputs, *grads))
    )
    # Besides inference mode, it ends the exclusion of autograd's dispatch keys.
    with torch.inference_mode(False), torch.enable_grad():
        inputs = [_apart(x, keeps_graph) if isinstance(x, Tensor) else x for x in inputs]
        tensors = [inputs[i] for i in wanted]
        for x in tensors:
            if not x.requires_grad:
                x.requires_grad_()
        outputs, chosen = run(*tensors)
        there = [i for i, output in enumerate(outputs) if output.requires_grad]
        if not there:
            return [None] * len(wanted)
        # `inference_mode` turns autograd's threads on, and in a GPU's thread a trace is unknown.
        with torch.autograd.set_multithreading_enabled(False):
            return torch.autograd.grad(
                [outputs[i] for i in there],
                tensors,
                [chosen[i] for i in there],
                create_graph=keeps_graph,
                allow_unused=True,
            )


def is_differentiated() -> bool:
    """Whether what is computed here may be differentiated again. Then a saved result that is not
    differentiable, such as a pre-activation, is no constant, and has to be computed from inputs."""
    has_tangents = forward_ad._current_level >= 0
    return torch.is_grad_enabled() or has_tangents or are_functorch_transforms_active()


def _apart(x: Tensor, as_view: bool) -> Tensor:
    """x without its graph, or a view in it, at which a gradient stops: one input may have been
    computed from another."""
    if x.is_inference():
        return x.clone()
    return x.view_as(x) if as_view else x.detach()


def _save(ctx: Any, values: Sequence[Any]) -> None:
    """Keep the arguments of a backward: tensors for autograd to save, the others as they are."""
    ctx.is_tensor = [isinstance(value, Tensor) for value in values]
    ctx.save_for_backward(*(value for value in values if isinstance(value, Tensor)))
    ctx.others = [None if isinstance(value, Tensor) else value for value in values]


def _saved(ctx: Any) -> list[Any]:
    """The values that `_save` kept, in their order."""
    tensors = iter(ctx.saved_tensors)
    return [
        next(tensors) if is_tensor else other
        for is_tensor, other in zip(ctx.is_tensor, ctx.others, strict=True)
    ]


def below(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, run without autograd, as the dispatcher runs a kernel."""
    if not has(*AUTOGRAD):
        return function

    def run(*args: Any, **kwargs: Any) -> Any:
        with BelowAutograd():
            return function(*args, **kwargs)

    return run


def register(op: Op) -> None:
    """Register the op's formula with PyTorch, and an Autograd kernel in place of custom_op's.

    custom_op's kernel refuses `torch.func.grad`, and under `jvp` or a dual level silently returns a
    zero tangent; this kernel sends both to the definition. It is faster too: rms_norm with device
    kernels that do nothing takes 15 us of host time forward, and 65 us with its backward; with
    custom_op's kernel 33 and 98 us.
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
        # No gradients of the last arguments, and none of those that the dispatcher dropped.
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
            keyset = keyset & after_autograd_keyset
            entry = entries.get(keyset.raw_repr())
            if entry is None:
                with BelowAutograd():
                    if keyset.has(_PYTHON):
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
    # Skips what torch.autograd.Function does for `torch.func` transforms, which do not come here.
    apply = super(torch.autograd.Function, Differentiated).apply

    def run(keyset: Any, *args: Any) -> Any:
        if forward_ad._current_level >= 0:
            return op.check_and_define(*args)
        if torch.is_grad_enabled() and any_requires_grad(*args):
            return apply(*args, keyset)
        return call(keyset, args)

    with warnings.catch_warnings():
        # The registration replaces custom_op's own on purpose.
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        run = without_dynamo(run)
        library.impl(op.name, run, "Autograd", with_keyset=True, allow_override=True)


def under_autocast(
    op: Op, key: str, convert: Callable[[Any], Any], keep: Collection[str] = ()
) -> None:
    """Register the kernel for an Autocast key: it converts the arguments, but for those to keep."""
    excluded = DispatchKeySet(getattr(DispatchKey, key)) if has(*AUTOGRAD) else None
    names = [argument.name for argument in op.schema.arguments]

    def run(*args: Any, **kwargs: Any) -> Any:
        args = tuple(
            value if name in keep else convert(value)
            for name, value in zip(names, args, strict=False)
        )
        kwargs = {name: value if name in keep else convert(value) for name, value in kwargs.items()}
        with ExcludeDispatchKeyGuard(excluded):
            return op.overload(*args, **kwargs)

    op.custom_op._lib.impl(op.name, run, key)


def autocast_value(value: Any, dtype: torch.dtype) -> Any:
    # Like ATen's autocast, this does not cast float64.
    if isinstance(value, Tensor) and value.is_floating_point() and value.dtype is not torch.float64:
        return value.to(dtype)
    return value
