"""mhc_coeffs, mhc_pre and mhc_post_res, found in the code of models."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import hyper_connections
from hyper_connections import (
    HC,
    HIDDEN,
    MODULES,
    NEAR_MISSES,
    Connection,
    NormAfter,
    Rounded,
    layer,
)
from rewriting import check, each_dtype, refused, values

FOUND = {"mhc_coeffs": 1, "mhc_pre": 1, "mhc_post_res": 1}
MISSED = {"rms_norm": 1, "mhc_post_res": 1}


def streams(*rows: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return values(*rows, HC, HIDDEN, dtype=dtype)


@pytest.mark.quick(rewrites=("mhc_coeffs", "mhc_pre", "mhc_post_res"))
@each_dtype
@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
def test_found(make, dtype):
    rewriter = check(layer(make(), dtype), streams(2, 3, dtype=dtype), counts=FOUND)
    (op,) = (node for node in rewriter.nodes() if "mhc_coeffs" in str(node.target))
    assert op.args[6:] == tuple(hyper_connections.OPTIONS.values())


class Flattened(Connection):
    """As in transformers 5.17."""

    def rows(self, x: Tensor) -> Tensor:
        return x.flatten(start_dim=2)


def test_any_number_of_rows():
    inputs, then = (streams(2, 3),), (streams(5, 4),)
    check(layer(Flattened()), *inputs, then=then, counts=FOUND, dynamic=True)


def test_default_iterations():
    """Each of the 39 divisions uses its iterate twice: the time must not double with each."""

    class Twenty(Connection):
        def sinkhorn(self, matrix: Tensor) -> Tensor:
            for _ in range(6):
                matrix = super().sinkhorn(matrix) if _ == 0 else self.again(matrix)
            return matrix

        def again(self, matrix: Tensor) -> Tensor:
            for _ in range(3):
                matrix = matrix / (matrix.sum(dim=-1, keepdim=True) + 1e-3)
                matrix = matrix / (matrix.sum(dim=-2, keepdim=True) + 1e-3)
            return matrix

    check(layer(Twenty()), streams(2, 3), counts=FOUND)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = layer(Connection())

    def forward(self, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(self.layer, x, use_reentrant=False)


def test_checkpointed():
    check(Checkpointed(), streams(2, 3), counts=FOUND)


@pytest.mark.parametrize(("connection", "reason"), NEAR_MISSES.values(), ids=NEAR_MISSES)
def test_near_misses(connection, reason):
    missed = MISSED if connection is not NormAfter else {"mhc_post_res": 1}
    refused(layer(connection()), streams(2, 3), op="mhc_coeffs", reason=reason, counts=missed)


def test_a_rounded_product():
    """The casts are not the op's in bfloat16; in float32 they do nothing."""
    made, x = layer(Rounded(), torch.bfloat16), streams(2, 3, dtype=torch.bfloat16)
    refused(made, x, op="mhc_coeffs", reason="casts or sizes", counts=MISSED)
    check(layer(Rounded()), streams(2, 3), counts=FOUND)


class UnweightedStreams(Connection):
    def collapsed(self, h_pre: Tensor, x: Tensor) -> Tensor:
        return (h_pre.unsqueeze(-1) * x.exp()).mean(dim=2)


def test_without_the_weighted_sum():
    found = {"mhc_coeffs": 1, "mhc_post_res": 1}
    reason = "not used in a sum"
    made = layer(UnweightedStreams())
    refused(made, streams(2, 3), op="mhc_pre", reason=reason, counts=found)


def test_a_weighted_sum_of_other_weights():
    """As that of experts: it is left, and not reported."""
    function = lambda x, weights: (weights.unsqueeze(-1) * x).sum(-2)
    refused(function, streams(2, 3), values(2, 3, HC), op="mhc_pre")


def other_sum(x: Tensor, f_out: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    return post.unsqueeze(-1) * f_out.unsqueeze(-2) - torch.matmul(comb, x)


def of_one_stream(x: Tensor, f_out: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """The matrix is broadcast over the tokens, which the op does not do."""
    return post.unsqueeze(-1) * f_out.unsqueeze(-2) + torch.matmul(comb[0, 0], x)


def product_used(x: Tensor, f_out: Tensor, post: Tensor, comb: Tensor) -> tuple[Tensor, Tensor]:
    mixed = torch.matmul(comb, x)
    return post.unsqueeze(-1) * f_out.unsqueeze(-2) + mixed, mixed


@pytest.mark.parametrize(
    ("function", "reason"),
    [(other_sum, ""), (of_one_stream, "mhc_post_res"), (product_used, "used elsewhere")],
)
def test_near_misses_of_post_res(function, reason):
    x, f_out = streams(2, 3), values(2, 3, HIDDEN)
    weights = values(2, 3, HC), values(2, 3, HC, HC)
    refused(function, x, f_out, *weights, op="mhc_post_res", reason=reason)


def test_routers_are_not_iterations():
    """A router divides its weights by their sum, once."""
    function = lambda x: nn.functional.softmax(x, -1) / (x.sum(-1, keepdim=True) + 1e-20)
    refused(function, values(5, HC), op="mhc_coeffs")
