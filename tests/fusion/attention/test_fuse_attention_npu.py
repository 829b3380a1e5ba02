"""Attention of fused models on a simulated NPU, where a stand-in computes torch_npu's operator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import simulated_npu
from attention_models import OWN_CAPS, batch, fuse_attention, model, step
from liger_ops.lowering.npu.attention import varlen_attention as on_npu
from liger_ops.ops.attention import packed_documents
from op_under_test import DEVICE
from simulated_npu import to_cpu, to_npu

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="simulates a device")

# The calls of the operator in a step. A call has all documents of a batch, but with a window and
# padding on the right, by which the two rows differ. Other layers are causal, by SDPA, or chunks.
CALLS: dict[str, dict[str, int]] = {
    "llama": {"bare": 0, "ones": 0, "left": 2, "right": 2, "packed": 2},
    "mistral": {"bare": 2, "ones": 2, "left": 2, "right": 4, "packed": 2},
    "gemma3": {"bare": 1, "left": 2, "packed": 2},
    "gpt_oss": {"bare": 2, "left": 2, "packed": 2},
    "llama4": {"bare": 0, "left": 1},
    "deepseek_v3": {"left": 2},
}
CASES = [(name, kind) for name, kinds in CALLS.items() for kind in kinds]


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The devices whose documents the host has read. The kernels read none."""
    found: list[str] = []
    read = packed_documents.document_bounds

    def noted(cu_seqlens: Tensor, *others: Any) -> Tensor:
        found.append(cu_seqlens.device.type)
        return read(cu_seqlens, *others)

    monkeypatch.setattr(packed_documents, "document_bounds", noted)
    monkeypatch.setattr(on_npu, "document_bounds", None)
    with simulated_npu.visible():
        yield found


def step_on_npu(
    name: str, kind: str, backend: str | None = None
) -> tuple[dict[str, Tensor], list[str]]:
    """Return the results of a step of a fused model, and the calls of torch_npu's operators."""
    made = model(name, torch.bfloat16)
    fuse_attention(made)
    made.to("npu")
    # The simulated device gives each module a parameter of its own.
    made.tie_weights()
    call = None
    if backend is not None:
        torch._dynamo.reset()
        call = torch.compile(made, backend=backend, fullgraph=True)
    inputs = {key: to_npu(x) for key, x in batch(kind).items()}
    simulated_npu.forget()
    found = step(made, inputs, call)
    ran = [one for one in simulated_npu.launched if one.startswith("torch_npu.npu_fusion")]
    return {key: to_cpu(x).float() for key, x in found.items()}, ran


def assert_near(found: dict[str, Tensor], name: str, kind: str) -> None:
    """Compare with float32: every logit, of padding too, and every gradient are no further from it
    than twice the untouched model in bfloat16, or the rounding of the largest element."""
    truth, rounded = (step(model(name, t), batch(kind)) for t in (torch.float32, torch.bfloat16))
    for key, exact in truth.items():
        if "router" in key:
            # A difference of nearly equal sums.
            continue
        error, its_own = (float((x[key].float() - exact).norm()) for x in (found, rounded))
        assert error <= 2 * its_own + 2**-8 * float(exact.norm()), key


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_a_step(name: str, kind: str, looks: list[str]) -> None:
    found, ran = step_on_npu(name, kind)
    calls = CALLS[name][kind]
    assert (
        ran
        == ["torch_npu.npu_fusion_attention"] * calls
        + ["torch_npu.npu_fusion_attention_grad"] * calls
    )
    # One look for each mask: those of layers with a window, and of layers without. Rows without
    # padding are known, and GPT-OSS does not look for documents in position_ids.
    has_none = kind in ("bare", "ones") or (name, kind) == ("gpt_oss", "packed")
    masks = 2 if name in ("gemma3", "gpt_oss") else 1
    assert looks.count("npu") == (0 if has_none else masks)
    assert_near(found, name, kind)


@pytest.mark.skipif(not OWN_CAPS, reason="the default of Gemma 2 is SDPA, without the cap")
@pytest.mark.parametrize("kind", ["bare", "left", "packed"])
def test_soft_caps_are_the_models_own(kind: str, looks: list[str]) -> None:
    found, ran = step_on_npu("gemma2", kind)
    assert ran == [] and looks == []
    assert_near(found, "gemma2", kind)


@pytest.mark.parametrize("kind", ["bare", "left", "right", "packed"])
def test_compiled(kind: str, looks: list[str]) -> None:
    found, ran = step_on_npu("mistral", kind, "aot_eager")
    assert len(ran) == 2 * CALLS["mistral"][kind]
    assert looks.count("npu") == (kind != "bare")
    assert_near(found, "mistral", kind)
