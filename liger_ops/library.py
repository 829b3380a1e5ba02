"""Registration: the only place of the project that talks to `torch.library`.

An op is one `Op` record. `define` creates it from its definition in plain PyTorch, `fake` adds the
argument checks and output allocation, `kernel` a device's kernel, `gradient` its autograd formula.
`compose` creates an op that is made of others, and has nothing of its own but its schema.

What runs:
  * a tensor of a device with a kernel: that kernel, float64 and complex128 excepted;
  * any other device, and those two everywhere: the checks, then the definition;
  * under `torch.func` transforms and forward-mode AD: the definition, which PyTorch differentiates
    and batches itself, so that no tangent is lost at an opaque kernel;
  * double backward: a backward op is differentiated through its definition.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch.nested._internal.nested_tensor import NestedTensor

from .refusals import refusal

NAMESPACE = "liger"

# The dispatch keys of the devices that have kernels. torch_npu renames the device of PrivateUse1,
# not the key.
DEVICES = {"cuda": "CUDA", "npu": "PrivateUse1"}
DOUBLES = (torch.float64, torch.complex128)
# The keys of tensors that no op takes: PyTorch would say so at length, and name no op.
NESTED_KEYS = ("NestedTensorCPU", "NestedTensorCUDA", "NestedTensorPrivateUse1")
AUTOCAST_KEYS = {"cuda": "AutocastCUDA", "npu": "AutocastPrivateUse1", "xpu": "AutocastXPU"}

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass
class Op:
    """One op: its schema as PyTorch knows it, and the Python that implements it."""

    name: str
    definition: Callable[..., Any]
    custom_op: torch.library.CustomOpDef
    overload: Any
    # Raises for arguments that no op takes.
    refuse: Callable[[Sequence[Any], Mapping[str, Any]], None]
    fake: Callable[..., Any] | None = None
    kernels: dict[str, Callable[..., Any]] = field(default_factory=dict)
    # What runs the kernels, by the bits of the dispatch keys of dense tensors on their device.
    entries: dict[int, Callable[..., Any]] = field(default_factory=dict)
    backward: Callable[..., tuple[Tensor | None, ...]] | None = None
    setup_context: Callable[[Any, tuple[Any, ...], Any], None] | None = None

    @property
    def differentiable(self) -> bool:
        return self.backward is not None

    def check_and_allocate(self, *args: Any, **kwargs: Any) -> Any:
        self.refuse(args, kwargs)
        return None if self.fake is None else self.fake(*args, **kwargs)

    def check_and_define(self, *args: Any, **kwargs: Any) -> Any:
        """The definition, with the same argument checks as the kernels'."""
        self.check_and_allocate(*args, **kwargs)
        return self.definition(*args, **kwargs)


OPS: dict[str, Op] = {}
# The ops that are made of others, by name: their functions.
COMPOSED: dict[str, Callable[..., Any]] = {}

_COMPOSITES = torch.library.Library(NAMESPACE, "FRAGMENT")


def define(
    schema: str, strides: torch.Tag = torch.Tag.needs_contiguous_strides
) -> Callable[[Function], Function]:
    """Create the op `liger::<function name>` from its definition and return its public function.

    `strides` is what Inductor does to inputs: by default it has the producer write them contiguous,
    instead of a copy here. An op whose kernels read a view where it lies, such as the halves of a
    projection, takes them as they come, `needs_fixed_stride_order`: Inductor would copy the view.
    One whose outputs follow the strides of its inputs takes those that tracing saw,
    `needs_exact_strides`.
    """

    def decorate(definition: Function) -> Function:
        name = definition.__name__
        custom_op = torch.library.custom_op(
            f"{NAMESPACE}::{name}",
            lambda *args, **kwargs: OPS[name].check_and_define(*args, **kwargs),
            mutates_args=(),
            schema=schema,
            tags=(strides,),
        )
        overload = getattr(getattr(torch.ops, NAMESPACE), name).default
        refuse = refusal(name, overload._schema)
        op = OPS[name] = Op(name, definition, custom_op, overload, refuse)
        _register_autograd(op)
        _register_refusals(op)
        return _public(definition, overload)

    return decorate


