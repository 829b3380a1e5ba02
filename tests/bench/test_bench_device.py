"""The bench takes graphs, peak memory and a head start from a device module like torch.npu."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from liger_ops.bench.timing import Accelerator


class DeviceModule:
    """The part of torch.npu that the bench uses, as it is called."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.allocated = [100 * 2**20]

    def Stream(self) -> DeviceModule:
        return self

    current_stream = Stream

    def wait_stream(self, stream: DeviceModule) -> None:
        self.log.append("wait")

    def NPUGraph(self) -> DeviceModule:
        return self

    def replay(self) -> None:
        self.log.append("replay")

    @contextmanager
    def graph(self, graph: DeviceModule) -> Iterator[None]:
        self.log.append("capture")
        yield
        self.log.append("captured")

    @contextmanager
    def stream(self, stream: DeviceModule) -> Iterator[None]:
        yield

    def synchronize(self) -> None:
        self.log.append("synchronize")

    def reset_peak_memory_stats(self) -> None:
        self.log.append("reset")

    def memory_allocated(self) -> int:
        return self.allocated[-1]

    def max_memory_allocated(self) -> int:
        return max(self.allocated)


@pytest.fixture
def npu() -> Accelerator:
    accelerator = Accelerator("cpu")
    accelerator.kind, accelerator.module = "npu", DeviceModule()
    return accelerator


def test_a_graph_is_captured_after_a_warm_up(npu: Accelerator) -> None:
    log = npu.module.log
    replay = npu.capture(lambda: log.append("call"))
    assert log == ["wait", "call", "call", "call", "wait", "capture", "call", "captured"]
    replay()
    assert log[-1] == "replay"


def test_peak_memory_is_beyond_what_was_there(npu: Accelerator) -> None:
    log, allocated = npu.module.log, npu.module.allocated

    def call() -> None:
        log.append("call")
        allocated.extend((130 * 2**20, 110 * 2**20))

    assert npu.peak_bytes(call) == 30 * 2**20
    assert log == ["synchronize", "reset", "call", "synchronize"]


def test_the_head_start_is_a_sleep_or_writes(
    npu: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushes: list[None] = []
    monkeypatch.setattr(Accelerator, "flush_cache", lambda self: flushes.append(None))
    npu.head_start()
    assert len(flushes) == 10
    cycles: list[int] = []
    npu.module._sleep = cycles.append
    npu.head_start()
    assert len(flushes) == 10 and cycles == [4_000_000]
