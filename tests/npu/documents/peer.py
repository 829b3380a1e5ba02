"""Liger-Kernel's Ascend kernels, launched by its own host code, for the same compilers."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from triton.runtime import driver

from launch_cases import BF16
from launches import BACKEND, Call, Launch, intercepted
from op_under_test import Case
from toolchain import UB_BYTES, VECTOR_CORES

OPS = "liger_kernel.ops.backends._ascend.ops"
# A module that Liger-Kernel imports and triton-ascend 3.2.0 lacks. The kernels here do not need it.
NEWER = "triton.language.extra.cann"
# The columns of the hidden states; the kernels of a loss do not depend on them.
HIDDEN = 4096


def _bf16(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=BF16, requires_grad=True)


def _targets(case: Case) -> Tensor:
    return torch.empty(case.shape[0], dtype=torch.int64)


def _heads(case: Case, heads: int) -> Tensor:
    """Return the heads of a projection, as models lay them out."""
    B, _, S, D = case.shape
    return _bf16(B, S, heads, D).transpose(1, 2)


def _tables(case: Case, *sections: int) -> Tensor:
    B, _, S, D = case.shape
    return _bf16(*sections, B, S, D)


@dataclass(frozen=True)
class Peer:
    """An op of Liger-Kernel, and the cases of this project whose shapes it is launched with.

    In this file, "here" is this project and "there" is Liger-Kernel.
    """

    function: str
    arguments: Callable[[Any], tuple[Any, ...]]
    # The first words of the cases' labels.
    cases: tuple[str, ...] = ("4096x4096", "4096x8192", "4096x14336")
    # The id of the op here that has these cases, if its name differs.
    here: str = ""
    # Whether the forward pass here computes the gradients too: both passes are then one row.
    both: bool = False


PEERS = {
    "rms_norm": Peer(
        "rms_norm.LigerRMSNormFunction",
        lambda case: (_bf16(*case.shape), _bf16(case.shape[1]), 1e-6, 0.0, "llama", False),
    ),
    "fused_add_rms_norm": Peer(
        "fused_add_rms_norm.LigerFusedAddRMSNormFunction",
        lambda case: (
            *(_bf16(*case.shape), _bf16(*case.shape), _bf16(case.shape[1])),
            *(1e-6, 0.0, "llama", False),
        ),
    ),
    "layer_norm": Peer(
        "layer_norm.LigerLayerNormFunction",
        lambda case: (_bf16(*case.shape), _bf16(case.shape[1]), _bf16(case.shape[1]), 1e-5),
    ),
    "group_norm": Peer(
        "group_norm.LigerGroupNormFunction",
        lambda case: (
            *(_bf16(*case.shape), _bf16(case.shape[1]), _bf16(case.shape[1])),
            *(case.shape[1], case.num_groups, 1e-5),
        ),
        ("2x320x64x64", "2x640x7x9", "2x1280x16x16", "1000x512", "4x4096", "2x100000"),
    ),
    "softmax": Peer("softmax.LigerSoftmaxFunction", lambda case: (_bf16(*case.shape),)),
    "swiglu": Peer(
        "swiglu.LigerSiLUMulFunction", lambda case: (_bf16(*case.shape), _bf16(*case.shape))
    ),
    "geglu": Peer(
        "geglu.LigerGELUMulFunction", lambda case: (_bf16(*case.shape), _bf16(*case.shape))
    ),
    "rope": Peer(
        "rope.LigerRopeFunction",
        lambda case: (
            *(_heads(case, case.shape[1]), _heads(case, case.k_heads)),
            *(_tables(case), _tables(case)),
        ),
        ("2x32x2048x128",),
    ),
    "rope-sections": Peer(
        "qwen2vl_mrope.LigerQwen2VLMRopeFunction",
        lambda case: (
            *(_heads(case, case.shape[1]), _heads(case, case.k_heads)),
            *(_tables(case, 3), _tables(case, 3), list(case.sections)),
        ),
        ("2x32x2048x128",),
    ),
    "rope-complex": Peer(
        "llama4_rope.LigerLlama4RopeFunction",
        lambda case: (
            *(_heads(case, heads).transpose(1, 2) for heads in (case.shape[1], case.k_heads)),
            torch.empty(case.shape[2], case.shape[3] // 2, dtype=torch.complex64),
        ),
        ("2x32x2048x128",),
    ),
    "cross_entropy": Peer(
        "cross_entropy.LigerCrossEntropyFunction",
        lambda case: (_bf16(*case.shape), _targets(case), None),
        ("4096x32000", "4096x128256"),
        here="cross_entropy_forward-mean",
    ),
    # Its kernels on a chunk's logits, without the predicted tokens, are those of cross_entropy.
    "linear_cross_entropy": Peer(
        "fused_linear_cross_entropy.LigerFusedLinearCrossEntropyFunction",
        lambda case: (_bf16(case.shape[0], HIDDEN), _bf16(case.shape[1], HIDDEN), _targets(case)),
        ("4096x32000", "4096x128256"),
        here="cross_entropy_forward-mean",
        both=True,
    ),
}

TILE = (
    *("ROWS_PER_BLOCK", "BLOCK_BATCH", "BLOCK_SIZE_ROWS", "BLOCK_S", "BLOCK_HQ"),
    *("BLOCK_CH", "BLOCK_SIZE_CH", "BLOCK_H", "BLOCK_SIZE_H", "BLOCK_D", "BLOCK_SIZE"),
)


@dataclass(frozen=True)
class Pair:
    """The launches of a call here, and those of the same call there."""

    op: str
    shape: str
    # The passes of a training step: forward, backward or both.
    passes: str
    rows: int
    own: tuple[Launch, ...]
    launches: tuple[Launch, ...]


def tile(launch: Launch) -> str:
    """Return the tile of a launch there, by its kernel's names of constants."""
    constants = launch.source.constants
    # A tile of some kernels of rope is whole heads, of hd columns.
    sizes = [constants[name] for name in TILE if name in constants] or [
        constants["BLOCK_Q"],
        constants["hd"],
    ]
    return "x".join(map(str, sizes if len(sizes) > 1 else [1, *sizes]))


