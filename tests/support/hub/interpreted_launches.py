"""Have Triton's interpreter run the launches of compiled kernels, on CPU tensors.

With TRITON_INTERPRET=1 kernels are defined as functions that Dynamo cannot trace. Here they are
defined as for a GPU: Dynamo puts their launches into its graph, PyTorch finds the tensors that they
write from their code in Triton's intermediate representation, for a GPU that need not be present,
and only what runs a launch in the end is the interpreter.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from types import FunctionType
from typing import Any
from unittest import mock

import triton.language as tl
from torch._higher_order_ops import triton_kernel_wrap
from torch.utils import _triton
from triton.backends.compiler import GPUTarget

# Imported before the interpreter patches the language, of which the compiler keeps functions.
from triton.compiler import code_generator  # noqa: F401
from triton.language import math, standard
from triton.language.extra import libdevice
from triton.runtime import driver, interpreter
from triton.runtime.jit import JITFunction

TARGET = GPUTarget("cuda", 90, 32)


class NoDriver:
    """The driver of a GPU that is not there: code can be compiled for it."""

    def get_current_target(self) -> GPUTarget:
        return TARGET


def rsqrt(x: Any) -> Any:
    return math.rsqrt(x)


def tanh(x: Any) -> Any:
    return 2 / (1 + math.exp(-2 * x)) - 1


# The id of a function of libdevice, of which the interpreter has none -> the same in the language.
FUNCTIONS = {id(libdevice.rsqrt): rsqrt, id(libdevice.tanh): tanh}


@functools.cache
def interpreted(function: FunctionType) -> Any:
    """Return the interpreter's function of a kernel, in a copy of the kernel's module, into which
    the interpreter writes names of its own."""
    variables = {
        name: FUNCTIONS.get(id(value), value) for name, value in function.__globals__.items()
    }
    copied = FunctionType(function.__code__, variables, function.__name__, function.__defaults__)
    copied.__annotations__ = function.__annotations__
    return interpreter.InterpretedFunction(copied)


def run(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
    """Run a launch: `JITFunction.run`."""
    # The functions of `standard` ask `tl.core`, which the interpreter patches only for them.
    scope = interpreter._patch_lang(standard.sigmoid.fn)
    try:
        interpreted(kernel.fn).run(*args, grid=grid, warmup=warmup, **options)
    finally:
        scope.restore()


def call(function: JITFunction, *args: Any, **kwargs: Any) -> Any:
    """Call a device function within a launch: `JITFunction.__call__`."""
    return interpreted(function.fn).rewrite()(*args, **kwargs)


def refuse(message: str, *args: Any, **options: Any) -> None:
    """Raise where PyTorch could not find what a kernel writes, and would take all for written."""
    raise AssertionError(message)


@contextlib.contextmanager
def interpreted_launches() -> Iterator[None]:
    """Run launches by the interpreter, while within."""
    assert isinstance(tl.sum, JITFunction), "with TRITON_INTERPRET=1 there is nothing to trace"
    active = driver._active
    driver.set_active(NoDriver())
    try:
        with (
            mock.patch.object(JITFunction, "run", run),
            mock.patch.object(JITFunction, "__call__", call),
            mock.patch.object(triton_kernel_wrap.log, "warning", refuse),
            # Without a GPU Dynamo does not look for kernels.
            mock.patch.object(_triton, "has_triton", lambda **_: True),
        ):
            yield
    finally:
        driver._active = active
