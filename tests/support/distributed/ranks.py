"""Checks that several processes run together, each as a rank of a group. The group is gloo's, or
with --device cuda NCCL's, where ranks may share a GPU."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import runpy
import socket
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Check = Callable[[], None]

# Modules that the fork server imports once: otherwise each process would, for most of its time.
# There is one list for all files, because a pytest process has one server, which its first file
# starts.
PRELOADED = [
    "liger_ops.distributed",
    "liger_ops.fusion",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch._dynamo.backends.debugging",
    "transformers.models.llama.modeling_llama",
    "transformers.models.gemma3.modeling_gemma3",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
]

DEVICE = os.environ.get("LIGER_OPS_TEST_DEVICE", "cpu")
# The dtype and the bound of a comparison of ops with one device. Kernels have no float64, and a sum
# over shards has another order.
EXACT = (torch.float64, 1e-9) if DEVICE == "cpu" else (torch.float32, 1e-4)


def mesh(*shape: int, names: tuple[str, ...] | None = None) -> Any:
    """Return a mesh of this shape, or of all ranks in one dimension."""
    return init_device_mesh(DEVICE, shape or (dist.get_world_size(),), mesh_dim_names=names)


def failures(checks: Sequence[Check], ranks: int, folder: Path, seconds: float) -> dict[str, str]:
    """Run checks, functions of a module, on `ranks` processes; return the errors by check.

    If one rank fails, the others fail too, for want of a partner. After a failure the ranks are not
    in step, and the checks after it fail, too. Processes that take longer than `seconds` are
    killed.
    """
    processes = ended(_run, ranks, seconds, checks, folder)
    failed: dict[str, str] = {}
    for check in checks:
        for rank, process in enumerate(processes):
            result = folder / f"{check.__name__}.{rank}"
            text = result.read_text() if result.exists() else f"not finished in {seconds} s"
            if text:
                where = f"rank {rank} of {ranks}, whose process ended with {process.exitcode}"
                failed[check.__name__] = f"{failed.get(check.__name__, '')}{where}: {text}\n"
    return failed


def ended(
    target: Callable[..., None], ranks: int, seconds: float, *arguments: Any
) -> list[BaseProcess]:
    """Run `target(rank, ranks, *arguments)` in a process for each rank; return them, all ended."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    processes: list[BaseProcess] = [
        context.Process(target=target, args=(rank, ranks, *arguments)) for rank in range(ranks)
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
    return processes


def program(ranks: int, folder: Path, seconds: float, *words: str) -> tuple[list[Any], str]:
    """Run a file as torchrun would; return its exit codes and output."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    processes = ended(_program, ranks, seconds, folder, port, words)
    output = "".join((folder / f"{rank}.txt").read_text() for rank in range(ranks))
    return [process.exitcode for process in processes], output


def _program(rank: int, ranks: int, folder: Path, port: int, words: tuple[str, ...]) -> None:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ.update({name: str(number) for name, number in numbers.items()})
    # No GPU is visible, so that the processes are the same on every machine.
    os.environ.update(MASTER_ADDR="localhost", CUDA_VISIBLE_DEVICES="")
    sys.argv = [*words]
    sys.path.insert(0, str(Path(words[0]).parent))
    with (folder / f"{rank}.txt").open("w") as file, contextlib.redirect_stdout(file):
        try:
            runpy.run_path(words[0], run_name="__main__")
        except Exception:
            traceback.print_exc(file=file)
            raise


def tests(checks: Mapping[int, Sequence[Check]], seconds: float) -> Callable[..., None]:
    """Return a test for each check. checks: number of ranks -> the checks to run with these.

    The checks of one number of ranks run together, when the first of their tests runs.
    """
    failed: dict[int, dict[str, str]] = {}
    cases = [(count, check.__name__) for count, some in checks.items() for check in some]

    @pytest.mark.parametrize(("count", "check"), cases)
    def test(count: int, check: str, tmp_path_factory: pytest.TempPathFactory) -> None:
        if count not in failed:
            folder = tmp_path_factory.mktemp("ranks")
            failed[count] = failures(checks[count], count, folder, seconds)
        if failure := failed[count].get(check):
            pytest.fail(failure, pytrace=False)

    return test


def _run(rank: int, ranks: int, checks: Sequence[Check], folder: Path) -> None:
    torch.set_num_threads(1)
    backend = "gloo"
    if DEVICE == "cuda":
        gpus = torch.cuda.device_count()
        backend = "cpu:gloo,cuda:nccl"
        if gpus < ranks:
            # NCCL refuses two ranks of a host on one GPU: each rank claims to be another host, and
            # they meet by sockets.
            os.environ.update(NCCL_HOSTID=str(rank), NCCL_NET="Socket", NCCL_SOCKET_IFNAME="lo")
        torch.cuda.set_device(rank % gpus)
        torch.set_default_device("cuda")
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=120)
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
    """Records the name and the bytes of each collective, also of DTensors, and counts liger's ops.

    The bytes are those of the input of a functional collective, and of all tensors of another, such
    as those of FSDP2 and DDP.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []
        self.ops: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(kind.__name__ == "DTensor" for kind in types):
            # DTensor calls the operation again with the local tensors.
            return NotImplemented
        name = func.__name__.split(".")[0]
        if func.namespace == "_c10d_functional" and not name.startswith(("wait", "_wrap")):
            self.seen.append((name, args[0].nbytes))
        elif func.namespace == "c10d":
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            self.seen.append((name, sum(tensor.nbytes for tensor in tensors)))
        self.ops[name.removesuffix("_forward")] += func.namespace == "liger"
        return func(*args, **(kwargs or {}))


def recorded(function: Callable[[], Any]) -> tuple[Any, list[tuple[str, int]]]:
    """Call a function; return its result, and the collectives that it ran."""
    with Traffic() as traffic:
        result = function()
    return result, traffic.seen
