"""attn_res; tests/bench/test_bench_workloads.py compares it with the code of its paper."""

from __future__ import annotations

import pytest
import torch

import liger_ops
from op_table import OPS
from op_under_test import EVERY_FOLDER

OP = OPS["attn_res"]


@pytest.mark.device_kernels
@EVERY_FOLDER
def test_tokens_are_independent(folder: str) -> None:
    case = OP.case(shape=(3, 7, 20), dtype=torch.float32, weight_dtype=torch.float32)
    tensors = OP.tensors(case)
    order = torch.randperm(7, generator=torch.Generator().manual_seed(0)).to(tensors["x"].device)
    permuted = {**tensors, "x": tensors["x"][:, order], "dy": tensors["dy"][order]}
    y, of_permuted = (OP.kernel(folder)(*OP.forward_args(case, t)) for t in (tensors, permuted))
    torch.testing.assert_close(y[order], of_permuted)
    dx, dx_of_permuted = (
        OP.kernel(folder, backward=True)(*OP.backward_args(case, t))[0] for t in (tensors, permuted)
    )
    torch.testing.assert_close(dx[:, order], dx_of_permuted)


def test_the_module_takes_blocks_and_starts_with_their_mean() -> None:
    module, blocks = liger_ops.nn.AttnRes(8), [torch.randn(2, 3, 8) for _ in range(4)]
    torch.testing.assert_close(module(blocks), torch.stack(blocks).mean(0))
    torch.nn.init.normal_(module.query)
    assert torch.equal(module(blocks), module(torch.stack(blocks)))
