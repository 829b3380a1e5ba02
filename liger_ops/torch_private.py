"""The private parts of PyTorch that liger_ops uses: one entry each, with its use.

`from .torch_private import FakeTensor` looks the part up, and imports its module, when the name is
first used. If this torch lacks the part, a warning names the part and the feature that is off. The
part is then replaced by a value that selects a more general way of computing the same, or by
`Lacking`, which raises when it is used. tests/project/test_torch_private.py removes each part in
turn, and tests/project/test_layout.py finds private parts that are used elsewhere.
"""

from __future__ import annotations

import contextlib
import itertools
import pkgutil
import sys
import types
import warnings
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F


class Part(NamedTuple):
    """A private part: its path, the feature that is off without it, and the value that replaces it,
    by default `Lacking`."""

    path: str
    off: str
    instead: Any = None


class Lacking:
    """A part that this torch lacks: each use raises RuntimeError with its name."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"liger_ops: torch {torch.__version__} has no {self._path}")

    def __getattr__(self, name: str) -> Any:
        return self()


class _NoTensor:
    """In place of a class of tensors: nothing is an instance of it."""


class _NeverRaised(Exception):
    """In place of an exception."""


def _empty_strided_cuda(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="cuda")


def _wrapper_subclass(cls: type, size: Any, *, dtype: Any, device: Any) -> torch.Tensor:
    return torch.full((), float("nan"), dtype=dtype, device=device).expand(size).as_subclass(cls)


_KERNELS = "the autograd kernels of the ops: PyTorch's own, which are slower, run the formulas"
_NO_HANDING_OVER = "the reuse of a gradient's memory; autograd saves it instead"
_TRACES = "`fuse` of modules that are recognised by tracing, which raises"
_REWRITES = "the rewrites of the backend, which leave every graph as it is"
_FLEX = "the rewrites that use flex_attention, which leave every graph as it is"
_MASKS = 'backend="liger" of models with masks, which raises'
_BACKEND = 'backend="liger", which raises'

PARTS = {
    # For the Autograd kernel of an op, 3 to 30 us faster than torch.library.register_autograd's.
    # Below ADInplaceOrView too: a result of a definition that is a view of another tensor is not
    # tracked as a view.
    "BelowAutograd": Part("torch._C:_AutoDispatchBelowADInplaceOrView", _KERNELS),
    "after_autograd_keyset": Part("torch._C:_after_autograd_keyset", _KERNELS),
    "any_requires_grad": Part("torch._C:_any_requires_grad", _KERNELS),
    # Keep Dynamo out of an op's own code.
    "eval_frame": Part(
        "torch._C._dynamo.eval_frame",
        "fast calls of ops: torch.compiler.disable takes 2 us of each, and imports Dynamo",
        types.SimpleNamespace(),
    ),
    # Allocates on the current GPU, 1 us faster than torch.empty_strided.
    "empty_strided_cuda": Part(
        "torch._C._dynamo.guards:_empty_strided_cuda", "fast allocations", _empty_strided_cuda
    ),
    # Launches kernels that Triton compiled, in builds for CUDA.
    "StaticCudaLauncher": Part(
        "torch._C:_StaticCudaLauncher", "fast launches: Triton's launcher takes 2 us more"
    ),
    # Whether the memory of a gradient that the forward computed may be reused by the backward: not
    # if torch.func, a mode or hooks of saved tensors have to see the gradient.
    "are_functorch_transforms_active": Part(
        "torch._C:_are_functorch_transforms_active", _NO_HANDING_OVER, lambda: True
    ),
    "len_torch_dispatch_stack": Part(
        "torch._C:_len_torch_dispatch_stack", _NO_HANDING_OVER, lambda: 1
    ),
    "top_saved_tensors_default_hooks": Part(
        "torch._C._autograd:_top_saved_tensors_default_hooks", _NO_HANDING_OVER, lambda _: "unknown"
    ),
    # PyTorch's own functions, which DeepSpeed and context_parallel replace by theirs.
    "native_linear": Part("torch._C._nn:linear", "`fuse` within DeepSpeed's zero.Init", F.linear),
    # Dynamo writes the call of F.grouped_mm as one of this function.
    "native_grouped_mm": Part("torch:_grouped_mm", "the rewrite of grouped experts", F.grouped_mm),
    "native_attention": Part(
        "torch._C._nn:scaled_dot_product_attention",
        "attention of fused models within context_parallel",
        F.scaled_dot_product_attention,
    ),
    # For the logits that `fuse` does not compute, which are a tensor subclass.
    "make_wrapper_subclass": Part(
        "torch:Tensor._make_wrapper_subclass",
        "the error of C++ code that is given skipped logits, which reads NaNs",
        _wrapper_subclass,
    ),
    # Calls of a module's own code while something else is traced or recomputed.
    "disable_current_modes": Part(
        "torch.utils._python_dispatch:_disable_current_modes",
        "layers of the kernels hub while a model is exported: they run the model's own code",
        contextlib.nullcontext,
    ),
    # What calls functions when torch.compile begins to compile, and when it ends.
    "compilation_callbacks": Part(
        "torch._dynamo.callback:callback_handler",
        "compiling one model while `bench report` measures another: it takes longer",
        types.SimpleNamespace(
            register_start_callback=lambda _: None, register_end_callback=lambda _: None
        ),
    ),
    # Tracing on tensors without data, and the values of nodes in a graph.
    "FakeTensorMode": Part("torch._subclasses.fake_tensor:FakeTensorMode", _TRACES),
    "FakeTensor": Part("torch._subclasses.fake_tensor:FakeTensor", _REWRITES, _NoTensor),
    "DataDependentOutputException": Part(
        "torch._subclasses.fake_tensor:DataDependentOutputException",
        "torch.compile of experts on a CPU, which raises",
        _NeverRaised,
    ),
    # Find out what the call of a node writes to, from the schemas of the operators that it runs.
    "TorchDispatchMode": Part("torch.utils._python_dispatch:TorchDispatchMode", _REWRITES, object),
    "enable_python_dispatcher": Part("torch._dispatch.python:enable_python_dispatcher", _REWRITES),
    # The kind of nodes that call subgraphs.
    "HigherOrderOperator": Part("torch._ops:HigherOrderOperator", _REWRITES),
    # Nested tensors, which ops refuse, and whether flex_attention can compile.
    "NestedTensor": Part(
        "torch.nested._internal.nested_tensor:NestedTensor",
        "the message about nested tensors; PyTorch raises its own",
        _NoTensor,
    ),
    "has_triton": Part(
        "torch.utils._triton:has_triton", "attention by blocks in fused models", lambda: False
    ),
    # Collectives that torch.compile traces, and the classes of DTensor's sharding rules.
    "functional_collectives": Part(
        "torch.distributed._functional_collectives", "liger_ops.distributed, which raises"
    ),
    "op_schema": Part(
        "torch.distributed.tensor._op_schema", "the sharding rules of DTensor, which raise"
    ),
    "StridedShard": Part(
        "torch.distributed.tensor.placement_types:_StridedShard",
        "packed gates of DTensors whose devices have both halves, which raise",
    ),
    # Around an op in a graph that autocast covers.
    "enter_autocast": Part("torch.amp.autocast_mode:_enter_autocast", _REWRITES),
    "exit_autocast": Part("torch.amp.autocast_mode:_exit_autocast", _REWRITES),
    # Flex attention as a node of a graph.
    "flex_attention": Part("torch._higher_order_ops.flex_attention:flex_attention", _FLEX),
    "flex_attention_fake_impl": Part(
        "torch._higher_order_ops.flex_attention:flex_attention_fake_impl", _FLEX
    ),
    "apply_kernel_options": Part("torch.nn.attention.flex_attention:_apply_kernel_options", _FLEX),
    # The context of a compilation, kept for a second variant of a graph, compiled at a later call.
    "TracingContext": Part("torch._guards:TracingContext", _MASKS),
    "tracing": Part("torch._guards:tracing", _MASKS),
    "assert_async": Part("torch:_assert_async", 'options={"padding": False}, which raises'),
    # Dynamo and Inductor.
    "disable_saved_tensors_hooks": Part(
        "torch._dynamo.utils:_disable_saved_tensors_hooks_during_tracing", _REWRITES
    ),
    "counters": Part(
        "torch._dynamo.utils:counters", "the graph breaks of `explain`", {"graph_break": {}}
    ),
    "CompileInductorWrapper": Part("torch:_TorchCompileInductorWrapper", _BACKEND),
    "CompileWrapper": Part(
        "torch:_TorchCompileWrapper",
        'options={"inner_backend": ...}, and `explain(verify=True)`, which raise',
    ),
    "reset_cudagraph_trees": Part(
        "torch._inductor.cudagraph_trees:reset_cudagraph_trees",
        "the reset of CUDA graphs by torch.compiler.reset",
        lambda: None,
    ),
    "inductor": Part("torch._inductor.compile_fx", "`enable`, which raises"),
    "inductor_config": Part(
        "torch._inductor.config", "`enable`, and Inductor's options, which raise"
    ),
    "inductor_patterns": Part(
        "torch._inductor.pattern_matcher",
        "compiled definitions; on a device without kernels, compiled code calls the ops",
    ),
    # Whether Inductor compiles a package, and ShapeEnv's check before it adds a guard on a size.
    "inductor_state": Part(
        "torch._inductor.virtualized:V",
        "the kernels in packages of AOTInductor, which need liger_ops on a GPU",
        types.SimpleNamespace(aot_compilation=False),
    ),
    "check_frozen": Part(
        "torch.fx.experimental.symbolic_shapes:ShapeEnv._check_frozen",
        "the kernels in packages of AOTInductor with dynamic sizes, which have definitions",
    ),
    "CustomGraphPass": Part(
        "torch._inductor.custom_graph_pass:CustomGraphPass",
        "Inductor's caches with `graph_pass` and `enable`",
        object,
    ),
    # The decompositions of torch.onnx.export.
    "onnx_table": Part(
        "torch.onnx._internal.exporter._decomp:create_onnx_friendly_decomposition_table",
        "torch.onnx.export of programs that `liger_ops.decompositions` has not decomposed",
    ),
    "functorch_config": Part(
        "torch._functorch.config",
        "recomputation by torch's activation_memory_budget",
        types.SimpleNamespace(activation_memory_budget=1),
    ),
}
AUTOGRAD = ("BelowAutograd", "after_autograd_keyset", "any_requires_grad")


def __getattr__(name: str) -> Any:
    if name not in PARTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    part = PARTS[name]
    try:
        value = pkgutil.resolve_name(part.path)
    except (ImportError, AttributeError):
        path = part.path.replace(":", ".")
        warnings.warn(
            f"liger_ops: torch {torch.__version__} has no {path}, without which this is off:"
            f" {part.off}",
            stacklevel=2,
        )
        value = Lacking(path) if part.instead is None else part.instead
    globals()[name] = value
    return value


def has(*names: str) -> bool:
    """Return whether this torch has each of these parts."""
    parts = (globals().get(name) or __getattr__(name) for name in names)
    return not any(isinstance(part, Lacking) for part in parts)


def without_dynamo(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a function for Dynamo, which then compiles neither it nor any function that it calls."""
    frames = globals().get("eval_frame") or __getattr__("eval_frame")
    try:
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    except AttributeError:
        return torch.compiler.disable(function)
    return function


def after_import(name: str, extend: Callable[[Any], object]) -> None:
    """Call `extend` with the module of this name: now if it has been imported, or else right after
    its import. It is for modules of PyTorch that take long to import."""
    if name in sys.modules:
        extend(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Finder(name, extend))


class _Finder(MetaPathFinder):
    """A finder that calls `extend` after the import of a module, and once, although `find_spec` may
    be called without an import before, as by `importlib.util.find_spec`."""

    def __init__(self, name: str, extend: Callable[[Any], object]) -> None:
        self.name, self.extend = name, extend

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != self.name:
            return None
        # The finders behind this one, which know where the module is.
        later = [*itertools.dropwhile(lambda finder: finder is not self, sys.meta_path)][1:]
        specs = (finder.find_spec(name, path, target) for finder in later)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_extend(module: Any) -> None:
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self.extend(module)

        spec.loader.exec_module = execute_and_extend  # type: ignore[method-assign]
        return spec
