"""kl_div, jsd and tvd. M rows, V classes."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ....ops.losses.distribution_loss import DistributionLoss
from ...common.losses.distribution_loss import register
from ...common.losses.distribution_math import loaded, slopes, terms
from ...common.tensors import cdiv
from .. import tiling
from ..activations import activations
from ..activations.activations import place, store, tiles
from ..tile import load, remaining, tile_offsets
from ..tiling import COSTS, Cost, Plan, launch

# Kind of loss -> bytes per element: the most that any reduction, dtype and labels take, with both
# gradients.
FORWARD = {
    # (1, 4096): 80.4%, and 84.5% for the losses of elements.
    "kl_div": 40.7,
    "forward_kl": 40.7,
    "reverse_kl": 40.7,
    # (1, 2048): 78.0%.
    "jsd": 75.3,
    # (1, 8192): 83.3%.
    "tvd": 20.1,
}
BACKWARD = {
    # (1, 2048): 50.3%, and 58.6% with the gradients of elements.
    "kl_div": 56.4,
    "forward_kl": 56.4,
    "reverse_kl": 56.4,
    # (1, 2048): 84.2%, and 94.8% with labels.
    "jsd": 81.5,
    "labelled_jsd": 92.0,
    # (1, 2048): 50.2%, and 69.1% with labels and the gradients of elements.
    "tvd": 66.7,
}


COSTS.update(
    {
        f"distribution_loss_{kind}": Cost({2: cost, 4: cost}, {2: cost, 4: cost})
        for kind, cost in FORWARD.items()
    }
)
COSTS.update(
    {
        f"distribution_loss_{kind}_backward": Cost({}, {2: cost, 4: cost})
        for kind, cost in BACKWARD.items()
    }
)


@triton.jit(do_not_specialize=["M"])
def _distribution_loss_kernel(
    x_ptr, y_ptr, loss_ptr,
    M, V, scalar,
    KIND: tl.constexpr, ELEMENTWISE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    rows, cols, offsets = tile_offsets(V, BLOCK_M, BLOCK_N)
    for tile in tl.range(tl.program_id(0).to(tl.int64), tl.cdiv(M, BLOCK_M), tl.num_programs(0)):
        row = tile * BLOCK_M
        row_mask = rows < remaining(M, row, BLOCK_M)
        sum = tl.zeros((BLOCK_M, 1), tl.float32)
        for col in tl.range(0, V, BLOCK_N):
            start = row * V + col
            mask = row_mask & (cols < remaining(V, col, BLOCK_N))
            x = loaded(x_ptr + start + offsets, mask, KIND)
            y = loaded(y_ptr + start + offsets, mask, KIND)
            value = terms(x, y, scalar, KIND, False)
            if ELEMENTWISE:
                tl.store(loss_ptr + start + offsets, value, mask=mask)
            else:
                sum += tl.sum(value, axis=1)[:, None]
        if not ELEMENTWISE:
            tl.store(loss_ptr + row + rows, sum, mask=row_mask)


@triton.jit(do_not_specialize=["M"])
def _distribution_loss_backward_kernel(
    x_ptr, y_ptr, dx_ptr, dy_ptr, grad_ptr,
    M, V, scalar, within_ptr,
    KIND: tl.constexpr, ELEMENTWISE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    rows = tl.arange(0, BLOCK_M)[:, None]
    program = tl.program_id(0).to(tl.int64)
    for tile in tl.range(program, tiles(M, V, BLOCK_M, BLOCK_N), tl.num_programs(0)):
        row, col = place(tile, V, BLOCK_M, BLOCK_N)
        row_mask = rows < remaining(M, row, BLOCK_M)
        x = activations.load(x_ptr, row, col, M, V, V, BLOCK_M, BLOCK_N)
        y = activations.load(y_ptr, row, col, M, V, V, BLOCK_M, BLOCK_N)
        if ELEMENTWISE:
            grad = activations.load(grad_ptr, row, col, M, V, V, BLOCK_M, BLOCK_N)
        else:
            grad = load(grad_ptr + row, rows, row_mask)
        of_x, of_y = slopes(x, y, scalar, KIND, False)
        dx, dy = grad * of_x, grad * of_y
        if within_ptr is not None:
            # x, y and grad of a row that does not count may be inf or NaN.
            counted = load(within_ptr + row, rows, row_mask) != 0.0
            dx, dy = tl.where(counted, dx, 0.0), tl.where(counted, dy, 0.0)
        if dx_ptr is not None:
            store(dx_ptr, row, col, M, V, V, dx, BLOCK_M, BLOCK_N)
        if dy_ptr is not None:
            store(dy_ptr, row, col, M, V, V, dy, BLOCK_M, BLOCK_N)


def launch_loss(
    form: DistributionLoss, within: Tensor | None, loss: Tensor, plan: Plan | None
) -> None:
    """Fill loss, (M,) or by elements (M, V), with 0 for rows that are not `within`."""
    x, y = tiling.rows(form.x), tiling.rows(form.y)
    M, V = x.shape
    plan = plan or tiling.plan(f"distribution_loss_{form.kind}", V, x, y)
    launch(
        _distribution_loss_kernel, plan, cdiv(M, plan.BLOCK_M),
        x, y, loss,
        M, V, form.scalar,
        KIND=form.kind, ELEMENTWISE=loss.dim() == 2,
    )  # fmt: skip
    if within is not None:
        ignored = within == 0
        loss.masked_fill_(ignored.unsqueeze(1) if loss.dim() == 2 else ignored, 0.0)


def launch_backward(
    form: DistributionLoss, within: Tensor | None, grad: Tensor,
    dx: Tensor | None, dy: Tensor | None, plan: Plan | None,
) -> None:  # fmt: skip
    """Fill dx and dy. grad: a number, (M,) or (M, V), of any strides."""
    x, y = tiling.rows(form.x), tiling.rows(form.y)
    each = grad.dim() == 2
    kind = "labelled_jsd" if form.kind == "jsd" and within is not None else form.kind
    grad = (grad if each else grad.expand(x.shape[0])).contiguous()
    activations.launch_tiles(
        f"distribution_loss_{kind}_backward", _distribution_loss_backward_kernel, plan,
        [x, y, dx, dy, grad], form.scalar, within,
        KIND=form.kind, ELEMENTWISE=each,
    )  # fmt: skip


register("npu", launch_loss, launch_backward)
