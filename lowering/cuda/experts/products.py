"""Products of the rows of experts with their weights, and of the weights' gradients.

In a product of rows, a program takes tiles in turn. A tile is a block of rows of one expert
(`route.RowBlocks`) times BLOCK_N columns. The tiles of GROUP blocks of rows are neighbours in that
order. K is the length of the sums.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...common.activations.activation_math import gated, gated_gradients, relu


@triton.jit
def _tile(tile, table_ptr, offsets_ptr, most, total, across, GROUP: tl.constexpr):
    """Return the expert of a tile, the tile's first row, the end of the expert's rows, and the
    number of the tile's block of columns.

    Tiles go through the blocks of rows of a group first, then to the next block of columns.
    """
    group = tile // (GROUP * across)
    size = min(total - group * GROUP, GROUP)
    within = tile % (GROUP * across)
    block = group * GROUP + within % size
    expert = tl.load(table_ptr + block)
    row = tl.load(table_ptr + most + block)
    return expert.to(tl.int64), row, tl.load(offsets_ptr + expert + 1), within // size


@triton.jit
def _product(
    acc, a_rows, b_cols, inside, stride_k, K,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return acc plus rows, of unit stride, times columns, both given by pointers. A column that is
    not `inside` is 0."""
    k = tl.arange(0, BLOCK_K)
    a = a_rows[:, None] + k[None, :]
    b = b_cols[None, :] + k.to(tl.int64)[:, None] * stride_k
    # int64, as the offsets in b are: K * stride_k may be beyond int32.
    step = tl.full((), BLOCK_K, tl.int64) * stride_k
    for first in range(0, K, BLOCK_K):
        if EVEN_K:
            left = tl.load(a)
        else:
            left = tl.load(a, mask=(k < K - first)[None, :], other=0.0)
        if EVEN_K and EVEN_N:
            right = tl.load(b)
        elif EVEN_K:
            right = tl.load(b, mask=inside[None, :], other=0.0)
        else:
            right = tl.load(b, mask=inside[None, :] & (k < K - first)[:, None], other=0.0)
        acc = tl.dot(left, right, acc, input_precision=PRECISION)
        a += BLOCK_K
        b += step
    return acc


@triton.jit
def _halves(both, BLOCK_M: tl.constexpr, HALF: tl.constexpr, PAIRED: tl.constexpr):
    """Split a tile into gate and up, which it holds as pairs of columns, or side by side."""
    if PAIRED:
        return tl.split(tl.reshape(both, (BLOCK_M, HALF, 2)))
    return tl.split(tl.permute(tl.reshape(both, (BLOCK_M, 2, HALF)), (0, 2, 1)))


