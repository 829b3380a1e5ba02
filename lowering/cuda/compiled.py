"""Launch what Triton compiled before, without Triton's lookup of it.

`kernel[grid](...)` takes 12 us to find the compiled kernel, this takes 7. It calls private parts of
Triton, so any surprise hands this and all later launches back to Triton.
"""

from __future__ import annotations

import math
import re
import threading
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.runtime import driver

# The versions of Triton whose launcher is called so: 3.6 and 3.9 were run on an H100, those between
# were read. Others launch their kernels themselves.
VERSIONS = ("3.6", "3.7", "3.8", "3.9")

# The key holds every number, so each batch size has an entry of its own.
MOST_COMPILED = 4096
# Bytes. Triton specialises a kernel on pointers that are multiples of 16.
ALIGNMENT = 64

# What only Triton's launcher does: it also asks for shared memory above a limit in its own way.
BY_TRITON_ALONE = (
    *("launch_pdl", "launch_cooperative_grid", "instrumentation_mode"),
    *("global_scratch_size", "profile_scratch_size"),
)
MOST_SHARED_MEMORY = 228 * 1024
# Triton's types of arguments -> how PyTorch's launcher names them, and their bits in PTX.
LETTERS = {"*": ("O", "64"), "i32": ("i", "32"), "i64": ("l", "64"), "fp32": ("f", "32")}


class Compiled(NamedTuple):
    """A compiled kernel, its grid, and the constants to pass after the arguments."""

    kernel: Any
    grid: tuple[int, int, int]
    constants: list[Any]

    def launch(self, passed: Sequence[Any], stream: int) -> None:
        kernel = self.kernel
        loaded = (kernel.function, kernel.packed_metadata)
        kernel.run(*self.grid, stream, *loaded, None, None, None, *passed)

    def by_pytorch(self) -> tuple[Callable[[Sequence[Any], int], None], list[int]] | None:
        """`launch` by PyTorch's launcher, which takes 2 us less than Triton's, and which of the
        kernel's arguments it is given; or None if it cannot launch this kernel."""
        from ...torch_private import StaticCudaLauncher, has

        kernel = self.kernel
        try:
            warps, blocks, shared = kernel.packed_metadata
            others = [getattr(kernel.metadata, name) for name in BY_TRITON_ALONE]
            kinds = ["*" if kind[0] == "*" else kind for kind in kernel.src.signature.values()]
            given = [i for i, kind in enumerate(kinds) if kind != "constexpr"]
            # Two more are Triton's own memory, which these kernels do not use.
            passed = [LETTERS[kinds[i]] for i in given] + [LETTERS["*"]] * 2
            is_known = [bits for _, bits in passed] == _parameters(kernel.asm["ptx"])
        except (AttributeError, KeyError, ValueError):
            return None
        # It multiplies the sizes of the grid as int32.
        is_known &= math.prod(self.grid) < 2**31 and shared <= MOST_SHARED_MEMORY
        if any(others) or blocks != 1 or not is_known or not has("StaticCudaLauncher"):
            return None
        letters = "".join([letter for letter, _ in passed])
        launch = StaticCudaLauncher._launch_kernel
        return partial(launch, kernel.function, *self.grid, warps, shared, letters), given


def _parameters(ptx: str) -> list[str]:
    """The bits of each parameter of a compiled kernel."""
    start = ptx.index(".entry")
    return re.findall(r"\.param \.[a-z](\d+)", ptx[start : ptx.index(")", start)])


# What was compiled, by `_key`.
_COMPILED: dict[tuple[Any, ...], Compiled] = {}


class _Thread(threading.local):
    """`recorder` is told of every launch in this thread: see `replay`. Nothing is replayed while
    launches are traced."""

    recorder: Any = None
    is_traced = False


thread = _Thread()


def was_run_with(version: str) -> bool:
    return version.split(".")[:2] in [known.split(".") for known in VERSIONS]


