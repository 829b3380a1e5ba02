"""`liger_ops.invariant`: a context in which a row's bits do not depend on its batch."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor

from .. import invariant_mode
from ..library import DEVICES, DOUBLES
from . import attention, elementwise, products, reductions

if TYPE_CHECKING:
    from .coverage import Coverage, Inputs

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
    (
        "native_layer_norm_backward", "_fused_rms_norm_backward",
    ): reductions.layer_norm_backward,
    attention.FORWARDS: attention.forward,
    attention.BACKWARDS: attention.backward,
    (attention.REFUSED,): attention.refuse,
    (
        "convolution", "native_batch_norm", "_native_batch_norm_legit", "native_group_norm",
        "_scaled_mm", "_scaled_mm_v2", "_scaled_grouped_mm", "_scaled_grouped_mm_v2",
        "_weight_int4pack_mm", "_weight_int4pack_mm_for_cpu", "_weight_int8pack_mm",
        "_dyn_quant_matmul_4bit", "_addmm_activation", "addbmm", "_cdist_forward",
        "_native_multi_head_attention", "_transformer_encoder_layer_fwd", "_masked_softmax",
        "_flash_attention_forward", "_efficient_attention_forward",
        "_embedding_bag", "_cudnn_rnn", "mkldnn_rnn_layer", "_fft_r2c", "_fft_c2c", "_fft_c2r",
    ): products.refuse,
}  # fmt: skip
NUMBERS = (bool, int, float, complex)
_lock = threading.RLock()
_installed = ExitStack()


@overload
def invariant(model: None = None) -> AbstractContextManager[None]: ...
@overload
def invariant(model: torch.nn.Module, inputs: Inputs | None = None) -> Coverage: ...
def invariant(model: Any = None, inputs: Any = None) -> Any:
    """Give every row the same bits in every batch, in all threads of this process; or tell which
    modules of a model have them.

        with liger_ops.invariant():
            log_prob = model(tokens).logits.log_softmax(-1)

        print(liger_ops.invariant(model))

    Within the context a row of a batch, such as a token, has the same results and the same
    gradients, to the last bit, for any number of rows, in any order and with any strides: a
    sequence alone, among others, padded on either side, packed with others, or the prefix of a
    longer one. So a trainer's log-probabilities can be the sampler's. Gradients of weights are sums
    over rows, which depend on the batch; they have a fixed order.

    Covered, eagerly and after `liger_ops.fuse`, on a GPU and a CPU, are

    * the ops of this package, but multi_token_attention, whose convolution is PyTorch's;
    * PyTorch's matrix products, also those of experts, and its sums, means, variances, norms and
      softmaxes along axes behind the first. Each is tried with random rows at its first use with
      new columns, for some milliseconds, and computed in the cheapest way that holds: as it is,
      with 64 rows or more, by a kernel of this package, or in blocks of 64 rows;
    * scaled_dot_product_attention without a mask or dropout; and, in a model after `fuse` or
      `torch.compile`, with padding, windows and packed documents. Both are `varlen_attention` by
      its engine "triton";
    * in a model after `fuse`, queries that follow a cache, also one of a sliding window: a token of
      `generate` has the bits that it has in the whole sequence. It costs the attention of all
      tokens so far.

    Functions of `torch.compile`, whatever their backend, are compiled anew: with all rewrites of
    the backend `liger`, and then operator by operator, because Inductor divides sums by the size of
    the batch. After the context the code from before it is used again.

    What cannot be computed so is refused by name: other masks, convolutions, batch and group norms.
    Attention that a model
    computes with products of its own is not noticed, because its sums are ordinary products; the
    report finds it. Elementwise operators are covered on a CPU and trusted on a GPU. Scatters and
    index_add keep PyTorch's order, which is not fixed on a GPU unless
    `torch.use_deterministic_algorithms` says so.

    The bits are those of one device and one version of PyTorch: a fused model may have others than
    the model before `fuse`. Contexts nest; the last one that ends restores PyTorch's operators and
    settings. `liger_ops.enable(invariant=True)` opens one for the process.

    On an NPU the same operators are replaced; that was never run on one.

    Args:
        model: a model to report on; its modules run within the context, twice, without gradients.
        inputs: for a model that does not take `input_ids`: a function of a number of tokens that
            returns the keyword arguments of a call with one sequence of so many.

    Returns:
        The context manager; or with a model a `Coverage`, whose string lists the modules that are
        not covered, and why.

    Raises:
        NotInvariantError: within the context, an operation is not covered. It is a RuntimeError.
        TypeError: model is not a module.

    Source: He and Thinking Machines Lab, "Defeating Nondeterminism in LLM Inference", 2025.

    Example:
        >>> layer, x = torch.nn.Linear(8, 8), torch.randn(100, 8)
        >>> with liger_ops.invariant():
        ...     torch.equal(layer(x)[:1], layer(x[:1]))
        True
    """
    if model is None:
        return _context()
    from .coverage import coverage

    return coverage(model, inputs)


@contextmanager
def _context() -> Iterator[None]:
    _change(1)
    try:
        yield
    finally:
        _change(-1)


invariant_mode.context = _context


def _change(change: int) -> None:
    global _installed
    with _lock:
        is_open, stays_open = invariant_mode.is_invariant(), invariant_mode.count(change) > 0
        if stays_open and not is_open:
            try:
                _installed = _install()
            except BaseException:
                invariant_mode.count(-change)
                raise
        elif not stays_open:
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
        _split_no_sums(stack)
        if torch.cuda.is_available():
            stack.callback(
                torch.backends.cuda.preferred_blas_library,
                torch.backends.cuda.preferred_blas_library(),
            )
            torch.backends.cuda.preferred_blas_library("cublaslt")
        stack.enter_context(torch.compiler.set_stance(force_backend=_backend))
        return stack.pop_all()


def _backend(module: Any, example_inputs: Any) -> Any:
    from ..rewrites.invariant_backend import invariant_backend

    return invariant_backend(module, example_inputs)


def _keys() -> Iterator[str]:
    yield "CPU"
    if torch.cuda.is_available():
        yield DEVICES["cuda"]
    if hasattr(torch, "npu") and torch.npu.is_available():
        yield DEVICES["npu"]


def _split_no_sums(stack: ExitStack) -> None:
    """Let cuBLASLt split no sum.

    Dynamo guards code by these settings, on a machine without a GPU too. Without that, code from
    before the context could run within it: in the stance "eager_on_recompile" Dynamo does not ask
    which backend made its code.
    """
    matmul: Any = torch.backends.cuda.matmul
    for dtype in ("fp16", "bf16"):
        name = f"allow_{dtype}_reduced_precision_reduction"
        before = (getattr(matmul, name), getattr(matmul, f"{name}_split_k"))
        stack.callback(setattr, matmul, name, before)
        setattr(matmul, name, (False, False))


def _replace(library: Any, key: str) -> None:
    elementwise_too = {tuple(elementwise.operators()): elementwise.by_elements}
    for names, function in (REPLACED | (elementwise_too if key == "CPU" else {})).items():
        for name in names:
            packet, _, which = name.partition(".")
            # Some are not in every version of PyTorch.
            overload = getattr(getattr(torch.ops.aten, packet, None), which or "default", None)
            refused = function is attention.refuse
            if overload is not None and (refused or _has_kernel(overload, key)):
                _replace_operator(library, key, overload, function)


def _has_kernel(overload: Any, key: str) -> bool:
    """Return whether an operator has a kernel that runs below autograd."""
    keys = (getattr(torch.DispatchKey, name) for name in (key, "CompositeExplicitAutograd"))
    return any(overload.has_kernel_for_dispatch_key(each) for each in keys)


def _replace_operator(library: Any, key: str, overload: Any, function: Callable[..., Any]) -> None:
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
    for name in () if in_place is None else in_place.overloads():
        form = getattr(in_place, name)
        if _typed_arguments(form) == arguments:
            yield form


def _typed_arguments(overload: Any) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.type)) for argument in overload._schema.arguments]


def _implementation(
    function: Callable[..., Any], overload: Any, kernel: Any, form: Any, kernel_of_form: Any
) -> Callable[..., Any]:
    is_in_place = form._schema.name.endswith("_")
    tensors = [str(argument.type) == "Tensor" for argument in form._schema.arguments]
    (out_name,) = [a.name for a in form._schema.arguments if a.is_out] or [None]

    def run(keyset: Any, *args: Any, **options: Any) -> Any:
        # A number comes as one where the operator takes a tensor.
        numbers = [i for i, value in enumerate(args) if tensors[i] and isinstance(value, NUMBERS)]
        args = tuple(_scalar(x, args) if i in numbers else x for i, x in enumerate(args))
        given = {name: value for name, value in options.items() if name != out_name}
        out: Tensor | None = args[0] if is_in_place else options.get(out_name)

        def of_pytorch() -> Any:
            return kernel_of_form.call_boxed(keyset, *args, **options)

        results: Any = NotImplemented
        if not (invariant_mode.as_they_are.depth or _is_elsewhere(out, args)):
            own = kernel if out_name is None else kernel_of_form
            base = _OfPyTorch(keyset, own, args, out_name, options.get(out_name))
            results = function(overload, base, *args, **given)
        if results is NotImplemented:
            return of_pytorch()
        if out is None or results is out:
            return results
        if (out.dtype, out.shape) != (results.dtype, results.shape):
            # PyTorch raises, or gives out its shape, with its own messages.
            of_pytorch()
        return out.copy_(results)

    return run


@dataclass
class _OfPyTorch:
    """PyTorch's own function of an operator.

    Where the call has an `out`, it is that of the operator's form with one: PyTorch checks the
    dtype of `out`, and computes some sums in it.
    """

    keyset: Any
    kernel: Any
    args: tuple[Any, ...]
    out_name: str | None
    out: Tensor | None

    @property
    def out_dtype(self) -> torch.dtype | None:
        return None if self.out is None else self.out.dtype

    def __call__(self, /, *operands: Any, **given: Any) -> Any:
        # In a trial results are compared with each other, and must not share memory.
        is_trial = bool(invariant_mode.as_they_are.depth)
        with invariant_mode.as_they_are:
            if self.out_name is not None and self.out is not None:
                is_result = not is_trial and _is_result(self.out, operands, self.args)
                given[self.out_name] = self.out if is_result else self.out.new_empty(0)
            return self.kernel.call_boxed(self.keyset, *operands, **given)


def _is_elsewhere(out: Tensor | None, args: tuple[Any, ...]) -> bool:
    """Return whether `out` is on another device than a tensor with axes."""
    return out is not None and any(
        isinstance(x, Tensor) and x.dim() > 0 and x.device != out.device for x in args
    )


def _is_result(out: Tensor, operands: tuple[Any, ...], args: tuple[Any, ...]) -> bool:
    """Return whether the product of these operands may be computed in the memory of the call's
    `out`: it is that of the call, and `out` is as a new tensor would be, and no factor."""
    given, tensors = ([x for x in xs if isinstance(x, Tensor)] for xs in (args, operands))
    is_new = out.is_contiguous() and out.storage_offset() == 0 and out.numel() > 0
    if not is_new or len(given) < 2 or [x.shape for x in given] != [x.shape for x in tensors]:
        return False
    *added, a, b = tensors
    dtype = next((x for x in operands if isinstance(x, torch.dtype)), a.dtype)
    memory = out.untyped_storage().data_ptr()
    return (
        (a.dim(), b.dim(), out.dtype) == (2, 2, dtype)
        and out.shape == (a.shape[0], b.shape[1])
        and all(x.untyped_storage().data_ptr() != memory for x in (a, b))
        # out may be what is added, in place.
        and all(x is out or x.untyped_storage().data_ptr() != memory for x in added)
    )


def _scalar(number: Any, args: tuple[Any, ...]) -> Tensor:
    """Return a number as a tensor that promotes the dtypes of others no more than the number
    does."""
    is_double = any(isinstance(x, Tensor) and x.dtype in DOUBLES for x in args)
    if isinstance(number, float):
        return torch.tensor(number, dtype=torch.float64 if is_double else None)
    return torch.tensor(number)