def compose(schema: str) -> Callable[[Function], Function]:
    """Create the op `liger::<function name>` of other ops and return its public function.

    Dynamo keeps it one node. Eager autograd, AOTAutograd, `torch.func` and forward-mode AD see the
    ops that the function calls, and do to each what they do to it anywhere.
    """

    def decorate(function: Function) -> Function:
        name = function.__name__
        _COMPOSITES.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        overload = getattr(getattr(torch.ops, NAMESPACE), name).default
        refuse = refusal(name, overload._schema)

        def run(*args: Any, **kwargs: Any) -> Any:
            refuse(args, kwargs)
            return function(*args, **kwargs)

        # functorch's front key has a fallback of its own, which would find no batching rule.
        for key in ("CompositeImplicitAutograd", "FuncTorchDynamicLayerFrontMode"):
            _COMPOSITES.impl(name, run, key)
        COMPOSED[name] = function
        return _public(function, overload)

    return decorate


def _public(function: Function, overload: Any) -> Function:
    """The op as its module exports it: the overload, with the function's documentation."""

    @functools.wraps(function)
    def public(*args: Any, **kwargs: Any) -> Any:
        try:
            return overload(*args, **kwargs)
        except RuntimeError as error:
            # What the dispatcher says of an argument that is not of the schema's type, or unknown.
            text, name = str(error), f"{NAMESPACE}::{function.__name__}"
            if text.startswith((f"{name}() ", "Unknown keyword argument ")) and name in text:
                raise TypeError(text) from None
            raise

    return public  # type: ignore[return-value]


def fake(name: str) -> Callable[[Function], Function]:
    """Register the function that checks the arguments of op `name` and allocates its outputs."""

    def decorate(function: Function) -> Function:
        OPS[name].fake = function
        OPS[name].custom_op.register_fake(OPS[name].check_and_allocate)
        return function

    return decorate


def kernel(name: str, device: str) -> Callable[[Function], Function]:
    """Register a device's kernel of op `name`; with an argument in float64 or complex128 the
    definition runs.

    Not through `custom_op.register_kernel`, which takes 1 us of every call to check that no output
    is in an input's memory. The tests check that of every kernel.
    """

    def decorate(function: Function) -> Function:
        op, key = OPS[name], DEVICES[device]
        needed = [i for i, a in enumerate(op.overload._schema.arguments) if str(a.type) == "Tensor"]

        def run(*args: Any, **kwargs: Any) -> Any:
            for i in needed:
                if args[i] is None:
                    op.refuse(args, kwargs)
            for value in args:
                if isinstance(value, Tensor) and value.dtype in DOUBLES:
                    return op.check_and_define(*args, **kwargs)
            return function(*args, **kwargs)

        op.custom_op._lib.impl(name, torch._disable_dynamo(run), key)
        op.kernels[device] = function
        op.entries[torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key)).raw_repr()] = run
        return function

    return decorate


def gradient(
    name: str,
    backward: Callable[..., tuple[Tensor | None, ...]],
    setup_context: Callable[[Any, tuple[Any, ...], Any], None],
) -> None:
    """Register the autograd formula of op `name`.

    `backward(ctx, *grads)` finds `ctx.needs`, one bool for every argument of the schema. PyTorch's
    own `ctx.needs_input_grad` lacks the arguments that the dispatcher dropped for being the
    default.
    """
    op = OPS[name]
    op.backward, op.setup_context = backward, setup_context


