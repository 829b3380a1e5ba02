"""A simulated `npu` device: PrivateUse1, with CPU memory, and Triton's interpreter for kernels.

It computes a device's results at the speed of a CPU, so that nothing can be measured on it:
`is_simulated` tells this to the bench.

An npu tensor is a plain tensor with an empty storage; its values are in a CPU tensor that is looked
up by that storage. ATen ops run on the CPU tensors. Ops of other namespaces are refused unless they
have an npu kernel or a definition of their own, so that a missing kernel fails instead of running
another device's.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from triton.runtime.interpreter import GridExecutor


class _DeviceModule:
    """Stands for torch.npu, as torch_npu defines it."""

    is_simulated = True

    def is_available(self) -> bool:
        return active

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        pass

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.zeros(8, dtype=torch.uint8)

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        pass

    # The bench uses the rest. Streams and graphs run their work at once.

    def get_device_name(self, device: Any = None) -> str:
        return "a simulated NPU"

    def synchronize(self) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def mem_get_info(self) -> tuple[int, int]:
        return 2**20, 2**20

    def memory_allocated(self) -> int:
        return 0

    def max_memory_allocated(self) -> int:
        return 0

    def reset_peak_memory_stats(self) -> None:
        pass

    def Event(self, enable_timing: bool = False) -> _Event:
        return _Event()

    def Stream(self) -> _Stream:
        return _Stream()

    def current_stream(self) -> _Stream:
        return _Stream()

    @contextmanager
    def stream(self, stream: _Stream) -> Iterator[None]:
        yield

    def NPUGraph(self) -> _Graph:
        return _Graph()

    @contextmanager
    def graph(self, graph: _Graph) -> Iterator[None]:
        yield


class _Event:
    def record(self) -> None:
        pass

    def elapsed_time(self, end: _Event) -> float:
        return 1.0


class _Stream:
    def wait_stream(self, stream: _Stream) -> None:
        pass


class _Graph:
    def replay(self) -> None:
        pass


class _Generator(torch.Generator):
    """A generator on the CPU: PyTorch has none for a device that is written in Python."""

    def __new__(cls, device: Any = "cpu") -> torch.Generator:
        return super().__new__(cls, "cpu" if device == "npu" else device)


# Whether the device is visible: other tests of the process must find a machine without an npu.
active = False
# Storage of an npu tensor -> the CPU tensor with its values.
_values: dict[int, torch.Tensor] = {}
# The kernels that have been launched since `forget`.
launched: list[str] = []
# Memory of a copy -> the copy, and the view that it was made from.
_copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}


@contextmanager
def visible() -> Iterator[None]:
    """Let the process find the device, with no kernels launched and no copies held."""
    global active
    generator = torch.Generator
    active, torch.Generator = True, _Generator
    forget()
    try:
        yield
    finally:
        active, torch.Generator = False, generator
        forget()


def to_npu(value: Any) -> Any:
    """Return a CPU tensor as an npu tensor; they share memory if the CPU tensor is contiguous.

    An npu tensor is contiguous. The values of a non-contiguous view are in a copy, which is written
    back to the view after each kernel that takes it, and after each op that writes to it.
    """
    if not isinstance(value, torch.Tensor) or value.device.type != "cpu":
        return value
    tensor = torch._C._acc.create_empty_tensor(tuple(value.shape), value.dtype)
    storage = tensor.untyped_storage()
    held = value.detach().contiguous()
    if held.data_ptr() != value.data_ptr():
        _copies[held.untyped_storage().data_ptr()] = (held, value.detach())
    _values[storage._cdata] = held
    weakref.finalize(storage, _values.pop, storage._cdata, None)
    return tensor


def forget() -> None:
    """Reset before a test: no kernels launched, no copies held."""
    launched.clear()
    _copies.clear()


def _write_back(written: Iterable[Any]) -> None:
    """Write the changed copies of views back to the views."""
    for value in written:
        if isinstance(value, torch.Tensor):
            held, view = _copies.get(value.untyped_storage().data_ptr(), (None, None))
            # An expanded view cannot be written to, and nothing writes to one.
            if held is not None and not torch.equal(held, view):
                view.copy_(held)


def to_cpu(value: Any) -> Any:
    """Return the CPU tensor with the values of an npu tensor; another value as it is."""
    if isinstance(value, torch.Tensor) and value.device.type == "npu":
        return _values[value.untyped_storage()._cdata]
    if isinstance(value, torch.device) and value.type == "npu":
        return torch.device("cpu")
    return value


def _on_cpu(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run an op on the CPU tensors of npu tensors."""
    arguments = (args, kwargs)
    on_cpu = pytree.tree_map(to_cpu, arguments)
    outputs = op(*on_cpu[0], **on_cpu[1])
    if op._schema.is_mutable:
        _write_back(pytree.tree_leaves(on_cpu))
    # An op that returns its argument, such as an out= variant, must return that npu tensor.
    same = {
        id(cpu): npu
        for cpu, npu in zip(pytree.tree_leaves(on_cpu), pytree.tree_leaves(arguments), strict=True)
        if isinstance(cpu, torch.Tensor)
    }
    return pytree.tree_map(lambda output: same.get(id(output), to_npu(output)), outputs)


