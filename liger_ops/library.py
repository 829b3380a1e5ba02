"""Registration of ops. Only this module and `autograd` call `torch.library`.

An op is one `Op` record. `define` creates it from its definition in plain PyTorch, whose signature
is the op's schema. `fake` adds the argument checks and output allocation, `kernel` a device's
kernel, `gradient` its autograd formula. `compose` creates an op that calls other ops.

Fakes and kernels take the arguments as one named tuple, `call`, with the schema's names and the
defaults filled in.

An op runs
  * on a device with a kernel: that kernel, except for float64 and complex128;
  * on any other device, and for these two dtypes: the checks, then the definition;
  * under `torch.func` transforms and forward-mode AD: the definition, which PyTorch differentiates
    and batches itself, as an opaque kernel would lose the tangent;
  * in a double backward: the backward op's definition, which autograd differentiates.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import pkgutil
from collections.abc import Callable, Collection
from typing import Any, TypeVar

import torch
from torch import Tensor

from . import autograd, derived
from .accepted import Options
from .ascend.cures import cure_of
from .autograd import autocast_value, under_autocast
from .derived import arguments_of, hide_keyword_only, schema_of
from .record import Op, named_in_errors, refusal, refuse_nested
from .torch_private import AUTOGRAD, has, without_dynamo

# A build for the kernels hub has a namespace of its own here (`hub/build.py`).
NAMESPACE = "liger"

# The dispatch keys of the devices that have kernels. torch_npu renames the device of PrivateUse1,
# but not the key.
DEVICES = {"cuda": "CUDA", "npu": "PrivateUse1"}
DOUBLES = (torch.float64, torch.complex128)
AUTOCAST_KEYS = {"cuda": "AutocastCUDA", "npu": "AutocastPrivateUse1", "xpu": "AutocastXPU"}

Function = TypeVar("Function", bound=Callable[..., Any])
Result = TypeVar("Result")


OPS: dict[str, Op] = {}
# Op name -> function, for the ops that call other ops.
COMPOSED: dict[str, Callable[..., Any]] = {}

_COMPOSITES = torch.library.Library(NAMESPACE, "FRAGMENT")


def define(
    tags: torch.Tag | tuple[torch.Tag, ...] = torch.Tag.needs_contiguous_strides, returns: str = "",
    axes: str = "", dtype: str = "", options: Options | None = None,
    axes_of_call: Callable[[Any, str], str] | None = None,
) -> Callable[[Function], Function]:  # fmt: skip
    """Create the op `liger::<function name>` from its definition and return its public function.

    Args:
        tags: which strides Inductor gives to the inputs: contiguous ones, which their producer
            then writes; `needs_fixed_stride_order` for kernels that read views, such as the halves
            of a projection, which Inductor would otherwise copy; `needs_exact_strides` for outputs
            that follow the strides of the inputs. `cudagraph_unsafe` beside it is for a tensor of
            the host, which Inductor's CUDA graphs do not take.
        returns: the names of the results in the schema.
        axes: the op's axes line (see `axes`), from which follow the checks, outputs and sharding
            rules of the op and its backward op.
        dtype: the dtype of the results, by default that of the first tensor. "x+y" is the dtype of
            x + y, and "float32+x" is float32, or float64 if x is.
        options: argument -> the values that it accepts.
        axes_of_call: for a line with a `?`, a function of a call and the line that returns the
            call's line, for the sharding rule.

    Keyword-only parameters of the definition are not in the schema: they are for callers of the
    definition. A backward op is differentiated through its definition.
    """

    def decorate(definition: Function) -> Function:
        name = definition.__name__
        hide_keyword_only(definition)
        custom_op = torch.library.custom_op(
            f"{NAMESPACE}::{name}",
            lambda *args, **kwargs: OPS[name].check_and_define(*args, **kwargs),
            mutates_args=(),
            schema=schema_of(definition, returns),
            tags=tags if isinstance(tags, tuple) else (tags,),
        )
        overload = getattr(getattr(torch.ops, NAMESPACE), name).default
        schema = overload._schema
        refuse = refusal(name, schema)
        arguments = arguments_of(name, schema)
        declaration = (tags, axes, dtype, options or {}, axes_of_call)
        named = named_in_errors(name, definition)
        op = OPS[name] = Op(name, named, custom_op, overload, arguments, refuse, *declaration)
        autograd.register(op)
        refuse_nested(op)
        if name.endswith("_backward"):
            gradient(name, *autograd.formula_of_definition(op))
        return _public(named, overload)

    return decorate


def forward(
    form: str, **options: Any
) -> Callable[[Callable[[Any], Result]], Callable[..., Result]]:
    """Create the op `<op>_forward`, which the composed op `<op>` calls, from a function of its
    call, and return its public function. `form` lists its arguments, as
    `derived.forward_definition` describes; `options` are keyword arguments of `define`."""

    def decorate(function: Callable[[Any], Result]) -> Callable[..., Result]:
        public = COMPOSED[function.__name__.removesuffix("_forward")]
        return define(**options)(derived.forward_definition(function, public, form))

    return decorate


def backward(
    name: str, form: str, returns: str = "", formula: type[autograd.Formula] = autograd.Formula
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Create the op `<name>_backward`, the gradient of op `name`, from a function of its call, and
    return its public function. `form` names its arguments and results, as
    `derived.backward_definition` describes; `returns` are the names of the results in the schema.
    """
    op = OPS[name]

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        definition = derived.backward_definition(name, function, form, op.definition)
        public = define(op.tags, returns)(definition)
        gradient(name, formula=formula)
        return public

    return decorate


