"""The npu's tile rules: what they choose fits the Unified Buffer and the grid, for any sizes."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import liger_ops.lowering.npu as npu
from liger_ops import library
from liger_ops.lowering.common.activations.activations import ACTIVATIONS
from liger_ops.lowering.npu import tiling
from liger_ops.lowering.npu.attention import multi_token_attention
from liger_ops.lowering.npu.tiling import COSTS, MIN_BLOCK_N, GroupShape, Plan

UB_BYTES = st.sampled_from((65536, 131072, 196608, 262144))
ITEMSIZES = st.sampled_from(({2}, {4}, {2, 4}))
CORES = st.integers(1, 64)
SIZES = st.one_of(st.integers(1, 300), st.integers(1, 2**20), st.sampled_from((2048, 4096, 8192)))
ELEMENTWISE = (*ACTIVATIONS, "relu_squared")
ELEMENTWISE_OPS = [op for op in COSTS if any(name in op for name in ELEMENTWISE)]
ROW_OPS = [op for op in COSTS if not op.startswith("group_norm") and op not in ELEMENTWISE_OPS]
GROUP_OPS = [op for op in COSTS if op.startswith("group_norm")]


def assert_fits(op: str, plan: Plan, whole: bool, itemsizes: set[int], ub_bytes: int) -> None:
    """Within the share of the buffer that leaves room for what the planners differ in."""
    for size in (plan.BLOCK_M, plan.BLOCK_N):
        assert size & (size - 1) == 0
    elements = plan.BLOCK_M * plan.BLOCK_N
    if plan.KEPT:
        kept = COSTS[op].kept[plan.KEPT - 1]
        row, piece = (max(map(cost.get, itemsizes)) for cost in (kept.row, kept.piece))
        assert plan.ROW * row + elements * piece <= tiling.UB_SHARE * ub_bytes
        assert plan.BLOCK_M == 1 or op in GROUP_OPS
        assert plan.ROW % elements == 0 and elements < plan.ROW
        return
    cost = COSTS[op].whole if whole else COSTS[op].wide
    bytes_taken = elements * max(cost[itemsize] for itemsize in itemsizes)
    assert bytes_taken <= tiling.UB_SHARE * ub_bytes or elements <= MIN_BLOCK_N


@pytest.mark.parametrize("op", ROW_OPS)
@given(N=SIZES, itemsizes=ITEMSIZES, ub_bytes=UB_BYTES, cores=CORES)
def test_rows_fit(op: str, N: int, itemsizes: set[int], ub_bytes: int, cores: int) -> None:
    plan = tiling.rows_plan(op, N, itemsizes, ub_bytes, cores)
    assert_fits(op, plan, bool(COSTS[op].whole) and plan.whole(N), itemsizes, ub_bytes)
    if not plan.whole(N):
        assert plan.BLOCK_M == 1
    assert plan.programs(10**9) == cores


@pytest.mark.parametrize("op", GROUP_OPS)
@given(
    shape=st.builds(GroupShape, st.integers(1, 99999), st.integers(1, 64), SIZES, SIZES),
    itemsizes=ITEMSIZES,
    ub_bytes=UB_BYTES,
    cores=CORES,
)
def test_groups_fit(
    op: str, shape: GroupShape, itemsizes: set[int], ub_bytes: int, cores: int
) -> None:
    plan = tiling.groups_plan(op, shape, itemsizes, ub_bytes, cores)
    assert_fits(op, plan, shape.fits(plan), itemsizes, ub_bytes)


@pytest.mark.parametrize("op", ELEMENTWISE_OPS)
@given(M=st.integers(1, 99999), N=SIZES, itemsizes=ITEMSIZES, ub_bytes=UB_BYTES, cores=CORES)
def test_tiles_fit(op: str, M: int, N: int, itemsizes: set[int], ub_bytes: int, cores: int) -> None:
    """And no core is idle for want of tiles, but where they would be less than 16 elements."""
    plan = tiling.tiles_plan(op, M, N, itemsizes, ub_bytes, cores)
    assert_fits(op, plan, False, itemsizes, ub_bytes)
    tiles = tiling.cdiv(M, plan.BLOCK_M) * tiling.cdiv(N, plan.BLOCK_N)
    assert 2 * tiles >= min(cores, M * N // MIN_BLOCK_N)


def test_short_rows_go_several_to_a_tile() -> None:
    """A row that fits is never walked twice, and narrow rows take fewer turns."""
    for op in ("rms_norm", "fused_add_rms_norm", "rms_norm_backward"):
        plans = [tiling.rows_plan(op, N, {2}, 196608, 40) for N in (2048, 1024, 512, 256)]
        assert all(plan.whole(N) for plan, N in zip(plans, (2048, 1024, 512, 256), strict=True))
        rows = [plan.BLOCK_M for plan in plans]
        assert rows == [rows[0], 2 * rows[0], 4 * rows[0], 8 * rows[0]]


# Entry of COSTS, with how many weights and sums of their gradients -> the widest row of bfloat16
# that is read once. Rows of float32 are half as wide.
READ_ONCE = {
    ("rms_norm", 1, 0): 16384, ("rms_norm_none", 1, 0): 16384, ("fused_add_rms_norm", 1, 0): 16384,
    ("layer_norm", 2, 0): 16384, ("rms_norm_backward", 1, 1): 8192,
    ("add_rms_norm_backward", 1, 1): 8192, ("add_rms_norm_backward_dx", 1, 0): 8192,
    ("layer_norm_backward", 1, 2): 8192, ("softmax", 0, 0): 32768,
    ("softmax_backward", 0, 0): 16384,
}  # fmt: skip


@pytest.mark.parametrize(("op", "weights", "sums"), READ_ONCE)
def test_rows_are_kept_up_to_the_widths_of_the_table(op: str, weights: int, sums: int) -> None:
    """The backward kernel of a norm keeps x and dy from its second level on."""
    for itemsize in (2, 4):
        widest = READ_ONCE[op, weights, sums] * 2 // itemsize
        for N in (*range(257, widest, 257), *range(512, widest + 1, 512)):
            # The weights may be float32 beside rows of bfloat16.
            for parameter in (itemsize, 4):
                given = {"weights": weights * parameter, "sums": 4 * sums}
                plan = tiling.rows_plan(op, N, {itemsize}, 196608, 40, **given)
                stays = 2 if "norm_backward" in op else 1
                assert plan.whole(N) or (stays <= plan.KEPT and N <= plan.ROW), (N, plan)


def test_environment_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    row = torch.empty(1, 4096)
    default = tiling.plan("rms_norm", 4096, row)
    assert default.whole(4096) and default.cores == tiling.INTERPRETED_VECTOR_CORES
    monkeypatch.setenv("LIGER_OPS_NPU_UB_BYTES", "32768")
    monkeypatch.setenv("LIGER_OPS_NPU_VECTOR_CORES", "48")
    small = tiling.plan("rms_norm", 4096, row)
    assert not small.whole(4096) and small.cores == 48


@pytest.fixture
def grids(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The grids that host code asks for; nothing is launched."""
    recorded: list[int] = []

    def record(kernel: Any, plan: Plan, tiles: int, *args: Any, **constants: Any) -> None:
        recorded.append(plan.programs(tiles))

    for module in pkgutil.walk_packages(npu.__path__, f"{npu.__name__}."):
        loaded = importlib.import_module(module.name)
        if hasattr(loaded, "launch"):
            monkeypatch.setattr(loaded, "launch", record)
    return recorded