def _fallback(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a PyTorch op on the CPU. Raises: NotImplementedError for an op of another namespace."""
    if op.namespace not in ("aten", "prims"):
        raise NotImplementedError(f"{op} has no npu kernel")
    return _on_cpu(op, *args, **kwargs)


def _empty(size: Any, dtype: Any = None, **options: Any) -> torch.Tensor:
    return to_npu(torch.empty(size, dtype=dtype))


def _empty_strided(size: Any, stride: Any, dtype: Any = None, **options: Any) -> torch.Tensor:
    return to_npu(torch.empty(size, dtype=dtype))


def _copy_from(source: Any, target: Any, non_blocking: bool = False) -> Any:
    _write_back([to_cpu(target).copy_(to_cpu(source))])
    return target


_OWN = {"empty.memory_format": _empty, "empty_strided": _empty_strided, "_copy_from": _copy_from}
# Ops that are composed of those above: their kernels are right for any device.
_COMPOSITE = {"detach", "alias", "_to_copy", "copy_", "_local_scalar_dense"}
_libraries: list[torch.library.Library] = []


def install() -> None:
    """Create the device; call before the first backward, at which autograd counts devices."""
    _setup_privateuseone_for_python_backend("npu", backend_module=_DeviceModule())
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(_fallback, "PrivateUse1")
    # As in torch_npu, autocast ignores ops that have no rule of their own.
    everything.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    aten = torch.library.Library("aten", "IMPL")
    _libraries.extend([everything, aten])
    for name, kernel in _OWN.items():
        aten.impl(name, kernel, "PrivateUse1")
    # ATen's kernels for all devices take precedence over a fallback, but would use empty storages.
    for qualified in torch._C._dispatch_get_all_op_names():
        namespace, _, name = qualified.partition("::")
        if namespace != "aten" or name in _OWN or name in _COMPOSITE:
            continue
        key = "CompositeExplicitAutograd"
        if torch._C._dispatch_has_kernel_for_dispatch_key(qualified, key):
            packet, _, overload = name.partition(".")
            op = getattr(getattr(torch.ops.aten, packet), overload or "default", None)
            if op is not None:
                aten.impl(name, partial(_on_cpu, op), "PrivateUse1")
    _interpret_npu_tensors()


def _interpret_npu_tensors() -> None:
    """Let the interpreter find an npu tensor's values, and record the kernels that it runs."""
    run = GridExecutor.__call__

    def call(self: GridExecutor, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(arg, torch.Tensor) and arg.device.type == "npu" for arg in args):
            launched.append(f"{self.fn.__module__}.{self.fn.__name__}")
        on_cpu = [to_cpu(arg) for arg in args]
        result = run(self, *on_cpu, **{key: to_cpu(value) for key, value in kwargs.items()})
        _write_back(on_cpu)
        return result

    GridExecutor.__call__ = call