def derive_backward(
    name: str, form: str, function: Callable[..., Any] | None = None, returns: str = "",
    layout: derived.Layout = derived.contiguous,
) -> Callable[..., Any]:  # fmt: skip
    """Create the op `<name>_backward` as `backward` does. Its definition differentiates `function`,
    by default the op's definition, as `derived.gradient_by_autograd` describes."""
    by_autograd = derived.gradient_by_autograd(function or OPS[name].definition, form, layout)
    return backward(name, form, returns)(by_autograd)


def declared(op: Op) -> Op:
    """Return the op that was defined with an op's axes, dtype and options: for a backward op, its
    forward op, and otherwise the op itself."""
    base = op.name.removesuffix("_backward")
    return OPS.get(base) or OPS.get(f"{base}_forward") or op


def tensor_names(op: Op) -> list[str]:
    """Return the names of an op's arguments that are tensors, optional tensors or lists of them."""
    return [argument.name for argument in op.schema.arguments if "Tensor" in str(argument.type)]


def compose(function: Function) -> Function:
    """Create the op `liger::<function name>`, which calls other ops; return its public function.

    Dynamo keeps it as one node. Eager autograd, AOTAutograd, `torch.func` and forward-mode AD see
    only the ops that the function calls.
    """
    name = function.__name__
    _COMPOSITES.define(name + schema_of(function), tags=(torch.Tag.pt2_compliant_tag,))
    overload = getattr(getattr(torch.ops, NAMESPACE), name).default
    refuse = refusal(name, overload._schema)

    def run(*args: Any, **kwargs: Any) -> Any:
        refuse(args, kwargs)
        return function(*args, **kwargs)

    # functorch's front key needs a kernel: its fallback would raise, as there is no batching rule.
    for key in ("CompositeImplicitAutograd", "FuncTorchDynamicLayerFrontMode"):
        _COMPOSITES.impl(name, run, key)
    COMPOSED[name] = function
    return _public(function, overload)


def _public(function: Function, overload: Any) -> Function:
    """Return the op's public function, which calls the overload and is documented as `function`."""

    @functools.wraps(function)
    def public(*args: Any, **kwargs: Any) -> Any:
        try:
            return overload(*args, **kwargs)
        except RuntimeError as error:
            # In inference mode the Autograd kernel, which registers DTensor's rules, does not run.
            if isinstance(error, NotImplementedError) and autograd.before_subclasses():
                return public(*args, **kwargs)
            # DTensor makes a RuntimeError of what the op's checks raise, and adds the placements.
            if isinstance(error.__cause__, (TypeError, ValueError)):
                raise type(error.__cause__)(str(error)) from error
            # The dispatcher's messages for an argument of a wrong type, or an unknown argument.
            text, name = str(error), f"{NAMESPACE}::{function.__name__}"
            if text.startswith((f"{name}() ", "Unknown keyword argument ")) and name in text:
                raise TypeError(text) from None
            raise

    return public  # type: ignore[return-value]


