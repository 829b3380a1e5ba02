"""The processes that torchrun starts, and figures of all of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@contextmanager
def ranks() -> Iterator[DeviceMesh]:
    """The mesh of all ranks: one GPU each with NCCL, or one CPU process each with gloo."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    try:
        yield init_device_mesh(kind, (int(os.environ["WORLD_SIZE"]),))
    finally:
        dist.destroy_process_group()


def say(line: str) -> None:
    """Print a line on the first rank."""
    if dist.get_rank() == 0:
        print(line, flush=True)


def largest(*figures: float) -> list[float]:
    """The largest of each figure over the ranks."""
    values = torch.tensor(figures, device="cuda" if torch.cuda.is_available() else "cpu")
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return [float(value) for value in values]


def relative(found: Tensor, truth: Tensor) -> float:
    """|found - truth| / |truth|, in norm; the truth is float32."""
    return float((found.float() - truth).norm() / truth.norm())
