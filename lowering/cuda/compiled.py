"""Launch a kernel that Triton has compiled before, without Triton's lookup of it.

`kernel[grid](...)` takes 12 us to find the compiled kernel; the lookup here takes 7. It calls
private parts of Triton: on any exception, this launch and all later ones go through Triton again.
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

# The versions of Triton whose launcher `Compiled.launch` may call: 3.6 and 3.9 were run on an H100,
# the source of those between was read. With any other version, Triton launches the kernels.
VERSIONS = ("3.6", "3.7", "3.8", "3.9")

# The most entries of a cache. A key holds every number, so that each batch size has its own entry.
MOST_COMPILED = 4096
# Bytes. Triton specialises a kernel on pointers that are multiples of 16.
ALIGNMENT = 64

# Fields of a kernel's metadata that ask for what only Triton's launcher can do, if they are set.
# The same holds for shared memory above MOST_SHARED_MEMORY bytes.
TRITON_LAUNCHER_ONLY = (
    *("launch_pdl", "launch_cooperative_grid", "instrumentation_mode"),
    *("global_scratch_size", "profile_scratch_size"),
)
MOST_SHARED_MEMORY = 228 * 1024
# Triton's type of an argument -> its letter in PyTorch's launcher, and its bits in PTX.
LETTERS = {"*": ("O", "64"), "i32": ("i", "32"), "i64": ("l", "64"), "fp32": ("f", "32")}


class Compiled(NamedTuple):
    """A compiled kernel, its grid, and the constants to pass after the arguments."""

    kernel: Any
    grid: tuple[int, int, int]
    constants: list[Any]

    def launch(self, passed: Sequence[Any], stream: int) -> None:
        """Launch by Triton's launcher."""
        kernel = self.kernel
        loaded = (kernel.function, kernel.packed_metadata)
        # None: the metadata for hooks, and the hooks before and after the launch. `_hooked` has
        # checked that there are none.
        kernel.run(*self.grid, stream, *loaded, None, None, None, *passed)

    def by_pytorch(self) -> tuple[Callable[[Sequence[Any], int], None], list[int]] | None:
        """Return a `launch` by PyTorch's launcher, and the indices of the kernel's arguments that
        it takes; or None if PyTorch's launcher cannot launch this kernel.

        It takes 2 us less than Triton's.
        """
        from ...torch_private import StaticCudaLauncher, has

        kernel = self.kernel
        try:
            warps, blocks, shared = kernel.packed_metadata
            special = [getattr(kernel.metadata, name) for name in TRITON_LAUNCHER_ONLY]
            types = ["*" if name[0] == "*" else name for name in kernel.src.signature.values()]
            # Constants are compiled into the code, and are no parameters of it.
            indices = [i for i, name in enumerate(types) if name != "constexpr"]
            # The last two parameters are pointers to scratch memory of Triton, which these kernels
            # do not use.
            passed = [LETTERS[types[i]] for i in indices] + [LETTERS["*"]] * 2
            # A parameter of another size than is passed would shift all that follow it.
            is_known = [bits for _, bits in passed] == _parameters(kernel.asm["ptx"])
        except (AttributeError, KeyError, ValueError):
            return None
        # PyTorch's launcher multiplies the sizes of the grid as int32.
        is_known &= math.prod(self.grid) < 2**31 and shared <= MOST_SHARED_MEMORY
        if any(special) or blocks != 1 or not is_known or not has("StaticCudaLauncher"):
            return None
        letters = "".join([letter for letter, _ in passed])
        launch = StaticCudaLauncher._launch_kernel
        return partial(launch, kernel.function, *self.grid, warps, shared, letters), indices


def _parameters(ptx: str) -> list[str]:
    """Read the bits of each parameter of a compiled kernel from its PTX."""
    start = ptx.index(".entry")
    return re.findall(r"\.param \.[a-z](\d+)", ptx[start : ptx.index(")", start)])


# Cache: `_key` of a launch -> the compiled kernel.
_COMPILED: dict[tuple[Any, ...], Compiled] = {}


class _Thread(threading.local):
    """State of a thread.

    `recorder` records every launch of the thread: see `replay`. `is_traced`: the launches become
    nodes of a graph, see `embedded`; nothing is replayed meanwhile.
    """

    recorder: Any = None
    is_traced = False


thread = _Thread()