def fake(op: Op, function: Callable[[Any], Any]) -> None:
    """Register the function that checks the arguments of an op's call and allocates the outputs."""
    op.fake = function
    op.custom_op.register_fake(op.check_and_allocate)


def kernel(
    name: str, device: str, allocates: bool = False, module: str = ""
) -> Callable[[Function], Function]:
    """Register a device's kernel of op `name`; if an argument is float64 or complex128 the
    definition runs instead.

    The function takes the call, the outputs that the op's fake allocated, and `plan`, which is None
    except in tests. It is not called if every output is None, or if a required tensor is empty: the
    outputs are then the definition's, and no grid has 0 programs, which is an error on an NPU. With
    `allocates` it takes the call alone, empty tensors included, and returns the outputs. `module`
    names the device code's module, if it is not the function's.
    """

    def decorate(function: Function) -> Function:
        if device not in OPS[name].kernels:
            _run_on_device(OPS[name], device)
        implementation = (function, allocates, module or function.__module__)
        if device in _LATE:
            _LATE[device][name] = implementation
        else:
            OPS[name].install[device](*implementation)
        return function

    return decorate


# Device -> op -> the arguments of `install`, until all kernels of the device have been imported.
_LATE: dict[str, dict[str, tuple[Callable[..., Any], bool, str]]] = {}


def import_kernels_late(device: str) -> None:
    """Register every op on `device`; the first call of an op there imports the device's kernels."""
    _LATE[device] = {}
    for op in OPS.values():
        _run_on_device(op, device)


def load(device: str) -> None:
    """Import the kernels of a device, unless they have been imported."""
    if device in _LATE:
        try:
            importlib.import_module(f"{__package__}.lowering.{device}")
        except Exception as error:
            message = f"liger_ops: the import of the kernels for {device} failed: {error}"
            if device == "npu":
                message = (
                    f"{message}. {cure_of(str(error)) or 'python -m liger_ops --npu says why.'}"
                )
            raise ImportError(message) from error


# Device -> the argument `replays` of `import_kernels`.
_REPLAYS: dict[str, Callable[..., Callable[[tuple[Any, ...]], Any]]] = {}


def import_kernels(device: str, package: str, path: list[str], replays: Any = None) -> None:
    """Import every module of a device's package.

    The kernels are installed together, at the end: another thread must not run a kernel whose
    module is still being imported. `run` checks a call and runs a kernel; `replays(run, arguments)`
    returns a function of the tuple of a call's arguments, which runs in place of it.
    """
    import_modules(package, path)
    if replays is not None:
        _REPLAYS[device] = replays
    for name, implementation in _LATE.get(device, {}).items():
        OPS[name].install[device](*implementation)
    _LATE.pop(device, None)


