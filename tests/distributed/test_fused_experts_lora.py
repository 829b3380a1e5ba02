"""Experts with a LoRA of peft's `target_parameters` that are sharded train as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard

import ranks
from liger_ops import fuse
from sharded_training import MIXTURE, compare, made, trained

peft = pytest.importorskip("peft", reason="the adapters are peft's")
pytestmark = pytest.mark.device_kernels


def adapted() -> Any:
    """With random adapters, and every parameter trained."""
    config = peft.LoraConfig(
        target_modules=["q_proj"], init_lora_weights=False, r=4, lora_alpha=6,
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )  # fmt: skip
    torch.manual_seed(3)
    return peft.get_peft_model(made(MIXTURE), config).requires_grad_().train()


def sharded(model: Any) -> Any:
    for module in (*model.base_model.model.model.layers, model):
        fully_shard(module, mesh=ranks.mesh())
    return model


def fused(model: Any) -> Any:
    assert fuse(model).counts().get("moe_experts")
    return model


def forms_no_weights(*_: Any) -> None:
    raise AssertionError("peft formed the weights with their LoRA")


def by_fsdp2() -> None:
    truth = trained(adapted())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peft.tuners.lora.layer.ParamWrapper, "_activate_lora", forms_no_weights)
        compare(trained(sharded(fused(adapted()))), truth)
        compare(trained(fused(sharded(adapted()))), truth)


test_fused_experts_lora = ranks.tests({2: [by_fsdp2]}, 300)
