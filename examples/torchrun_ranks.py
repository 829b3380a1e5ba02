"""The ranks that torchrun starts: their mesh, output, and figures over all of them."""

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
    """Yield the mesh of all ranks: one GPU each with NCCL, or one CPU process each with gloo."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    try:
        yield init_device_mesh(device, (int(os.environ["WORLD_SIZE"]),))
    finally:
        dist.destroy_process_group()


def say(line: str) -> None:
    """Print a line on the first rank."""
    if dist.get_rank() == 0:
        print(line, flush=True)


def largest(*figures: float) -> list[float]:
    """Return the maximum of each figure over the ranks."""
    values = torch.tensor(figures, device="cuda" if torch.cuda.is_available() else "cpu")
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return [float(value) for value in values]


def relative(value: Tensor, truth: Tensor) -> float:
    """Return |value - truth| / |truth|, in norm; the truth is float32."""
    return float((value.float() - truth).norm() / truth.norm())
