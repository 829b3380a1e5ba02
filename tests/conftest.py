"""Options and profiles of the tests. Kernels run interpreted on CPU tensors unless --device names a
real device."""

from __future__ import annotations

import gc
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from paths import SUPPORT

# So that failed assertions in shared code report as much as those in tests.
pytest.register_assert_rewrite(*({file.stem for file in SUPPORT.rglob("*.py")} - {"paths"}))

# The tests in npu/ run in the environment of triton-ascend: see `make test-npu`.
collect_ignore = ["npu"]

COMMON = {
    "deadline": None,
    "derandomize": True,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
}
settings.register_profile("ci", max_examples=10, **COMMON)
settings.register_profile("nightly", max_examples=1000, **{**COMMON, "derandomize": False})


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device",
        choices=("cpu", "cuda", "npu"),
        default="cpu",
        help="where kernels run: cpu interprets those of both devices",
    )
    parser.addoption(
        "--changed",
        metavar="COMMIT",
        help="run the quick tier, and the tests that the changes since COMMIT concern",
    )


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
    # An exception in a rewrite then fails the test instead of warning.
    os.environ.setdefault("LIGER_OPS_STRICT", "1")
    device = config.getoption("--device")
    os.environ["LIGER_OPS_TEST_DEVICE"] = device
    if not hasattr(config, "workerinput"):
        # A new cache for each run: PyTorch's keys ignore autograd formulas, and the code of an
        # earlier run may be of other formulas.
        cache = tempfile.TemporaryDirectory(prefix="torchinductor_", ignore_cleanup_errors=True)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache.name
        config.add_cleanup(cache.cleanup)
    # Otherwise Inductor compiles PyTorch's headers three times to find the compiler's vector
    # instructions, which takes 6 s in each empty cache.
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
    # LIGER_OPS_SIMULATED_NPU=1 runs the tests of --device npu on the simulated device. Triton reads
    # TRITON_INTERPRET when a kernel is defined.
    simulated = device == "npu" and os.environ.get("LIGER_OPS_SIMULATED_NPU") == "1"
    os.environ["TRITON_INTERPRET"] = "1" if device == "cpu" or simulated else "0"
    if device == "cpu" or simulated:
        import interpreter
        import simulated_npu

        interpreter.patch()
        simulated_npu.install()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if config.option.markexpr != "quick" or not collection_path.match("test_*.py"):
        return None
    import quick

    return None if quick.has_quick_tests(collection_path) else True


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # Imports liger_ops, which reads the environment that pytest_configure sets.
    import quick

    quick.select(config, items)
    if base := config.getoption("--changed"):
        import changed

        files = {changed.ROOT / file for file in changed.chosen(changed.changed_files(base))}
        others = [i for i in items if i.path not in files and not i.get_closest_marker("quick")]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in set(others)]
    device = config.getoption("--device")
    if device != "cpu":
        reason = f"runs on the CPU whatever the device; --device {device} runs kernels"
        for item in items:
            if "device_kernels" not in item.keywords:
                item.add_marker(pytest.mark.skip(reason=reason))
    items[:] = longest_first(
        items, getattr(config, "workerinput", {"workercount": 1})["workercount"]
    )


def longest_first(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """Put some of the tests marked `long` at the beginning of each worker's tests.

    pytest-xdist gives each worker as many neighbours of the list, and moves those that are left to
    workers that have none. The last of these are then short, and no worker waits for another.
    """
    is_long = [item.get_closest_marker("long") is not None for item in items]
    long = [item for item, chosen in zip(items, is_long, strict=True) if chosen]
    others = [item for item, chosen in zip(items, is_long, strict=True) if not chosen]
    ordered: list[pytest.Item] = []
    for worker in range(workers):
        own = long[worker::workers]
        end = len(items) * (worker + 1) // workers
        count = max(0, end - len(ordered) - len(own))
        ordered += own + others[:count]
        del others[:count]
    return ordered + others


def pytest_collection_finish() -> None:
    """Avoid needless work in the tests: the garbage collector's passes over imported modules and
    after each compilation, the records of torch's structured traces, which pytest would capture,
    and the time of the guards of each compilation, which Dynamo takes with flushed caches: half of
    the time of a small graph."""
    import torch._dynamo.guards

    torch._dynamo.config.run_gc_after_compile = False
    torch._dynamo.guards.profile_guard_manager = lambda *arguments: 0.0
    logging.getLogger("torch.__trace").propagate = True
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    import quick

    with quick.rewrites_are_made(item):
        return (yield)


@pytest.fixture(autouse=os.environ.get("LIGER_OPS_SIMULATED_NPU") == "1")
def simulated_device() -> Iterator[None]:
    import simulated_npu

    with simulated_npu.visible():
        yield


@pytest.fixture
def mesh() -> Iterator[Any]:
    """Return a device mesh with this process alone."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def without_tf32() -> Iterator[None]:
    """Let convolutions of float32 have float32's precision on a GPU."""
    import torch

    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


@pytest.fixture
def empty_caches() -> None:
    """Reset Dynamo, so that nothing is compiled yet."""
    import torch

    torch._dynamo.reset()
