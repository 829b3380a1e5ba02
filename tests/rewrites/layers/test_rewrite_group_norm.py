"""group_norm, found in the code of models."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from norm_spellings import EPS
from rewriting import check, each_dtype, refused, values


def group_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.group_norm(x, 4, weight, weight * 2, EPS)


GROUP_NORMS = {
    "weight-and-bias": group_norm,
    "weight": lambda x, weight: F.group_norm(x, 4, weight=weight, eps=EPS),
    "alone": lambda x, weight: torch.group_norm(x, num_groups=4, eps=EPS),
}


@pytest.mark.quick(rewrites=("group_norm",))
@each_dtype
@pytest.mark.parametrize("function", GROUP_NORMS.values(), ids=GROUP_NORMS)
@pytest.mark.parametrize("shape", [(2, 8, 5), (2, 8, 3, 3)])
def test_group_norm(function, shape, dtype):
    x, weight = values(*shape, dtype=dtype), values(8, dtype=dtype)
    (call,) = check(function, x, weight, counts={"group_norm": 1}).calls("group_norm")
    assert (call["num_groups"], call["eps"]) == (4, EPS)


def test_group_norm_module():
    norm = nn.GroupNorm(2, 8, eps=1e-3)
    (call,) = check(norm, values(2, 8, 5), counts={"group_norm": 1}).calls("group_norm")
    assert (call["num_groups"], call["eps"]) == (2, 1e-3)


def test_group_norm_of_any_size():
    check(
        group_norm, *(values(2, 8, 5), values(8)), then=(values(3, 8, 7), values(8)),
        counts={"group_norm": 1}, dynamic=True,
    )  # fmt: skip


def test_near_misses_of_group_norm():
    x = values(2, 8, 3, 3).detach().contiguous(memory_format=torch.channels_last)
    refused(group_norm, x.requires_grad_(), values(8), op="group_norm", reason="strides")
    by_hand = lambda x, weight: F.layer_norm(x.view(2, 4, 2, 5), (2, 5)).view(2, 8, 5)
    refused(by_hand, values(2, 8, 5), values(8), op="group_norm")
    instance = lambda x, weight: F.instance_norm(x, weight=weight)
    refused(instance, values(2, 8, 5), values(8), op="group_norm")
    batch = lambda x, weight: F.batch_norm(x, None, None, weight, training=True)
    refused(batch, values(2, 8, 5), values(8), op="group_norm")
