"""Run a function in several processes that form a gloo group on the CPU."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing as mp

SECONDS = 180.0


def run(function: Callable[..., None], count: int, *args: Any) -> None:
    """Call `function(*args)` in `count` processes; fail if one fails, or if they hang."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = mp.spawn(_entry, (count, port, function, args), nprocs=count, join=False)
    end = time.monotonic() + SECONDS
    while not context.join(timeout=max(end - time.monotonic(), 0.01)):
        if time.monotonic() >= end:
            for process in context.processes:
                process.kill()
            raise TimeoutError(f"{function.__name__}: {count} processes hang")


def _entry(rank: int, count: int, port: int, function: Callable[..., None], args: Any) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=count)
    try:
        function(*args)
    finally:
        torch.distributed.destroy_process_group()