def installed() -> str:
    """Return the version of Liger-Kernel that is installed, or an empty string."""
    try:
        return version("liger-kernel")
    except PackageNotFoundError:
        return ""


def pairs(all_calls: Iterable[Call]) -> Iterator[Pair]:
    """Yield each call in bf16 that has a peer, with the launches there."""
    # Its host code asks for the buffer and the cores in these three ways.
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
    plain = [call for call in all_calls if call.case.plain and call.case.case.dtype is BF16]
    for op, peer in PEERS.items():
        for shape in peer.cases:
            forward, backward = (
                call
                for call in plain
                if call.case.op.id == (peer.here or op)
                and f"{call.case.label} ".startswith(f"bf16 {shape} ")
            )
            case = forward.case.case
            there = _launches(peer, case)
            rows = case.shape[0] * getattr(case, "num_groups", 1)
            if op.startswith("rope"):
                rows = case.shape[0] * case.shape[2]
            if peer.both:
                own = forward.launches + backward.launches
                yield Pair(op, shape, "both", rows, own, there[0] + there[1])
            else:
                yield Pair(op, shape, "forward", rows, forward.launches, there[0])
                yield Pair(op, shape, "backward", rows, backward.launches, there[1])


def _launches(peer: Peer, case: Any) -> tuple[tuple[Launch, ...], tuple[Launch, ...]]:
    """Record the launches of the forward and of the backward pass there."""
    module, name = peer.function.split(".")
    function = getattr(importlib.import_module(f"{OPS}.{module}"), name)
    forward: list[Launch] = []
    backward: list[Launch] = []
    # Its host code asks for two values, which are answered with 0: whether a target is invalid, and
    # whether the gradient is 1, in which case the same kernel writes it over the logits.
    zero = patch.multiple(FakeTensor, item=lambda self: 0, data_ptr=lambda self: 0)
    with FakeTensorMode(), zero:
        with intercepted(forward.append):
            outputs = function.apply(*peer.arguments(case))
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        outputs = [output for output in outputs if output is not None]
        with intercepted(backward.append):
            torch.autograd.backward(outputs, list(map(torch.empty_like, outputs)))
    return tuple(forward), tuple(backward)
