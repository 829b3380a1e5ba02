"""Liger-Kernel's Ascend kernels, launched by its own host code, for the same compilers."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.runtime import driver

from launches import BACKEND, Launch, intercepted
from toolchain import UB_BYTES, VECTOR_CORES

ROWS = 4096
WIDTHS = (4096, 8192, 14336)
OPS = "liger_kernel.ops.backends._ascend.ops"
# What triton-ascend 3.2.0 lacks and the package imports, for kernels that are not compared.
NEWER = "triton.language.extra.cann"

# By the op: the module and the autograd function, and its arguments of x and of a row of weights.
FUNCTIONS: dict[str, tuple[str, Callable[[Tensor, Tensor], tuple[Any, ...]]]] = {
    "rms_norm": ("RMSNorm", lambda x, row: (x, row, 1e-6, 0.0, "llama", False)),
    "fused_add_rms_norm": (
        "FusedAddRMSNorm",
        lambda x, row: (x, x * 1, row, 1e-6, 0.0, "llama", False),
    ),
    "layer_norm": ("LayerNorm", lambda x, row: (x, row, row * 1, 1e-5)),
    "softmax": ("Softmax", lambda x, row: (x,)),
    "swiglu": ("SiLUMul", lambda x, row: (x, x * 1)),
    "geglu": ("GELUMul", lambda x, row: (x, x * 1)),
}


@dataclass(frozen=True)
class PeerCall:
    op: str
    N: int
    backward: bool
    launches: tuple[Launch, ...]


def tile(launch: Launch) -> tuple[int, int]:
    constants = launch.source.constants
    return constants.get("ROWS_PER_BLOCK", 1), constants["BLOCK_SIZE"]


def installed() -> str:
    """The version of Liger-Kernel that is installed, or None."""
    try:
        return version("liger-kernel")
    except PackageNotFoundError:
        return ""


def calls() -> Iterator[PeerCall]:
    os.environ["ASCEND_UB_CAPACITY_BITS"] = str(8 * UB_BYTES)
    properties = {"num_vectorcore": VECTOR_CORES, "num_aicore": VECTOR_CORES // 2}
    driver.set_active(
        SimpleNamespace(
            utils=SimpleNamespace(get_device_properties=lambda device: properties),
            get_current_target=lambda: BACKEND.target,
            get_current_device=lambda: 0,
            get_benchmarker=lambda: None,
        )
    )
    extension = ModuleType(f"{NEWER}.extension")
    extension.__getattr__ = lambda name: None
    sys.modules.update({NEWER: ModuleType(NEWER), extension.__name__: extension})
    for op in FUNCTIONS:
        for N in WIDTHS:
            yield from _of_op(op, N)


def _of_op(op: str, N: int) -> Iterator[PeerCall]:
    name, arguments = FUNCTIONS[op]
    function = getattr(importlib.import_module(f"{OPS}.{op}"), f"Liger{name}Function")
    forward: list[Launch] = []
    backward: list[Launch] = []
    with FakeTensorMode():
        x, row = (
            torch.empty(shape, dtype=torch.bfloat16, requires_grad=True)
            for shape in ((ROWS, N), (N,))
        )
        with intercepted(forward.append):
            outputs = function.apply(*arguments(x, row))
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        with intercepted(backward.append):
            sum(output.sum() for output in outputs).backward()
    yield PeerCall(op, N, False, tuple(forward))
    yield PeerCall(op, N, True, tuple(backward))
