"""Compile every cuda kernel, as its host code launches it, for GPUs that need not be present.

    TRITON_INTERPRET=0 python tests/support/compile_for_gpus.py [TARGET ...] [--heaviest TARGET ...]

prints a JSON record per compiled launch: kernel, target, options, registers per thread, and bytes
spilled per thread.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import liger_ops.lowering.cuda as cuda
import paths  # noqa: F401
from launch_cases import compiled as compiled_cases
from liger_ops import library
from liger_ops.lowering.common.losses.cross_entropy import TokenTensors
from liger_ops.lowering.cuda import product
from liger_ops.lowering.cuda.attention import (
    cudnn_engine,
    multi_token_attention,
    varlen_completion,
    varlen_gradients,
    varlen_kernels,
)
from liger_ops.lowering.cuda.launch import WARP_SIZE
from liger_ops.lowering.cuda.losses import cross_entropy

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
TYPES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int32: "i32",
    torch.int64: "i64", torch.uint8: "u8",
}  # fmt: skip

# Flag that host code sets for some GPUs -> their compute capabilities.
CAPABILITY = {
    "KNOWN": range(1000), "PREFETCH": range(80, 1000), "DEPENDENT": range(90, 1000),
    "JOINT": range(90, 100),
}  # fmt: skip

# The options of a launch that are for the compiler, beside num_warps.
COMPILER_OPTIONS = ("debug", "sanitize_overflow")

Launch = tuple[Any, tuple[Any, ...], dict[str, Any]]


def record_launches() -> list[Launch]:
    """Replace `launch` in every module of lowering.cuda by a function that appends to the returned
    list."""
    launches: list[Launch] = []

    def record(kernel: Any, grid: Any, x: Any, *args: Any, **options: Any) -> None:
        launches.append((kernel, args, options))

    for module in pkgutil.walk_packages(cuda.__path__, f"{cuda.__name__}."):
        loaded = importlib.import_module(module.name)
        if hasattr(loaded, "launch"):
            loaded.launch = record
    return launches


def calls() -> Iterator[Callable[[], Any]]:
    """Yield calls of every op with its entry's cases, and of kernels that have another caller."""
    for op, case in compiled_cases():
        tensors = op.tensors(case)
        if not op.is_pytorchs_forward:
            yield partial(op.kernel("cuda"), *op.forward_args(case, tensors))
        yield partial(op.kernel("cuda", True), *op.backward_args(case, tensors))
    for dtype in (torch.float32, torch.bfloat16):
        for N in (100, 4096, 32768, 65536):
            x = torch.empty(4, N, dtype=dtype)
            for sparse in (False, True):
                yield partial(multi_token_attention.launch_forward, x, x, sparse)
                yield partial(multi_token_attention.launch_backward, x, x, x, sparse)
        yield partial(multiply, torch.empty(2, 100, 4096, dtype=dtype))
        yield partial(finish_gradients, torch.empty(4, 64, dtype=dtype))
        yield partial(complete_attention, torch.empty(64, 4, 64, dtype=dtype))
        for V in (100, 4096, 32768, 128256):
            yield from losses_between_products(torch.empty(4, V, dtype=dtype))


def losses_between_products(logits: torch.Tensor) -> Iterator[Callable[[], Any]]:
    """Yield the calls between a head's products: loss and gradient of a chunk of logits, without
    options and with all; and divergence with a known lse."""
    target, row = torch.zeros(4, dtype=torch.int64), torch.zeros(4)
    weight, items = torch.ones(logits.shape[1]), torch.tensor(4)
    plain = (logits, target, None, None, None, -100, "mean", 0.0, 0.0, None, 1.0)
    full = (logits, target, weight, row, items, -100, "mean", 0.1, 1e-4, 30.0, 0.5)
    for args in (plain, full):
        yield partial(
            cross_entropy.loss_and_gradient,
            library.OPS["cross_entropy_forward"].arguments(*args),
            logits,
            TokenTensors(args[2], target, args[3], row, row, row, row, lse_error=row),
            gradient=True,
        )
    known = (logits, logits, target, "jsd", 0.5, 0.7, None, -100, row, row, row, row)
    yield partial(library.OPS["divergence_forward"].kernels["cuda"], *known)