def is_supported(version: str) -> bool:
    """Return whether a version of Triton is one of VERSIONS."""
    return version.split(".")[:2] in [supported.split(".") for supported in VERSIONS]


def has_same_launcher() -> bool:
    """Return whether Triton passes to its launcher what `Compiled.launch` does, in the same order.

    Both launch a stand-in for a kernel, which only notes the arguments of its launcher.
    """
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
    # Triton passes its hooks, where `Compiled.launch` passes None.
    return tuple(None if any(x is hook for hook in hooks) else x for x in tritons) == ours


# Whether kernels are launched here, and not by Triton alone. AMD's backend also specialises on the
# sizes of tensors, which the key does not hold. The interpreter compiles nothing, and a recorded
# call of empty tensors would be replayed for a GPU.
_direct = not (torch.version.hip or triton.knobs.runtime.interpret) and (
    is_supported(triton.__version__) and has_same_launcher()
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
            entry = _COMPILED.get(key)
            if entry is not None and not (kernel.pre_run_hooks or _hooked()):
                entry.launch(passed + entry.constants, current_stream(device))
                if thread.recorder is not None:
                    thread.recorder.record_launch(kernel, entry, args)
                return
        except Exception as error:
            _leave_to_triton(error)
    compiled = kernel[grid](*args, **constants)
    # A launch by Triton cannot be repeated without Triton, so the call that made it cannot either.
    if thread.recorder is not None:
        thread.recorder.stop()
    if not _direct or key is None or compiled is None:
        return
    try:
        trailing = [constants[name] for name in kernel.arg_names[len(args) :]]
        # Triton's launcher reads as many arguments as the signature has, and need not check how
        # many it was passed.
        if [*compiled.src.signature] != [*kernel.arg_names]:
            raise TypeError(f"{compiled.src.signature} are other parameters than the kernel's")
    except Exception as error:
        _leave_to_triton(error)
        return
    if len(_COMPILED) >= MOST_COMPILED:
        _COMPILED.clear()
    _COMPILED[key] = Compiled(compiled, (*grid, 1, 1)[:3], trailing)


def _key(
    kernel: Any, grid: tuple[int, ...], device: int | None,
    args: tuple[Any, ...], constants: dict[str, Any],
) -> tuple[tuple[Any, ...], list[Any]]:  # fmt: skip
    """Return all that Triton compiles a kernel for, as a key, and the arguments with tensors
    replaced by their addresses.

    Triton specialises on the dtypes of tensors and whether they are aligned, on the types of
    numbers and some of their values, on constants, and on its settings. The key holds every value.
    """
    # The key has the type beside the value, because 1 == True == 1.0 in a key.
    passed, entries = list(args), list(map(type, args))
    for i, arg in enumerate(args):
        if isinstance(arg, Tensor):
            passed[i] = address = arg.data_ptr()
            entries[i] = arg.dtype
            entries.append(address % ALIGNMENT)
        else:
            entries.append(arg)
    key = (kernel.fn, grid, device, *entries, *constants, *constants.values())
    return key + _settings(), passed


def _settings() -> tuple[Any, ...]:
    """Return Triton's settings that a program has changed."""
    # `vars` of a group of knobs holds only those that were set.
    runtime, compilation = vars(triton.knobs.runtime), vars(triton.knobs.compilation)
    return (*runtime.items(), *compilation.items()) if runtime or compilation else ()


def _hooked() -> bool:
    """Return whether hooks are set, such as a profiler's: only Triton's own launch calls them."""
    runtime = triton.knobs.runtime
    # From Triton 3.7 on, every launch asks this hook for a part of its key.
    if vars(runtime).get("add_stages_inspection_hook") is not None:
        return True
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def can_replay() -> bool:
    """Return whether a call may be recorded or replayed: nothing else records or traces launches,
    and no setting or hook changes how kernels are launched."""
    in_use = thread.recorder is not None or thread.is_traced
    return _direct and not (in_use or _settings() or _hooked())


def current_stream(device: int | None) -> int:
    return driver.active.get_current_stream(device)


def _leave_to_triton(error: Exception) -> None:
    """Let Triton launch every kernel from now on, and warn."""
    global _direct
    _direct = False
    _COMPILED.clear()
    warnings.warn(
        f"liger_ops: Triton {triton.__version__} launches all kernels from now on, some "
        f"microseconds slower: {type(error).__name__}: {error}",
        stacklevel=4,
    )
