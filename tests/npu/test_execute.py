"""The lowered code runs on the CPU, and its outputs and gradients are compared with float64."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from execute import CORES, executing
from launch_cases import LaunchCase, executed
from liger_ops import library
from liger_ops.lowering.npu.attention import multi_token_attention
from liger_ops.lowering.npu.tiling import Plan
from lower import lower
from op_checks import assert_backward_matches_truth, assert_forward_matches_truth, widened
from op_table import OPS
from reported import reported
from toolchain import missing_cpu_tools

CASES = {
    f"{case.op.id}{'_backward' * backward} {case.label}": (case, backward)
    for case in executed()
    for backward in case.directions
}


def check(case: LaunchCase, backward: bool) -> None:
    """Compare the op's outputs, or its gradients if `backward`, with float64."""
    if backward:
        assert_backward_matches_truth(case.op, "npu", case.case)
    else:
        assert_forward_matches_truth(case.op, "npu", case.case)


@pytest.mark.parametrize("label", CASES)
def test_executed(label, needs):
    needs(missing_cpu_tools())
    with executing() as launched:
        check(*CASES[label])
    assert launched
    assert not [line for launch in launched for line in reported(lower(launch).mlir)]


@pytest.mark.parametrize("sparse", (False, True))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_wide_causal_rows_executed(dtype, sparse, needs):
    """Compare multi_token_attention's kernels for wide rows with those for rows that fit a tile."""
    needs(missing_cpu_tools())
    scores, dp = torch.randn(2, 2, 3, 70, 70, generator=torch.Generator().manual_seed(0)).to(dtype)
    results = []
    for block in (16, 128):
        tile, p, dscores = Plan(1, block, CORES), torch.empty_like(scores), dp.clone()
        with executing() as launched:
            multi_token_attention.launch_forward(scores, p, sparse, tile)
            multi_token_attention.launch_backward(dscores, scores, dscores, sparse, tile)
        assert ["wide" in launch.kernel for launch in launched] == [block == 16] * 2
        results.append((p, dscores))
    torch.testing.assert_close(*results)
    assert results[0][0].triu(1).count_nonzero() == 0
    torch.testing.assert_close(
        results[0][0].float().sum(-1), torch.ones(2, 3, 70), atol=1e-2, rtol=0
    )


@pytest.mark.parametrize("classes", ((300, 300), (70, 300), (300, 70)))
def test_two_heads_executed(classes, needs):
    """Check divergence's code between the products of two heads, with all options of its kernels:
    caps, the cross-entropy of labels, and vocabularies of different sizes."""
    needs(missing_cpu_tools())
    op, (V, W) = OPS["linear_divergence_forward-mean"], classes
    case = replace(op.sample(torch.float32), V=V, W=W, chunk_bytes=2 * 4 * (V + W))
    tensors = op.tensors(case)
    for backward, arguments in ((False, op.forward_args), (True, op.backward_args)):
        args = arguments(case, tensors)
        with executing() as launched:
            results = op.kernel("npu", backward)(*args)
        assert launched
        definition = library.OPS[op.backward_name].definition if backward else op.definition
        truths = definition(*widened(args))
        for value, truth in zip(results, truths, strict=True):
            torch.testing.assert_close(value.double(), truth, rtol=1e-4, atol=1e-5)


def without_loops(mlir: str) -> str:
    """Change the kernel so that it computes no tile."""
    return re.sub(r"(scf\.for %\w+ = )(%[\w#]+) to %[\w#]+", r"\1\2 to \2", mlir)


def adding(mlir: str) -> str:
    """Change the kernel so that it adds where it should multiply."""
    return mlir.replace("arith.mulf", "arith.addf")


def subtracting(mlir: str) -> str:
    """Change the kernel so that it subtracts where it should add, in the sums of rows too."""
    return mlir.replace("arith.addf", "arith.subf")


def small_cases(op: str) -> list[tuple[LaunchCase, bool]]:
    """Return the smallest case of an op, forward and backward."""
    of_op = [case for case, _ in CASES.values() if case.op.id == op and case.plain]
    float32 = next(case for case in of_op if case.case.dtype is torch.float32)
    return [(float32, backward) for backward in float32.directions]


def is_caught(case: LaunchCase, backward: bool, change: Callable[[str], str]) -> bool | None:
    """Return whether the check fails on the changed code, or None if nothing was changed."""
    effective = []

    def changed(mlir: str) -> str:
        effective.append(change(mlir) != mlir)
        return change(mlir)

    try:
        with executing(changed):
            check(case, backward)
    except AssertionError:
        return True
    return False if any(effective) else None


@pytest.mark.parametrize("op", dict.fromkeys(case.op.id for case, _ in CASES.values()))
def test_changed_code_is_caught(op, needs):
    needs(missing_cpu_tools())
    for case, backward in small_cases(op):
        caught = {
            change.__name__: is_caught(case, backward, change)
            for change in (without_loops, adding, subtracting)
        }
        assert caught.pop("without_loops"), f"{op}, backward {backward}: nothing computed passes"
        assert True in caught.values(), f"{op}, backward {backward}: {caught}"
        assert False not in caught.values(), f"{op}, backward {backward}: {caught}"