def _run_on_device(op: Op, device: str) -> None:
    """Register the function that runs `op` on `device`. It calls the kernel that the function
    `op.install[device]` sets, and until then imports the device's kernels.

    `custom_op.register_kernel` is not used: it takes 1 us per call to check that no output aliases
    an input. The tests check that for every kernel.
    """
    name = op.name
    types = [str(argument.type) for argument in op.schema.arguments]
    required = [i for i, type_ in enumerate(types) if type_ == "Tensor"]

    def load_and_run(call: Any) -> Any:
        load(device)
        if current[0] is load_and_run:
            raise NotImplementedError(f"{name}: there is no kernel for {device}")
        return run(*call)

    # A function and its flag `allocates`, in one tuple: `install` replaces both at once while other
    # threads run the op.
    current: tuple[Callable[..., Any], bool] = (load_and_run, True)
    replayed: Callable[[tuple[Any, ...]], Any] | None = None

    def install(function: Callable[..., Any], allocates: bool, module: str) -> None:
        nonlocal current, replayed
        current, run.__module__ = (function, allocates), module
        # Not for a kernel that allocates its outputs: it computes matrix products with PyTorch.
        if device in _REPLAYS and not allocates and "List[Tensor]" not in types:
            replayed = _REPLAYS[device](checked, op.schema.arguments)

    def run(*args: Any, plan: Any = None, **kwargs: Any) -> Any:
        if replayed is None or plan is not None or kwargs:
            return checked(*args, plan=plan, **kwargs)
        return replayed(args)

    @autograd.below
    def checked(*args: Any, plan: Any = None, **kwargs: Any) -> Any:
        call = op.arguments(*args, **kwargs)
        for i in required:
            if call[i] is None:
                op.refuse(args, kwargs)
        for value in call:
            if isinstance(value, Tensor) and value.dtype in DOUBLES:
                return op.check_and_define(*call)
        function, allocates = current
        if allocates:
            assert plan is None, f"{name}: a kernel that allocates takes no plan"
            return function(call)
        outputs = allocate(name, call)
        listed = outputs if isinstance(outputs, tuple) else (outputs,)
        if all(call[i].numel() for i in required):
            if any(output is not None for output in listed):
                function(call, *listed, plan)
        else:
            op.fill_without_rows(call, [call[i] for i in required], listed)
        return outputs

    op.custom_op._lib.impl(name, without_dynamo(run), DEVICES[device])
    op.kernels[device], op.install[device] = run, install
    if has(*AUTOGRAD):
        key = getattr(torch.DispatchKey, DEVICES[device])
        op.entries[torch.DispatchKeySet(key).raw_repr()] = run


def allocate(name: str, call: Any) -> Any:
    """Check the arguments of a call of op `name` and allocate its outputs."""
    fake = OPS[name].fake
    assert fake is not None, f"{name}: there is no fake"
    return fake(call)


def gradient(
    name: str,
    backward: Callable[..., tuple[Tensor | None, ...]] | None = None,
    setup_context: Callable[[Any, Any, Any], None] | None = None,
    formula: type[autograd.Formula] = autograd.Formula,
) -> None:
    """Register the autograd formula of op `name`, by default the one that is derived from the
    schema of `<name>_backward`, where `name` is without its suffix `_forward`.

    `setup_context(ctx, call, output)` saves what the backward reads. `backward(ctx, *grads)` can
    read `ctx.needs`, a named tuple of one bool for every argument; PyTorch's `ctx.needs_input_grad`
    lacks trailing arguments that have their default value. It returns the gradients of the
    arguments, and may leave out trailing ones that are None.
    """
    op = OPS[name]
    if backward is None:
        gradient_op = OPS[f"{name.removesuffix('_forward')}_backward"]
        op.formula = formula(op, gradient_op)
        op.backward, op.setup_context = op.formula.backward, op.formula.setup_context
    else:
        op.backward, op.setup_context = _with_named_needs(op, backward), setup_context


def _with_named_needs(op: Op, backward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a backward to read `ctx.needs` by the names of the op's arguments."""

    def run(ctx: Any, *grads: Any) -> Any:
        ctx.needs = op.arguments(*ctx.needs)
        return backward(ctx, *grads)

    return run


def import_modules(package: str, path: list[str]) -> None:
    """Import every module of a package: each registers its fakes or kernels when it is imported."""
    for module in pkgutil.walk_packages(path, f"{package}."):
        importlib.import_module(module.name)


def autocast(name: str, dtype: torch.dtype, keep: Collection[str] = ()) -> None:
    """Register op `name` to cast its floating-point arguments to `dtype` under autocast on cuda,
    npu and xpu, except those named in `keep`."""
    for key in AUTOCAST_KEYS.values():
        under_autocast(OPS[name], key, lambda value: autocast_value(value, dtype), keep)


def keep_dtypes_under_autocast(*names: str) -> None:
    """Register the ops of these names to run in the dtypes of their arguments under autocast.

    Otherwise autocast would act on the ATen ops that the definition and the kernels' host code
    call, and cast their float32 tensors.
    """
    for name, key in itertools.product(names, ("AutocastCPU", *AUTOCAST_KEYS.values())):
        under_autocast(OPS[name], key, lambda value: value)


def implementation(op: Op, device: str) -> str:
    """Return the implementation of `op` on `device`: its kernel's module, or "definition"."""
    if device not in op.kernels:
        return "definition"
    load(device)
    return op.kernels[device].__module__.removeprefix("liger_ops.")