def differentiate_definition(name: str) -> None:
    """Give op `name` the gradient of its definition: the road of double backward."""

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        tensors = [value for value in inputs if isinstance(value, Tensor)]
        ctx.save_for_backward(*tensors)
        ctx.inputs = [None if isinstance(value, Tensor) else value for value in inputs]
        ctx.is_tensor = [isinstance(value, Tensor) for value in inputs]

    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        wanted = [i for i, needed in enumerate(ctx.needs) if needed]
        with torch.enable_grad():
            # Views, because one input may have been computed from another: the gradient stops at
            # the view of either, instead of going on from the one to the other.
            views = iter([tensor.view_as(tensor) for tensor in ctx.saved_tensors])
            inputs = [
                next(views) if is_tensor else value
                for is_tensor, value in zip(ctx.is_tensor, ctx.inputs, strict=True)
            ]
            outputs = OPS[name].definition(*inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        pairs = [
            (output, grad)
            for output, grad in zip(outputs, grads, strict=True)
            if output is not None and grad is not None and output.requires_grad
        ]
        result: list[Tensor | None] = [None] * len(inputs)
        if pairs:
            values = torch.autograd.grad(
                [output for output, _ in pairs],
                [inputs[i] for i in wanted],
                [grad for _, grad in pairs],
                create_graph=torch.is_grad_enabled(),
                allow_unused=True,
            )
            for i, value in zip(wanted, values, strict=True):
                result[i] = value
        return tuple(result)

    gradient(name, backward, setup_context)


def autocast(name: str, dtype: torch.dtype) -> None:
    """Under autocast on a device with one, cast the floating inputs of op `name` to `dtype`."""
    for key in AUTOCAST_KEYS.values():
        _under_autocast(OPS[name], key, lambda value: _autocast_value(value, dtype))


def as_given(name: str) -> None:
    """Under autocast, run op `name` in the dtypes of its inputs.

    Without a rule, autocast reaches the ATen ops that the definition and the kernels' host code
    call, and casts the float32 of their arithmetic.
    """
    for key in ("AutocastCPU", *AUTOCAST_KEYS.values()):
        _under_autocast(OPS[name], key, lambda value: value)


def _under_autocast(op: Op, key: str, convert: Callable[[Any], Any]) -> None:
    excluded = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def run(*args: Any, **kwargs: Any) -> Any:
        args = tuple(convert(value) for value in args)
        kwargs = {key: convert(value) for key, value in kwargs.items()}
        with torch._C._ExcludeDispatchKeyGuard(excluded):
            return op.overload(*args, **kwargs)

    op.custom_op._lib.impl(op.name, run, key)


def implementation(op: Op, device: str) -> str:
    """Where the code is that runs `op` on `device`: a kernel's module, or "definition"."""
    function = op.kernels.get(device)
    return "definition" if function is None else function.__module__.removeprefix("liger_ops.")


def _register_refusals(op: Op) -> None:
    """Have tensors refused that would not reach the op's checks."""

    def refuse(cls: Any, function: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        op.refuse(args, kwargs or {})
        return NotImplemented

    op.custom_op.register_torch_dispatch(NestedTensor, refuse)
    for key in NESTED_KEYS:
        op.custom_op._lib.impl(op.name, op.check_and_define, key)


def _autocast_value(value: Any, dtype: torch.dtype) -> Any:
    # As ATen's autocast: float64 is left alone.
    if isinstance(value, Tensor) and value.is_floating_point() and value.dtype is not torch.float64:
        return value.to(dtype)
    return value


def _register_autograd(op: Op) -> None:
    """Register what runs above the kernels: autograd, and the road of transforms.

    custom_op's own refuses `torch.func.grad`, and under `jvp` or a dual level silently returns a
    zero tangent; those go to the definition. It is slower too: rms_norm with a kernel that does
    nothing takes 24 us of host time forward, and 81 with its backward; with this, 10 and 53.
    """
    library, overload = op.custom_op._lib, op.overload
    arguments = overload._schema.arguments
    defaults = tuple(
        argument.default_value if argument.has_default_value() else None for argument in arguments
    )

    def call(keyset: torch._C.DispatchKeySet, args: tuple[Any, ...]) -> Any:
        keyset = keyset & torch._C._after_autograd_keyset
        with torch._C._AutoDispatchBelowAutograd():
            # Where nothing but a kernel is left to run, the dispatcher would take 3 us to find it.
            entry = op.entries.get(keyset.raw_repr())
            return overload.redispatch(keyset, *args) if entry is None else entry(*args)

    class Differentiated(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args_and_keyset: Any) -> Any:
            args = args_and_keyset[:-1]
            outputs = call(args_and_keyset[-1], args)
            if op.setup_context is not None:
                # The dispatcher drops arguments at the end that are the default.
                op.setup_context(ctx, args + defaults[len(args) :], outputs)
            return outputs

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
            if op.backward is None:
                raise RuntimeError(f"{op.name}: there is no gradient of this op")
            # Without the keyset, and with the arguments that the dispatcher dropped.
            needs = ctx.needs_input_grad[:-1]
            ctx.needs = needs + (False,) * (len(arguments) - len(needs))
            return *op.backward(ctx, *grads)[: len(needs)], None

    Differentiated.__name__ = f"{op.name}_autograd"
    # Without what torch.autograd.Function does for `torch.func` transforms: they do not come here.
    apply = super(torch.autograd.Function, Differentiated).apply

    def run(keyset: torch._C.DispatchKeySet, *args: Any) -> Any:
        if forward_ad._current_level >= 0:
            return op.check_and_define(*args)
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
            return apply(*args, keyset)
        return call(keyset, args)

    library.impl(op.name, op.check_and_define, "FuncTorchDynamicLayerFrontMode")
    with warnings.catch_warnings():
        # The registration replaces custom_op's own on purpose.
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        run = torch._disable_dynamo(run)
        library.impl(op.name, run, "Autograd", with_keyset=True, allow_override=True)
