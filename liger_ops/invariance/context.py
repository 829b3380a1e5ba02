"""`liger_ops.invariant`: a context in which a row's bits do not depend on its batch."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from ..library import DEVICES, DOUBLES
from . import attention, elementwise, products, reductions, state

# Operators of ATen -> the function that replaces them. It takes the operator, the operator's own
# function, and the arguments, and returns NotImplemented where that function is to be called.
REPLACED: dict[tuple[str, ...], Callable[..., Any]] = {
    ("mm", "mm.dtype"): products.mm,
    ("addmm", "addmm.dtype"): products.addmm,
    ("bmm", "bmm.dtype"): products.bmm,
    ("baddbmm", "baddbmm.dtype"): products.baddbmm,
    ("mv",): products.mv,
    ("addmv",): products.addmv,
    ("_grouped_mm",): products.grouped_mm,
    (
        "sum.dim_IntList", "nansum", "mean.dim", "prod.dim_int", "logsumexp",
        "var.correction", "std.correction", "var_mean.correction", "std_mean.correction",
        "linalg_vector_norm", "norm.ScalarOpt_dim", "norm.ScalarOpt_dim_dtype",
        "cumsum", "cumprod", "logcumsumexp",
        "_softmax", "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data",
    ): reductions.along_axes,
    ("native_layer_norm", "_fused_rms_norm"): reductions.layer_norm,
    attention.FORWARDS: attention.forward,
    attention.BACKWARDS: attention.backward,
    (attention.REFUSED,): attention.refuse,
}  # fmt: skip
# Whether this thread runs an operator's own function, whose operators are as they are: what it gives
# was tried as a whole.
_within = threading.local()
_lock = threading.RLock()
_installed = ExitStack()


@contextmanager
def invariant() -> Iterator[None]:
    """Give every row the same bits in every batch, in all threads of this process.

        with liger_ops.invariant():
            log_prob = model(tokens) ...

    A row of a batch, such as a token, then has the same results and gradients, to the last bit, for
    any number of rows, in any order, and for any strides: a sequence alone, among others, padded
    on either side, or packed with others. So a trainer's log-probabilities can be the sampler's.

    Covered are, eagerly and after `liger_ops.fuse`, on GPUs and CPUs:

    * all ops of this package; their gradients of weights are sums over rows, with a fixed order;
    * PyTorch's matrix products, grouped products of experts too, and its sums, means, variances,
      norms and softmaxes along axes behind the first. Each is tried with random rows at its first
      use with new columns, which takes some milliseconds: see `liger_ops.invariance.rows`;
    * scaled_dot_product_attention without a mask, and, of a fused model, with the masks of padding,
      windows and packed documents, by the kernels of `varlen_attention`.

    What is covered by no way is refused by name. It is not noticed where code computes attention
    with products of its own: its sums are as long as the batch's rows. Convolutions and batch norms
    are as they are. The numbers are those of one machine and one process: another GPU, or another
    version of PyTorch, may have others.

    Functions of `torch.compile` run uncompiled within it. Contexts nest, and the last one that ends
    restores PyTorch's settings.

    Raises:
        NotInvariantError: within the context, an operation has no way that gives a row the same
            bits in every batch; a RuntimeError.

    Source: He and Thinking Machines Lab, "Defeating Nondeterminism in LLM Inference", 2025.
    """
    _change(1)
    try:
        yield
    finally:
        _change(-1)


def _change(change: int) -> None:
    global _installed
    with _lock:
        if state.count(change) == (1 if change > 0 else 0):
            if change > 0:
                _installed = _install()
            else:
                _installed.close()


def _install() -> ExitStack:
    """Replace operators and settings. Closing the result restores them."""
    with ExitStack() as stack:
        library = torch.library.Library("aten", "IMPL")
        stack.callback(library._destroy)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Warning only once for all operators")
            for key in _keys():
                _replace(library, key)
        if torch.cuda.is_available():
            _choose_products(stack)
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        return stack.pop_all()


def _keys() -> Iterator[str]:
    yield "CPU"
    if torch.cuda.is_available():
        yield DEVICES["cuda"]
    if hasattr(torch, "npu") and torch.npu.is_available():
        yield DEVICES["npu"]


def _choose_products(stack: ExitStack) -> None:
    """Let cuBLASLt multiply matrices, and split no sum."""
    matmul: Any = torch.backends.cuda.matmul
    for dtype in ("fp16", "bf16"):
        name = f"allow_{dtype}_reduced_precision_reduction"
        before = (getattr(matmul, name), getattr(matmul, f"{name}_split_k"))
        stack.callback(setattr, matmul, name, before)
        setattr(matmul, name, (False, False))
    before = torch.backends.cuda.preferred_blas_library()
    stack.callback(torch.backends.cuda.preferred_blas_library, before)
    torch.backends.cuda.preferred_blas_library("cublaslt")


def _replace(library: Any, key: str) -> None:
    elementwise_too = {tuple(elementwise.operators()): elementwise.by_elements}
    for names, function in (REPLACED | (elementwise_too if key == "CPU" else {})).items():
        for name in names:
            packet, _, which = name.partition(".")
            overload = getattr(getattr(torch.ops.aten, packet), which or "default", None)
            refused = function is attention.refuse
            if overload is not None and (refused or _has_kernel(overload, key)):
                _replace_operator(library, key, overload, function)


def _has_kernel(overload: Any, key: str) -> bool:
    """Return whether an operator has a kernel that runs below autograd."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return has(overload.name(), key) or has(overload.name(), "CompositeExplicitAutograd")


