"""Products of float32 follow every switch by which PyTorch's own products do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import liger_ops
from liger_ops.lowering.cuda import launch
from liger_ops.lowering.cuda.attention.varlen_kernels import precision_of

# After the first two, which transformers' `TrainingArguments(tf32=True)` and PyTorch's documents
# use, torch.get_float32_matmul_precision() raises.
SWITCHES: dict[str, Callable[[], Any]] = {
    "all": lambda: setattr(torch.backends, "fp32_precision", "tf32"),
    "products": lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
    "allow_tf32": lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
    "high": lambda: torch.set_float32_matmul_precision("high"),
}
HOPPER = {"major": 9, "shared_memory_per_block_optin": 227 * 1024}
ADA = {"major": 8, "shared_memory_per_block_optin": 99 * 1024}


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")
    for backend in (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul, torch.backends):
        backend.fp32_precision = "none"


def on_gpu(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, **properties: int) -> Any:
    """Return what stands for a tensor on a GPU."""
    monkeypatch.setattr(launch, "_properties", lambda index: SimpleNamespace(**properties))
    device = SimpleNamespace(index=0)
    return SimpleNamespace(is_cuda=True, device=device, element_size=lambda: dtype.itemsize)


@pytest.mark.parametrize("switch", SWITCHES)
def test_products_follow_each_switch(switch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = on_gpu(monkeypatch, torch.float32, **HOPPER)
    assert (launch.input_precision(x), precision_of(x, 64)) == ("ieee", "tf32x3")
    SWITCHES[switch]()
    assert (launch.input_precision(x), precision_of(x, 64)) == ("tf32", "tf32")
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert (launch.input_precision(x), precision_of(x, 64)) == ("ieee", "ieee")


@pytest.mark.parametrize(
    ("dtype", "D", "properties", "precision"),
    [
        (torch.float32, 256, HOPPER, "tf32x3"),
        (torch.float32, 128, ADA, "tf32x3"),
        (torch.float32, 256, ADA, "ieee"),  # its tiles would not fit
        (torch.float32, 64, HOPPER | {"major": 7}, "ieee"),  # no tensor cores for TF32
        (torch.bfloat16, 64, HOPPER, "ieee"),
    ],
)
def test_attention_takes_tensor_cores_where_its_tiles_fit(
    dtype: torch.dtype, D: int, properties: dict[str, int], precision: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    assert precision_of(on_gpu(monkeypatch, dtype, **properties), D) == precision


@pytest.mark.parametrize("switch", SWITCHES)
def test_an_invariant_product_runs_after_each_switch(switch: str) -> None:
    x, weight = torch.randn(5, 32), torch.randn(16, 32)
    SWITCHES[switch]()
    with liger_ops.invariant():
        y = torch.nn.functional.linear(x, weight)
    # A CPU may have products of that precision.
    torch.testing.assert_close(y, x @ weight.T, rtol=2e-2, atol=2e-2)