@pytest.mark.parametrize("cores", (1, 40, 10**6))
@pytest.mark.parametrize(
    ("shape", "num_groups"),
    (((70000, 2, 1), 2), ((2, 70000, 2), 70000), ((1, 131072), 1), ((3, 4, 33, 65), 2)),
)
def test_the_grid_stays_below_65536(
    monkeypatch: pytest.MonkeyPatch,
    grids: list[int],
    cores: int,
    shape: tuple[int, ...],
    num_groups: int,
) -> None:
    """At any (N, C, groups) and any number of rows, and never above the vector cores."""
    monkeypatch.setenv("LIGER_OPS_NPU_VECTOR_CORES", str(cores))
    kernel = {name: op.kernels["npu"] for name, op in library.OPS.items()}
    x, weight = torch.empty(shape), torch.empty(shape[1])
    row = torch.empty(shape[-1])
    both, all_three = [True] * 2, [True] * 3
    kernel["group_norm"](x, num_groups, weight, weight)
    kernel["group_norm_backward"](x, x, num_groups, weight, weight, 1e-5, all_three)
    kernel["rms_norm"](x, row)
    kernel["rms_norm_backward"](x, x, row, 1e-6, 0.0, both)
    kernel["fused_add_rms_norm"](x, x, row)
    kernel["fused_add_rms_norm_backward"](x, x, x, row, 1e-6, 0.0, both)
    for scale in (row, torch.empty(shape[0], shape[-1])):
        kernel["modulated_rms_norm"](x, scale)
        kernel["modulated_rms_norm_backward"](x, x, scale, None, row, 1e-6, 0.0, [True] * 4)
        kernel["modulated_layer_norm"](x, scale)
        kernel["modulated_layer_norm_backward"](x, x, scale, None, row, None, 1e-6, [True] * 5)
    groups = (1e-6, True, 1, "silu")
    kernel["gated_rms_norm"](x, x, row, *groups)
    kernel["gated_rms_norm_backward"](x, x, x, row, *groups, all_three)
    rows = x.reshape(-1, shape[-1])
    kernel["embedding_backward"](rows, torch.zeros(len(rows), dtype=torch.int64), 3, None)
    kernel["attn_res"](rows.unsqueeze(0), row, row)
    kernel["attn_res_backward"](rows, rows.unsqueeze(0), row, row, 1e-6, all_three)
    kernel["dyt"](x, row[:1], row, row)
    kernel["dyt_backward"](x, x, row[:1], row, row, [True] * 4)
    kernel["poly_norm"](x, torch.empty(3))
    kernel["poly_norm_backward"](x, x, torch.empty(3), torch.empty(1), 1e-6, all_three)
    kernel["swiglu"](x, x)
    kernel["clamped_swiglu_backward"](x, x, x, 1.702, 7.0, 1.0, False, both)
    kernel["relu_squared_backward"](x, x)
    kernel["layer_norm"](x, row, row)
    kernel["layer_norm_backward"](x, x, row, row, 1e-5, all_three)
    for op in ("softmax", "log_softmax"):
        kernel[op](x)
        kernel[f"{op}_backward"](x, x)
    kernel["sparsemax_forward"](x)
    kernel["sparsemax_backward"](x, x)
    multi_token_attention.launch_forward(x, x, False)
    multi_token_attention.launch_backward(x, x, x, False)
    logits = x.reshape(-1, shape[-1])
    target = torch.zeros(logits.shape[0], dtype=torch.int64)
    loss = kernel["cross_entropy_forward"](logits, target)
    grads, options = (loss[0], None, None, None), (-100, "mean", 0.0, 0.0, None, 1.0)
    inputs = (logits, target, None, None, None, loss[2], loss[7], loss[4])
    kernel["cross_entropy_backward"](*grads, *inputs, *options)
    log_prob, entropy, lse, *_, error = kernel["log_prob_forward"](logits, target)
    kernel["log_prob_backward"](
        log_prob, lse, None, logits, target, entropy, lse, error, 1.0, None, 1.0, -100
    )
    results = kernel["divergence_forward"](logits, logits)
    kernel["divergence_backward"](
        results[0], logits, logits, None, *results, "jsd", 0.5, 1.0, None, -100, both
    )
    loss = kernel["tvd"](logits, logits)
    kernel["tvd_backward"](loss, logits, logits, None, "batchmean", -100, both)
    streams, h = logits.unsqueeze(1), torch.ones(logits.shape[0], 1)
    kernel["mhc_pre"](streams, h)
    kernel["mhc_pre_backward"](logits, streams, h, both)
    kernel["mhc_post_res"](streams, logits, h, h.unsqueeze(2))
    kernel["mhc_post_res_backward"](streams, streams, logits, h, h.unsqueeze(2), [True] * 4)
    mix = (streams, torch.ones(shape[-1], 3), torch.ones(3), *[torch.ones(())] * 3)
    *_, product, rstd = kernel["mhc_coeffs_forward"](*mix)
    kernel["mhc_coeffs_backward"](
        h, h, h.unsqueeze(2), *mix, product, rstd, 20, 1e-6, 1e-6, 2.0, [True] * 6
    )
    heads = x.reshape(1, 2, -1, 2)
    tables = heads[0, 0]
    kernel["rope"](heads, heads, tables, tables)
    kernel["rope_backward"](heads, heads, tables, tables, True, False, None, False, both)
    norm = (tables[0], tables[0], 1e-6, 0.0)
    kernel["rms_norm_rope"](heads, heads, tables, tables, *norm)
    kernel["rms_norm_rope_backward"](
        *[heads] * 4, tables, tables, *norm, False, False, None, False, [True] * 4
    )
    assert len(grids) >= 25
    assert all(1 <= grid <= min(cores, 65535) for grid in grids)
