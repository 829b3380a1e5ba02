"""Models to fuse, their fused modules, and their results."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fused_families import FAMILIES, output
from liger_ops.fusion import classes

FAMILY = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
BY_NAME = {family.name: family for family in FAMILIES}
LLAMA, GEMMA3 = BY_NAME["Llama"], BY_NAME["Gemma3"]
GPT_OSS, QWEN3_MOE = BY_NAME["GptOss"], BY_NAME["Qwen3Moe"]


def fused_modules(model: nn.Module) -> list[nn.Module]:
    counted = lambda module: classes.overrides(module).keys() - classes.UNCOUNTED
    return list(filter(counted, model.modules()))


def gradient_of(y: Tensor) -> Tensor:
    """Draw random numbers that every dtype represents exactly."""
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(2))
    return dy.bfloat16().to(y.dtype)


def results(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Return the output, and every parameter's gradient for a random gradient of the output."""
    model.zero_grad()
    y = output(model, x)
    y.backward(gradient_of(y))
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {
        "output": y.detach(),
        **{name: grad for name, grad in grads.items() if grad is not None},
    }