def _replace_operator(
    library: Any, key: str, overload: Any, function: Callable[..., Any]
) -> None:
    """Replace an operator, and its forms that write to `out` or to their first argument."""
    for form in _forms(overload):
        if not _has_kernel(form, key) and function is not attention.refuse:
            continue
        name = form.name()
        implementation = _implementation(
            function, overload, _kernel(overload, key), form, _kernel(form, key)
        )
        library.impl(name, implementation, key, with_keyset=True, allow_override=True)


def _kernel(overload: Any, key: str) -> Any:
    return torch.library.get_kernel(overload.name(), key)


def _forms(overload: Any) -> Iterator[Any]:
    yield overload
    arguments = _typed_arguments(overload)
    packet = overload.overloadpacket
    for name in packet.overloads():
        form = getattr(packet, name)
        outs = [argument for argument in form._schema.arguments if argument.is_out]
        if len(outs) == 1 and _typed_arguments(form)[:-1] == arguments:
            yield form
    in_place = getattr(torch.ops.aten, f"{packet.__name__}_", None)
    if in_place is not None and overload._overloadname in in_place.overloads():
        yield getattr(in_place, overload._overloadname)


def _typed_arguments(overload: Any) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.type)) for argument in overload._schema.arguments]


def _implementation(
    function: Callable[..., Any], overload: Any, kernel: Any, form: Any, kernel_of_form: Any
) -> Callable[..., Any]:
    is_in_place = form._schema.name.endswith("_")
    tensors = [str(argument.type) == "Tensor" for argument in form._schema.arguments]
    writes_out = any(argument.is_out for argument in form._schema.arguments)

    def run(keyset: Any, *args: Any, **options: Any) -> Any:
        # A number comes as one where the operator takes a tensor.
        numbers = [i for i, value in enumerate(args) if tensors[i] and not isinstance(value, Tensor)]
        args = tuple(_scalar(x, args) if i in numbers else x for i, x in enumerate(args))
        given = {name: value for name, value in options.items() if name != "out"}

        def base(*args: Any, **options: Any) -> Any:
            before, _within.base = getattr(_within, "base", False), True
            try:
                return kernel.call_boxed(keyset, *args, **options)
            finally:
                _within.base = before

        results: Any = NotImplemented
        if not getattr(_within, "base", False):
            results = function(overload, base, *args, **given)
        if results is NotImplemented:
            return kernel_of_form.call_boxed(keyset, *args, **options)
        if not is_in_place and not writes_out:
            return results
        out: Tensor = options["out"] if writes_out else args[0]
        if out.shape != results.shape:
            out.resize_(results.shape)
        return out.copy_(results)

    return run


def _scalar(number: Any, args: tuple[Any, ...]) -> Tensor:
    """Return a number as a tensor that promotes the dtypes of others no more than the number
    does."""
    is_double = any(isinstance(x, Tensor) and x.dtype in DOUBLES for x in args)
    if isinstance(number, float):
        return torch.tensor(number, dtype=torch.float64 if is_double else None)
    return torch.tensor(number)
