"""Within torch.set_default_device, which is a mode of functions, Dynamo records `1 - x` as rsub,
`1 / x` as a product with the reciprocal, and methods that are written in Python as functions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import liger_ops

D, S, V = 16, 6, 61


def attention(x: Tensor, weight: Tensor) -> Tensor:
    mask = (1 - torch.tril(torch.ones(S, S))) * torch.finfo(torch.float32).min
    return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (1 / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)) * weight[0]


def layer_norm(x: Tensor, weight: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + 1e-6) * weight[0]


def swiglu(x: Tensor, weight: Tensor) -> Tensor:
    gate, up = (x @ weight.T).flatten(0, 1).split(S, dim=0)
    return gate * torch.sigmoid(gate) * up


def linear_log_prob(x: Tensor, weight: Tensor) -> Tensor:
    found = []
    for rows in (x @ weight.T / 0.9).reshape(-1, V).split(4, dim=0):
        log_prob = rows.log_softmax(-1)
        found.append(-(log_prob.exp() * log_prob).sum(-1))
    return torch.cat(found)


@pytest.mark.parametrize(
    ("op", "code"),
    [
        ("causal_attention", attention),
        ("rms_norm", rms_norm),
        ("layer_norm", layer_norm),
        ("swiglu", swiglu),
        ("linear_log_prob", linear_log_prob),
    ],
)
def test_what_a_default_device_changes_is_found(op: str, code: Callable[..., Tensor]) -> None:
    x, weight = torch.randn(2, S, D, requires_grad=True), torch.randn(V, D)
    explained = liger_ops.explain(code, x, weight, verify=True)
    assert explained.counts() == {op: 1}
    with torch.device("cpu"):
        explained = liger_ops.explain(code, x, weight, verify=True)
    assert explained.counts() == {op: 1}
    assert explained.verification is not None and explained.verification.agrees