@triton.jit(do_not_specialize=["most"])
def _up_kernel(
    x_ptr, w_ptr, bias_ptr, u_ptr, b_ptr, order_ptr, offsets_ptr, table_ptr, pre_ptr, act_ptr,
    most, stride_be, stride_bn, stride_br, R, K, I, top_k, stride_x, stride_e, stride_n, stride_k,
    a, b, c,
    ACTIVATION: tl.constexpr, INTERLEAVED: tl.constexpr, PAIRED: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, EVEN_R: tl.constexpr, PRECISION: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Compute pre = rows of x @ gate_up[e].T + u @ b[e].T + bias, and act = activation(pre); either
    may be None.

    A tile of a gated activation has BLOCK_N columns of h, which are BLOCK_N / 2 columns of gate and
    as many of up.
    """
    GATED: tl.constexpr = ACTIVATION != "relu_squared"
    WIDTH: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    across = tl.cdiv(I, WIDTH)
    total = tl.load(table_ptr + 2 * most)
    for tile in tl.range(tl.program_id(0), total * across, tl.num_programs(0)):
        expert, row, end, n = _tile(tile, table_ptr, offsets_ptr, most, total, across, GROUP)
        rows = row + tl.arange(0, BLOCK_M)
        exists = rows < end
        # Rows behind the expert's last stand for its first row of the block: no load needs a mask
        # of rows, and the stores have one.
        tokens = tl.load(order_ptr + tl.where(exists, rows, row)) // top_k
        col = tl.arange(0, BLOCK_N)
        if INTERLEAVED or not GATED:
            of_weight = n * BLOCK_N + col
        else:
            # The rows of the weight for the tile's columns, as pairs of columns or as halves.
            second = col % 2 if PAIRED else col // WIDTH
            of_weight = n * WIDTH + (col // 2 if PAIRED else col % WIDTH) + second * I
        F = I * 2 if GATED else I
        if INTERLEAVED or not GATED:
            inside = of_weight < F
        else:
            inside = of_weight - second * I < I
        acc = _product(
            tl.zeros((BLOCK_M, BLOCK_N), tl.float32),
            x_ptr + tokens.to(tl.int64) * stride_x,
            w_ptr + expert * stride_e + of_weight.to(tl.int64) * stride_n,
            inside, stride_k, K, EVEN_N, EVEN_K, PRECISION, BLOCK_K,
        )  # fmt: skip
        if u_ptr is not None:
            acc = _product(
                acc,
                u_ptr + tl.where(exists, rows, row).to(tl.int64) * R,
                b_ptr + expert * stride_be + of_weight.to(tl.int64) * stride_bn,
                inside, stride_br, R, EVEN_N, EVEN_R, PRECISION, BLOCK_R,
            )  # fmt: skip
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + expert * F + of_weight, mask=inside, other=0.0)
            acc += bias.to(tl.float32)[None, :]
        h = acc.to(x_ptr.dtype.element_ty)
        cols = n * WIDTH + tl.arange(0, WIDTH)
        at = rows.to(tl.int64)[:, None]
        mask = exists[:, None] & (cols < I)[None, :]
        if not GATED:
            if pre_ptr is not None:
                tl.store(pre_ptr + at * F + cols[None, :], h, mask=mask)
            positive = relu(h.to(tl.float32))
            y = positive * positive
        else:
            gate, up = _halves(h, BLOCK_M, WIDTH, PAIRED)
            if pre_ptr is not None:
                if INTERLEAVED:
                    wide = exists[:, None] & inside[None, :]
                    tl.store(pre_ptr + at * F + of_weight[None, :], h, mask=wide)
                else:
                    tl.store(pre_ptr + at * F + cols[None, :], gate, mask=mask)
                    tl.store(pre_ptr + at * F + I + cols[None, :], up, mask=mask)
            y = gated(gate.to(tl.float32), up.to(tl.float32), a, b, c, ACTIVATION)
        if act_ptr is not None:
            y = y.to(act_ptr.dtype.element_ty)
            tl.store(act_ptr + at * I + cols[None, :], y, mask=mask)


@triton.jit(do_not_specialize=["most"])
def _rows_kernel(
    x_ptr, w_ptr, bias_ptr, u_ptr, b_ptr, order_ptr, offsets_ptr, table_ptr, y_ptr,
    most, stride_be, stride_bn, stride_br, R, K, N, top_k, stride_e, stride_n, stride_k, scale,
    GATHERS: tl.constexpr, SCATTERS: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, EVEN_R: tl.constexpr, PRECISION: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Compute y = x @ w[e].T + u @ b[e].T + bias[e], or scale * x @ w[e].T.

    GATHERS: x has the rows of tokens, which are gathered. SCATTERS: y is by token, so that the rows
    of each token are adjacent. Otherwise x or y is by expert.
    """
    across = tl.cdiv(N, BLOCK_N)
    total = tl.load(table_ptr + 2 * most)
    for tile in tl.range(tl.program_id(0), total * across, tl.num_programs(0)):
        expert, row, end, n = _tile(tile, table_ptr, offsets_ptr, most, total, across, GROUP)
        rows = row + tl.arange(0, BLOCK_M)
        exists = rows < end
        rows = tl.where(exists, rows, row)
        places = tl.load(order_ptr + rows)
        cols = n * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = cols < N
        acc = _product(
            tl.zeros((BLOCK_M, BLOCK_N), tl.float32),
            x_ptr + (places // top_k if GATHERS else rows).to(tl.int64) * K,
            w_ptr + expert * stride_e + cols.to(tl.int64) * stride_n,
            inside, stride_k, K, EVEN_N, EVEN_K, PRECISION, BLOCK_K,
        )  # fmt: skip
        if u_ptr is not None:
            acc = _product(
                acc,
                u_ptr + rows.to(tl.int64) * R,
                b_ptr + expert * stride_be + cols.to(tl.int64) * stride_bn,
                inside, stride_br, R, EVEN_N, EVEN_R, PRECISION, BLOCK_R,
            )  # fmt: skip
        if scale is not None:
            acc *= scale
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + expert * N + cols, mask=inside, other=0.0)
            acc += bias.to(tl.float32)[None, :]
        at = (places if SCATTERS else rows).to(tl.int64)[:, None] * N + cols[None, :]
        y = acc.to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + at, y, mask=exists[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["E"])
def _slopes_kernel(
    da_ptr, pre_ptr, weights_ptr, order_ptr, offsets_ptr, dpre_ptr, act_ptr, dweights_ptr,
    E, I, a, b, c,
    ACTIVATION: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute dpre, the row's weight times da through the activation's slopes; act, the weight
    times the activation; and dweights, the sum of da times the activation.

    The rows of sentinels, ids that are no expert, are last: only their dweights are written, as 0.
    """
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(order_ptr + row)
    if row >= tl.load(offsets_ptr + E):
        if dweights_ptr is not None:
            tl.store(dweights_ptr + place, 0.0)
        return
    weight = tl.load(weights_ptr + place).to(tl.float32)
    total = tl.zeros((BLOCK_N,), tl.float32)
    for first in range(0, I, BLOCK_N):
        cols = first + tl.arange(0, BLOCK_N)
        inside = cols < I
        da = tl.load(da_ptr + row * I + cols, mask=inside, other=0.0).to(tl.float32)
        if ACTIVATION == "relu_squared":
            h = tl.load(pre_ptr + row * I + cols, mask=inside, other=0.0)
            positive = relu(h.to(tl.float32))
            act = positive * positive
            dh = (da * weight) * (2.0 * positive)
            tl.store(dpre_ptr + row * I + cols, dh.to(dpre_ptr.dtype.element_ty), mask=inside)
        else:
            if INTERLEAVED:
                pairs = row * (2 * I) + first * 2 + tl.arange(0, 2 * BLOCK_N)
                exist = first * 2 + tl.arange(0, 2 * BLOCK_N) < 2 * I
                both = tl.load(pre_ptr + pairs, mask=exist, other=0.0)
                gate, up = tl.split(tl.reshape(both, (BLOCK_N, 2)))
            else:
                gate = tl.load(pre_ptr + row * (2 * I) + cols, mask=inside, other=0.0)
                up = tl.load(pre_ptr + row * (2 * I) + I + cols, mask=inside, other=0.0)
            gate = gate.to(tl.float32)
            up = up.to(tl.float32)
            act = gated(gate, up, a, b, c, ACTIVATION)
            dgate, dup = gated_gradients(da * weight, gate, up, a, b, c, ACTIVATION)
            dgate = dgate.to(dpre_ptr.dtype.element_ty)
            dup = dup.to(dpre_ptr.dtype.element_ty)
            if INTERLEAVED:
                tl.store(dpre_ptr + pairs, tl.interleave(dgate, dup), mask=exist)
            else:
                tl.store(dpre_ptr + row * (2 * I) + cols, dgate, mask=inside)
                tl.store(dpre_ptr + row * (2 * I) + I + cols, dup, mask=inside)
        total += tl.where(inside, da * act, 0.0)
        if act_ptr is not None:
            weighted = (act * weight).to(act_ptr.dtype.element_ty)
            tl.store(act_ptr + row * I + cols, weighted, mask=inside)
    if dweights_ptr is not None:
        tl.store(dweights_ptr + place, tl.sum(total, 0))


@triton.jit
def _weight_kernel(
    a_ptr, b_ptr, order_ptr, offsets_ptr, dw_ptr, P, Q, top_k,
    GATHER_A: tl.constexpr, GATHER_B: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute dw[e], (P, Q): the sum over the expert's rows of a[row].T @ b[row]. GATHER_A,
    GATHER_B: a or b has the rows of tokens, which are gathered."""
    down, across = tl.cdiv(P, BLOCK_P), tl.cdiv(Q, BLOCK_Q)
    expert = tl.program_id(0) // (down * across)
    tile = tl.program_id(0) % (down * across)
    group = tile // (GROUP * across)
    size = min(down - group * GROUP, GROUP)
    within = tile % (GROUP * across)
    p = (group * GROUP + within % size) * BLOCK_P + tl.arange(0, BLOCK_P)
    q = within // size * BLOCK_Q + tl.arange(0, BLOCK_Q)
    start = tl.load(offsets_ptr + expert)
    end = tl.load(offsets_ptr + expert + 1)
    acc = tl.zeros((BLOCK_P, BLOCK_Q), tl.float32)
    for first in range(start, end, BLOCK_K):
        rows = first + tl.arange(0, BLOCK_K)
        exists = rows < end
        at = rows.to(tl.int64)
        if GATHER_A or GATHER_B:
            tokens = (tl.load(order_ptr + rows, mask=exists, other=0) // top_k).to(tl.int64)
        a_at = (tokens if GATHER_A else at)[:, None] * P + p[None, :]
        b_at = (tokens if GATHER_B else at)[:, None] * Q + q[None, :]
        if EVEN:
            left = tl.load(a_ptr + a_at, mask=exists[:, None], other=0.0)
            right = tl.load(b_ptr + b_at, mask=exists[:, None], other=0.0)
        else:
            left = tl.load(a_ptr + a_at, mask=exists[:, None] & (p < P)[None, :], other=0.0)
            right = tl.load(b_ptr + b_at, mask=exists[:, None] & (q < Q)[None, :], other=0.0)
        acc = tl.dot(tl.trans(left), right, acc, input_precision=PRECISION)
    places = expert.to(tl.int64) * P * Q + p.to(tl.int64)[:, None] * Q + q[None, :]
    mask = (p < P)[:, None] & (q < Q)[None, :]
    tl.store(dw_ptr + places, acc.to(dw_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _bias_kernel(
    dy_ptr, weights_ptr, order_ptr, offsets_ptr, db_ptr, N, top_k,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute db[e], the sum of the expert's rows of dy. If there are weights, dy has the rows of
    tokens, which are multiplied by them."""
    expert = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    start = tl.load(offsets_ptr + expert)
    end = tl.load(offsets_ptr + expert + 1)
    total = tl.zeros((BLOCK_N,), tl.float32)
    for first in range(start, end, BLOCK_M):
        rows = first + tl.arange(0, BLOCK_M)
        exists = rows < end
        at = rows.to(tl.int64)
        if weights_ptr is not None:
            places = tl.load(order_ptr + rows, mask=exists, other=0)
            at = (places // top_k).to(tl.int64)
        mask = exists[:, None] & (cols < N)[None, :]
        values = tl.load(dy_ptr + at[:, None] * N + cols[None, :], mask=mask, other=0.0)
        values = values.to(tl.float32)
        if weights_ptr is not None:
            values *= tl.load(weights_ptr + places).to(tl.float32)[:, None]
        total += tl.sum(tl.where(mask, values, 0.0), 0)
    total = total.to(db_ptr.dtype.element_ty)
    tl.store(db_ptr + expert.to(tl.int64) * N + cols, total, mask=cols < N)


@triton.jit
def _combine_kernel(
    rows_ptr, ids_ptr, weights_ptr, y_ptr, N, E, TOP_K: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Compute the sum of each token's rows, times their weights if there are weights. The order is
    that of the token's experts; rows of sentinels are left out, and not read."""
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_N,), tl.float32)
    for k in tl.static_range(TOP_K):
        place = token * TOP_K + k
        expert = tl.load(ids_ptr + place)
        mask = cols < tl.where((expert >= 0) & (expert < E), N, 0)
        row = tl.load(rows_ptr + place * N + cols, mask=mask, other=0.0).to(tl.float32)
        if weights_ptr is not None:
            row *= tl.load(weights_ptr + place).to(tl.float32)
        total += tl.where(mask, row, 0.0)
    tl.store(y_ptr + token * N + cols, total.to(y_ptr.dtype.element_ty), mask=cols < N)
