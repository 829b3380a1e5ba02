"""Checks that several processes run together, each a rank of a gloo group."""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

Check = Callable[[], None]


def failures(
    checks: Sequence[Check], ranks: int, folder: Path, seconds: float,
    preloaded: Sequence[str] = (),
) -> dict[str, str]:  # fmt: skip
    """Run checks, functions of a module, on so many ranks, and return what each one that failed
    raised on its first rank, by the check's name.

    After a failure the ranks are not in step, and the checks after it fail too. Processes that take
    longer than `seconds` are killed.
    """
    # The server imports these once, for all processes.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["torch", "torch.distributed.tensor", "liger_ops.distributed", *preloaded]
    )
    processes = [
        context.Process(target=_run, args=(rank, ranks, checks, folder)) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    end = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
    for process in processes:
        if process.is_alive():
            process.kill()
            process.join()
    failed = {}
    for check in checks:
        for rank in range(ranks):
            result = folder / f"{check.__name__}.{rank}"
            text = result.read_text() if result.exists() else f"not finished in {seconds} s"
            if text:
                failed.setdefault(check.__name__, f"rank {rank} of {ranks}: {text}")
    return failed


def _run(rank: int, ranks: int, checks: Sequence[Check], folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=120)
    )
    failed = ""
    for check in checks:
        if not failed:
            try:
                torch.manual_seed(0)
                check()
            except BaseException:
                failed = traceback.format_exc()
        (folder / f"{check.__name__}.{rank}").write_text(failed)
    dist.destroy_process_group()


class Traffic(TorchDispatchMode):
    """The name and the input's bytes of each collective, also of DTensors, and how often each op
    of liger_ops is called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []
        self.ops: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(kind.__name__ == "DTensor" for kind in types):
            # It is called again with the tensors that the DTensor's operation computes with.
            return NotImplemented
        name = func.__name__.split(".")[0]
        if func.namespace == "_c10d_functional" and not name.startswith(("wait", "_wrap")):
            self.seen.append((name, args[0].nbytes))
        self.ops[name] += func.namespace == "liger"
        return func(*args, **(kwargs or {}))
