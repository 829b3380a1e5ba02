"""Models of peft with LoRA on the head, and their tensor parallelism."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from parallel_plans import parallel

peft = pytest.importorskip("peft", reason="the adapters are peft's")

HEAD = "base_model.model.lm_head"
RANK = 4


def adapted(model: Any, *modules: str, adapters: int = 1) -> Any:
    """Return the model with random adapters of its head, and every parameter trained."""
    config = peft.LoraConfig(
        target_modules=["lm_head", *modules], init_lora_weights=False, r=RANK, lora_alpha=6
    )
    names = ["default", "second"][:adapters]
    torch.manual_seed(3)
    model = peft.get_peft_model(model, config)
    for name in names[1:]:
        model.add_adapter(name, config)
    model.base_model.set_adapter(names)
    return model.requires_grad_().train()


def styled(
    model: Any, mesh: Any, logits: Placement | None = None, sequence: bool = False,
    adapter: bool = True,
) -> Any:  # fmt: skip
    """Parallelize the model, its head's linear layer and, with `adapter`, the adapter.

    Words are sharded, and with `sequence` rows, too.
    """
    inner, head = model.base_model.model, model.base_model.model.lm_head
    # The plan names the linear layer.
    inner.lm_head = head.base_layer
    parallel(inner, mesh, sequence, logits)
    inner.lm_head = head
    if not adapter:
        return model
    local = logits is None or logits.is_replicate()
    out: dict[str, Any] = {"output_layouts": logits or Replicate(), "use_local_output": local}
    plan = {f"{HEAD}.lora_B.default": ColwiseParallel(**out)}
    if sequence:
        # A plain lora_A does not take the rows, which are a DTensor.
        plan[f"{HEAD}.lora_A.default"] = ColwiseParallel(
            input_layouts=Shard(1), output_layouts=Replicate(), use_local_output=False
        )
    return parallelize_module(model, mesh, plan)