def multiply(a: torch.Tensor) -> None:
    """Call the products of `liger_ops.invariant`: by a weight as it is in memory, by a transposed
    one, and with sums and columns that fill no tile."""
    weight = a.new_empty(2, 4096, 4096)
    for b in (weight, weight.mT):
        product.product(a, b)
    product.product(a[..., :33].contiguous(), weight[:, :33, :100])


def complete_attention(y: torch.Tensor) -> None:
    """Call what is launched before and behind an engine of attention."""
    T, heads, _ = y.shape
    ints, sinks = torch.zeros(5, dtype=torch.int32), torch.zeros(heads)
    mask = torch.ones(T, dtype=torch.bool)
    documents = (ints, T, ints[1:], mask, sinks)
    call = library.OPS["varlen_attention_forward"].arguments(y, y, y, *documents)
    cudnn_engine.documents(call, [y] * 8, 8)
    varlen_completion.complete(call, y, torch.empty(heads, T))
    # The kernels that compute a batch again if its mask has holes.
    lse, holes = torch.empty(heads, T), varlen_completion.holes_of(call)
    varlen_kernels.forward(call, y, lse, holes, only_holes=True)
    backward = library.OPS["varlen_attention_backward"].arguments(
        y, y, y, y, y, lse, *documents, None, -1, 0, None, None, "auto", [True] * 4
    )
    varlen_gradients.backward(backward, y, y, y, None, holes, only_holes=True)


def finish_gradients(x: torch.Tensor) -> None:
    """Call linear_cross_entropy's backward with the results of its forward."""
    one, lse = torch.tensor(1.0), torch.zeros(4)
    target = torch.zeros(4, dtype=torch.int64)
    inputs = (one, None, None, None, x, x, target, None, None, None, None, lse, lse, one)
    options = (-100, "mean", 0.0, 0.0, None, 1.0, None, None)
    mask = [True, True, False, False, False]
    kernel = library.OPS["linear_cross_entropy_backward"].kernels["cuda"]
    kernel(*inputs, x, x, None, *options, mask)


