"""lora_linear: PyTorch's products, as its definition has them."""

from __future__ import annotations

from ..common.definition import run_definition

run_definition("lora_linear", "npu", __name__)