def is_launched_so() -> bool:
    """Whether Triton passes to its launcher what `Compiled.launch` does, in the same order."""
    seen: list[Any] = []
    hooks = (triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook)
    kernel = SimpleNamespace(
        function=4, packed_metadata=5, run=lambda *passed: seen.append(passed),
        launch_metadata=lambda *args: None, _init_handles=lambda: None,
    )  # fmt: skip
    try:
        triton.compiler.CompiledKernel.__getitem__(kernel, (1, 2, 3))(6, 7, stream=8)
        Compiled(kernel, (1, 2, 3), []).launch([6, 7], 8)
    except Exception:
        return False
    tritons, ours = seen
    return tuple(None if any(x is hook for hook in hooks) else x for x in tritons) == ours


# AMD's backend also specialises on the sizes of tensors, which the key does not hold. The
# interpreter compiles nothing, and a recorded call of empty tensors would be replayed for a GPU.
_direct = not (torch.version.hip or triton.knobs.runtime.interpret) and (
    was_run_with(triton.__version__) and is_launched_so()
)


def launch_compiled(
    kernel: Any, grid: tuple[int, ...], device: int | None,
    args: tuple[Any, ...], constants: dict[str, Any],
) -> None:  # fmt: skip
    """Run `kernel[grid](*args, **constants)`; `device` is the index of the current device."""
    key = None
    if _direct:
        try:
            key, passed = _key(kernel, grid, device, args, constants)
            found = _COMPILED.get(key)
            if found is not None and not (kernel.pre_run_hooks or _hooked()):
                found.launch(passed + found.constants, current_stream(device))
                if thread.recorder is not None:
                    thread.recorder.launched(kernel, found, args)
                return
        except Exception as surprise:
            _leave_to_triton(surprise)
    compiled = kernel[grid](*args, **constants)
    if thread.recorder is not None:
        thread.recorder.stop()
    if not _direct or key is None or compiled is None:
        return
    try:
        others = [constants[name] for name in kernel.arg_names[len(args) :]]
        # Triton's launcher may read as many arguments without counting them.
        if [*compiled.src.signature] != [*kernel.arg_names]:
            raise TypeError(f"{compiled.src.signature} are other parameters than the kernel's")
    except Exception as surprise:
        _leave_to_triton(surprise)
        return
    if len(_COMPILED) >= MOST_COMPILED:
        _COMPILED.clear()
    _COMPILED[key] = Compiled(compiled, (*grid, 1, 1)[:3], others)


def _key(
    kernel: Any, grid: tuple[int, ...], device: int | None,
    args: tuple[Any, ...], constants: dict[str, Any],
) -> tuple[tuple[Any, ...], list[Any]]:  # fmt: skip
    """Everything that Triton compiles a kernel for, and the arguments with addresses for tensors.

    Triton specialises on the dtypes of tensors and whether they are aligned, on the types of
    numbers and some of their values, on constants, and on its settings. The key holds every value.
    """
    passed, form = list(args), list(map(type, args))
    for i, arg in enumerate(args):
        if isinstance(arg, Tensor):
            passed[i] = address = arg.data_ptr()
            form[i] = arg.dtype
            form.append(address % ALIGNMENT)
        else:
            form.append(arg)
    key = (kernel.fn, grid, device, *form, *constants, *constants.values())
    return key + _settings(), passed


def _settings() -> tuple[Any, ...]:
    """Triton's settings that a program has changed."""
    runtime, compilation = vars(triton.knobs.runtime), vars(triton.knobs.compilation)
    return (*runtime.items(), *compilation.items()) if runtime or compilation else ()


def _hooked() -> bool:
    """Whether hooks, such as a profiler's, are set, which only Triton's own launch calls."""
    runtime = triton.knobs.runtime
    # From Triton 3.7 on, every launch asks it for a part of its key.
    if vars(runtime).get("add_stages_inspection_hook") is not None:
        return True
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def can_replay() -> bool:
    """Whether a recorded call may be replayed: nothing has changed how kernels are launched."""
    elsewhere = thread.recorder is not None or thread.is_traced
    return _direct and not (elsewhere or _settings() or _hooked())


def current_stream(device: int | None) -> int:
    return driver.active.get_current_stream(device)


def _leave_to_triton(surprise: Exception) -> None:
    global _direct
    _direct = False
    _COMPILED.clear()
    warnings.warn(
        f"liger_ops: Triton {triton.__version__} launches all kernels from now on, some "
        f"microseconds slower: {type(surprise).__name__}: {surprise}",
        stacklevel=4,
    )