def specialised(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> ASTSource:
    """Return the source that a launch of the kernel with these arguments would compile."""
    signature, constants, attributes = {}, {}, {}
    passed = dict(zip(kernel.arg_names, args, strict=False)) | options
    for i, parameter in enumerate(kernel.params):
        name = parameter.name
        if parameter.is_constexpr:
            signature[name], constants[name] = "constexpr", passed[name]
            continue
        value = passed[name]
        integer = isinstance(value, int) and not parameter.do_not_specialize
        if value is None or (integer and value == 1):
            signature[name], constants[name] = "constexpr", value
            continue
        if isinstance(value, torch.Tensor):
            signature[name] = "*" + TYPES[value.dtype]
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
        if isinstance(value, torch.Tensor) or (integer and value % 16 == 0):
            attributes[(i,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constants, attributes)


def constants_of(target: GPUTarget, options: dict[str, Any]) -> dict[str, bool | str]:
    """Return the constants that depend on the GPU. Without one, host code sets flags to False, and
    the precision of products to one that AMD GPUs do not have."""
    cuda = target.backend == "cuda"
    constants: dict[str, bool | str] = {
        name: cuda and target.arch in those for name, those in CAPABILITY.items() if name in options
    }
    if not cuda and options.get("PRECISION") == "tf32x3":
        constants["PRECISION"] = "ieee"
    return constants


def resources(compiled: Any, target: GPUTarget) -> dict[str, int]:
    """Return the registers and spilled bytes of a thread, as the assembler reports them."""
    if target.backend == "hip":
        text = compiled.asm["amdgcn"]
        registers, spilled = (
            int(re.search(rf"\.{key}:\s+(\d+)", text).group(1))
            for key in ("vgpr_count", "vgpr_spill_count")
        )
        return {"registers": registers, "spilled_bytes": 4 * spilled}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(compiled.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        report = subprocess.run(
            [tool, "-res-usage", path], capture_output=True, text=True, check=True
        ).stdout
    registers, stack = (
        int(re.search(rf"{key}:(\d+)", report).group(1)) for key in ("REG", "STACK")
    )
    return {"registers": registers, "spilled_bytes": stack}


def compiled(
    kernel: Any, args: tuple[Any, ...], launched: dict[str, Any], target: str
) -> dict[str, Any]:
    """Compile a launch for a target; return its record."""
    options = {**launched, **constants_of(TARGETS[target], launched)}
    source = specialised(kernel, args, options)
    compiler = {"num_warps": warps(launched, target)}
    compiler |= {key: options[key] for key in COMPILER_OPTIONS if key in options}
    result = triton.compile(source, target=TARGETS[target], options=compiler)
    return {
        "kernel": kernel.__name__,
        "target": target,
        "options": {key: str(value) for key, value in options.items()},
        "has_products": "tt.dot" in result.asm["ttir"],
        **resources(result, TARGETS[target]),
    }


def warps(launched: dict[str, Any], target: str) -> int:
    return max(1, launched.get("num_warps", 4) * WARP_SIZE // TARGETS[target].warp_size)


def distinct(launches: list[Launch], target: str) -> Iterator[Launch]:
    """Yield one launch for each source that a target's compiler is given."""
    seen = set()
    for kernel, args, launched in launches:
        options = {**launched, **constants_of(TARGETS[target], launched)}
        key = (specialised(kernel, args, options).hash(), warps(launched, target))
        if key not in seen:
            seen.add(key)
            yield kernel, args, launched


def without_dtypes(launch: Launch, target: str) -> tuple[Any, ...]:
    """Return what the compiler is given for a launch, but for the dtypes of tensors."""
    kernel, args, launched = launch
    source = specialised(kernel, args, {**launched, **constants_of(TARGETS[target], launched)})
    kinds = tuple("*" if kind[0] == "*" else kind for kind in source.signature.values())
    options = str(source.constants), str(source.attrs), warps(launched, target)
    return kernel.__name__, kinds, *options


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("targets", nargs="*", default=list(TARGETS), help="compile every launch")
    parser.add_argument(
        "--heaviest",
        nargs="*",
        default=[],
        help="compile the launch of each kernel that needs most registers on the first, and of"
        " each dtype where the kernel has matrix products",
    )
    options = parser.parse_args(arguments)
    launches = record_launches()
    # Host code reads no values: tensors without data give the same launches.
    zeros = mock.patch.object(torch, "randn", lambda shape, generator: torch.zeros(shape))
    with zeros, FakeTensorMode():
        for call in calls():
            call()
    heaviest: dict[Any, tuple[int, Launch]] = {}
    for target in options.targets:
        known: set[Any] = set()
        for launch in distinct(launches, target):
            name = launch[0].__name__
            dtype = next(arg.dtype for arg in launch[1] if isinstance(arg, torch.Tensor))
            # A kernel without products computes in float32, whatever the dtypes: a launch is left
            # out if one with the same tile, and one with this dtype, are compiled.
            keys = {without_dtypes(launch, target), (name, dtype)}
            if keys <= known and name not in known:
                continue
            record = compiled(*launch, target)
            known |= keys | ({name} if record["has_products"] else set())
            print(json.dumps(record), flush=True)
            key = (name, record["has_products"] and dtype)
            if target == options.targets[0] and record["registers"] > heaviest.get(key, (-1,))[0]:
                heaviest[key] = (record["registers"], launch)
    for target in options.heaviest:
        for _, launch in heaviest.values():
            print(json.dumps(compiled(*launch, target)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
