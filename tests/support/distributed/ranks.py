"""Checks that several processes run together, each a rank of a group: gloo's, or with --device cuda
NCCL's, also of ranks that share a GPU."""

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

# The server of processes imports these once: what each would import for itself, most of its time.
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
    """A mesh of this shape, or of all ranks in one dimension."""
    return init_device_mesh(DEVICE, shape or (dist.get_world_size(),), mesh_dim_names=names)


def failures(checks: Sequence[Check], ranks: int, folder: Path, seconds: float) -> dict[str, str]:
    """Run checks, functions of a module, on so many ranks, and return what each one that failed
    raised on its ranks, by the check's name: a rank that ends lets the others fail too.

    After a failure the ranks are not in step, and the checks after it fail too. Processes that take
    longer than `seconds` are killed.
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
    """The processes of so many ranks, each of which called `target(rank, ranks, *arguments)`."""
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
    """The exit codes and the output of a program, a file or a module, that torchrun would start."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    processes = ended(_program, ranks, seconds, folder, port, words)
    output = "".join((folder / f"{rank}.txt").read_text() for rank in range(ranks))
    return [process.exitcode for process in processes], output


def _program(rank: int, ranks: int, folder: Path, port: int, words: tuple[str, ...]) -> None:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ.update({name: str(number) for name, number in numbers.items()})
    # Without a GPU, so that the processes are the same on every machine.
    os.environ.update(MASTER_ADDR="localhost", CUDA_VISIBLE_DEVICES="")
    sys.argv = [*words]
    run = runpy.run_path if words[0].endswith(".py") else runpy.run_module
    with (folder / f"{rank}.txt").open("w") as file, contextlib.redirect_stdout(file):
        try:
            run(words[0], run_name="__main__")
        except Exception:
            traceback.print_exc(file=file)
            raise


def tests(checks: Mapping[int, Sequence[Check]], seconds: float) -> Callable[..., None]:
    """A test of each check, by the number of ranks. Those of one number run together, when the
    result of one is asked for."""
    found: dict[int, dict[str, str]] = {}
    cases = [(count, check.__name__) for count, some in checks.items() for check in some]

    @pytest.mark.parametrize(("count", "check"), cases)
    def test(count: int, check: str, tmp_path_factory: pytest.TempPathFactory) -> None:
        if count not in found:
            folder = tmp_path_factory.mktemp("ranks")
            found[count] = failures(checks[count], count, folder, seconds)
        if failure := found[count].get(check):
            pytest.fail(failure, pytrace=False)

    return test


def _run(rank: int, ranks: int, checks: Sequence[Check], folder: Path) -> None:
    torch.set_num_threads(1)
    backend = "gloo"
    if DEVICE == "cuda":
        gpus = torch.cuda.device_count()
        backend = "cpu:gloo,cuda:nccl"
        if gpus < ranks:
            # NCCL refuses a GPU twice on one host, so each rank says that it is another one, and
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
    """The name and the bytes of each collective, also of DTensors, and how often each op of
    liger_ops is called. The bytes are those of a functional collective's input, and of all tensors
    that another is given, such as those of FSDP2 and DDP."""

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
        elif func.namespace == "c10d":
            tensors = [one for one in tree_leaves(args) if isinstance(one, torch.Tensor)]
            self.seen.append((name, sum(one.nbytes for one in tensors)))
        self.ops[name.removesuffix("_forward")] += func.namespace == "liger"
        return func(*args, **(kwargs or {}))


def recorded(function: Callable[[], Any]) -> tuple[Any, list[tuple[str, int]]]:
    """What a function returns, and the collectives that it ran."""
    with Traffic() as traffic:
        result = function()
    return result, traffic.seen
