"""Patches of Triton's interpreter: it rounds as devices do, and does no needless work.

Unpatched, it truncates float32 to bfloat16, while every device rounds to nearest, ties to even: its
results would miss error bounds that device code meets.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def round_to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Return the bits of the nearest bfloat16, as uint16, in which the interpreter holds them."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    to_nearest_even = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    rounded = ((bits + to_nearest_even) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded).astype(np.uint16)


def patch() -> None:
    """Apply all patches of this file."""
    round_to_nearest()
    multiply_bfloat16()
    patch_language_once()
    make_types_once()
    refuse_empty_grids()
    sum_columns_in_wide_blocks()
    # Without `debug` the interpreter computes whether a sum of integers overflows, and ignores the
    # result.
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)


def refuse_empty_grids() -> None:
    """Raise for a grid of no programs, which is an error on an NPU; the interpreter runs none."""
    run = interpreter.GridExecutor.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not callable(self.grid) and 0 in self.grid:
            raise ValueError(f"{self.fn.__name__}: the grid {self.grid} has no programs")
        return run(self, *args, **kwargs)

    interpreter.GridExecutor.__call__ = call


# So many neighbouring programs of the kernel that sums columns run as one.
COLUMN_BLOCKS = 32


def sum_columns_in_wide_blocks() -> None:
    """Run neighbouring programs of the kernel that sums columns as one, of the columns of all.

    A program takes some milliseconds, whatever its size, and wide rows have more than a thousand.
    Those that are left over run as they are, so that a grid that is too small leaves columns out.
    """
    run = interpreter.GridExecutor.__call__
    builder = interpreter.interpreter_builder

    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        # A replayed launch passes the block by its position.
        if self.fn.__name__ != "_column_sums_kernel" or "BLOCK_N" not in kwargs:
            return run(self, *args, **kwargs)
        (programs, *others), block = self.grid, kwargs["BLOCK_N"]
        joined, left = divmod(programs, COLUMN_BLOCKS)
        if joined:
            self.grid = (joined, *others)
            run(self, *args, **{**kwargs, "BLOCK_N": COLUMN_BLOCKS * block})
            if not left:
                return
        first = programs - left

        def set_index(x: int, y: int, z: int) -> None:
            builder.grid_idx = (first + x, y, z)

        self.grid = (left, *others)
        with mock.patch.object(builder, "set_grid_idx", set_index):
            run(self, *args, **kwargs)

    interpreter.GridExecutor.__call__ = call


def round_to_nearest() -> None:
    builder = interpreter.InterpreterBuilder
    cast = builder.cast_impl

    def cast_impl(self: Any, source: Any, dtype: Any) -> Any:
        if source.dtype.scalar == tl.float32 and dtype.scalar == tl.bfloat16:
            data = round_to_bfloat16(source.data)
            return interpreter.TensorHandle(data, dtype.scalar)
        return cast(self, source, dtype)

    builder.cast_impl = cast_impl


def multiply_bfloat16() -> None:
    """Multiply bfloat16 matrices in float32: the interpreter multiplies their bits as integers."""
    builder = interpreter.InterpreterBuilder
    dot = builder.create_dot

    def in_float32(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x
        data = (x.data.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return interpreter.TensorHandle(data, tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        return dot(self, in_float32(a), in_float32(b), *others)

    builder.create_dot = create_dot


# The id of a module's globals -> the patches of `triton.language` for it.
PATCHED: dict[int, Any] = {}


def patch_language_once() -> None:
    """Patch `triton.language` once for the functions of a module, and leave it patched.

    The interpreter patches `tl` and `tl.core`, whichever a function's module has, for a launch, and
    then again at every call of a device function, which takes longer than most of these calls.
    """
    patch_lang = interpreter._patch_lang
    unchanged = SimpleNamespace(restore=lambda: None)

    def patch_for_module(fn: Any) -> Any:
        if id(fn.__globals__) not in PATCHED:
            PATCHED[id(fn.__globals__)] = patch_lang(fn)
        return unchanged

    interpreter._patch_lang = patch_for_module


def restore_language() -> None:
    """Restore `triton.language`, with which Triton compiles; the next launch patches it again."""
    while PATCHED:
        _, scope = PATCHED.popitem()
        scope.restore()


def make_types_once() -> None:
    """Cache the types of blocks and tensors, and do not broadcast equal shapes.

    This work takes most of the interpreter's time.
    """
    make_type, make_tensor = tl.block_type.__init__, tl.tensor.__init__
    broadcast = TritonSemantic.broadcast_impl_value
    get_dtype = interpreter._get_np_dtype
    types: dict[Any, dict[str, Any]] = {}
    dtypes: dict[str, Any] = {}

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *(getattr(size, "value", size) for size in shape))
        if key not in types:
            make_type(self, element_ty, shape)
            types[key] = self.__dict__
        self.__dict__ = types[key]

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        attributes = type.__dict__.get("tensor")
        if attributes is None:
            make_tensor(self, None, type)
            attributes = type.__dict__["tensor"] = dict(self.__dict__)
        self.__dict__.update(attributes, handle=handle)

    def get_np_dtype(type: Any) -> Any:
        if type.name not in dtypes:
            dtypes[type.name] = get_dtype(type)
        return dtypes[type.name]

    def broadcast_impl_value(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        shapes = [type.shape.values if type.is_block() else () for type in (lhs.type, rhs.type)]
        return (lhs, rhs) if shapes[0] == shapes[1] else broadcast(self, lhs, rhs)

    tl.block_type.__init__, tl.tensor.__init__ = init_type, init_tensor
    TritonSemantic.broadcast_impl_value = broadcast_impl_value
    interpreter._get_np_dtype = get_np_dtype
