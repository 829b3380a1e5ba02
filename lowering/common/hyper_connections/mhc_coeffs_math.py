"""Arithmetic of mhc_coeffs for a block of tokens, which the kernels of every device share.

A block has T tokens, and is the last axis of every tile: the hc x hc matrix of a token is in the
registers of one thread on a GPU, and a lane of the vectors on an NPU. HC is hc, and H the power of
two above it; the rest of a matrix is 0.

A tensor with `count` numbers a token is stored token by token or, with TOKENS_LAST, in blocks of
(count, T), which have zeros after the last token.
"""

import triton
import triton.language as tl

# Added to the logits of columns beyond hc: their exponential is 0.
FAR = tl.constexpr(-1e30)


@triton.jit
def _offsets(index, lanes, count, T: tl.constexpr, TOKENS_LAST: tl.constexpr):
    if TOKENS_LAST:
        return index * T + lanes
    return lanes * count + index


@triton.jit
def _matrix_offsets(
    first, left, count,
    HC: tl.constexpr, H: tl.constexpr, T: tl.constexpr, TOKENS_LAST: tl.constexpr,
):  # fmt: skip
    """Return the offsets of matrices that are a token's numbers from `first` on, and which of them
    exist: (H, H, T), or (H, H * T) with TOKENS_LAST."""
    if TOKENS_LAST:
        # A row of all tokens is contiguous, and an NPU's tile has two axes.
        rows, numbers = tl.arange(0, H)[:, None], tl.arange(0, H * T)[None, :]
        offsets = first * T + rows * (HC * T) + numbers
        mask = (rows < HC) & (numbers < HC * T)
    else:
        rows, columns = tl.arange(0, H)[:, None, None], tl.arange(0, H)[None, :, None]
        lane = tl.arange(0, T)[None, None, :]
        offsets = lane * count + first + rows * HC + columns
        mask = (rows < HC) & (columns < HC) & (lane < left)
    return offsets, mask


@triton.jit
def _column_sums(matrix):
    """Sum over rows: (H, H, T) -> (1, H, T). The tile that is summed has two axes, because users
    report wrong sums over the first of three axes on an Ascend 910B."""
    rows: tl.constexpr = matrix.shape[0]
    columns: tl.constexpr = matrix.shape[1]
    tokens: tl.constexpr = matrix.shape[2]
    sums = tl.sum(tl.reshape(matrix, (rows, columns * tokens)), axis=0)
    return tl.reshape(sums, (1, columns, tokens))


@triton.jit
def _within(indices, count):
    """Return 1.0 where an index is below count, else 0.0."""
    return tl.minimum(tl.maximum(count - indices, 0), 1).to(tl.float32)


@triton.jit
def _balanced(matrix, row_eps, column_eps):
    """Compute one iteration: divide rows by their sums, then columns by theirs."""
    matrix = matrix / (tl.sum(matrix, axis=1)[:, None, :] + row_eps)
    return matrix / (_column_sums(matrix) + column_eps)


@triton.jit
def _balanced_backward(grad, before, row_eps, column_eps):
    """Compute the gradient of `before`, the matrix before an iteration, from that of its result."""
    row_sums = tl.sum(before, axis=1)[:, None, :] + row_eps
    between = before / row_sums
    column_sums = _column_sums(between) + column_eps
    after = between / column_sums
    grad = (grad - _column_sums(grad * after)) / column_sums
    return (grad - tl.sum(grad * between, axis=1)[:, None, :]) / row_sums


@triton.jit
def _row_softmax(logits, rows, columns, HC: tl.constexpr):
    """Compute the softmax over the columns below HC, and 0 elsewhere."""
    row_inside, column_inside = _within(rows, HC), _within(columns, HC)
    logits += (1.0 - column_inside) * FAR
    p = tl.exp(logits - tl.max(logits, axis=1)[:, None, :]) * (row_inside * column_inside)
    # The sum of a row beyond hc is 0: 1 is added to it.
    return p / (tl.sum(p, axis=1)[:, None, :] + (1.0 - row_inside))


@triton.jit
def _sinkhorn_start(p, rows, columns, eps, HC: tl.constexpr):
    """Return p + eps, and the numbers to add to the sums of rows and of columns before a division:
    eps, and beyond hc eps + 1, because the sums there are 0."""
    row_inside, column_inside = _within(rows, HC), _within(columns, HC)
    start = p + eps * (row_inside * column_inside)
    return start, eps + (1.0 - row_inside), eps + (1.0 - column_inside)


@triton.jit
def sinkhorn(logits, rows, columns, tmax, eps, HC: tl.constexpr):
    """Compute the matrix after tmax iterations; the first only divides columns, because a softmax
    has divided the rows."""
    p = _row_softmax(logits, rows, columns, HC)
    matrix, row_eps, column_eps = _sinkhorn_start(p, rows, columns, eps, HC)
    matrix = matrix / (_column_sums(matrix) + column_eps)
    for _ in range(tmax - 1):
        matrix = _balanced(matrix, row_eps, column_eps)
    return matrix


@triton.jit
def sinkhorn_backward(grad, logits, rows, columns, tmax, segment, eps, HC: tl.constexpr):
    """Compute the gradient of the logits.

    The iterations go backwards, and each needs the matrix before it. The matrices are not stored,
    but computed again: from the first matrix to the start of each `segment` of iterations, and from
    there, the one matrix that is kept, to each iteration of the segment. With segments of
    sqrt(tmax) these are about tmax**1.5 iterations.
    """
    p = _row_softmax(logits, rows, columns, HC)
    start, row_eps, column_eps = _sinkhorn_start(p, rows, columns, eps, HC)
    column_sums = _column_sums(start) + column_eps
    first = start / column_sums
    segments = tl.cdiv(tmax - 1, segment)
    for turn in range(segments):
        begin = (segments - 1 - turn) * segment
        kept = first
        for _ in range(begin):
            kept = _balanced(kept, row_eps, column_eps)
        length = tl.minimum(segment, tmax - 1 - begin)
        for back in range(length):
            matrix = kept
            for _ in range(length - 1 - back):
                matrix = _balanced(matrix, row_eps, column_eps)
            grad = _balanced_backward(grad, matrix, row_eps, column_eps)
    grad = (grad - _column_sums(grad * first)) / column_sums
    return p * (grad - tl.sum(grad * p, axis=1)[:, None, :])


@triton.jit
def _loaded(ptr, offsets, mask):
    return tl.load(ptr + offsets, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _matrix(ptr, HC: tl.constexpr, H: tl.constexpr):
    """Load a matrix, the same for each token, as (H, H)."""
    rows, columns = tl.arange(0, H)[:, None], tl.arange(0, H)[None, :]
    return _loaded(ptr, rows * HC + columns, (rows < HC) & (columns < HC))


@triton.jit
def _number(ptr):
    """Load a scalar as float32."""
    return tl.load(ptr).to(tl.float32)


@triton.jit
def block_coefficients(
    product_ptr, rstd_ptr, b_ptr, alpha_pre_ptr, alpha_post_ptr, alpha_res_ptr,
    h_pre_ptr, h_post_ptr, h_res_ptr, left, tmax, pre_eps, sinkhorn_eps, post_mult,
    HC: tl.constexpr, H: tl.constexpr, T: tl.constexpr, TOKENS_LAST: tl.constexpr,
):  # fmt: skip
    """Compute the coefficients of a block, of whose tokens only the first `left` exist. The
    pointers of tensors with tokens are those of the block."""
    COUNT: tl.constexpr = HC * HC + 2 * HC
    lanes = tl.arange(0, T)
    streams, lane = tl.arange(0, H)[:, None], lanes[None, :]
    rstd = _loaded(rstd_ptr, lanes, lanes < left)[None, :]
    mask = (streams < HC) & (lane < left)
    vector = _offsets(streams, lane, HC, T, TOKENS_LAST)

    at = _offsets(streams, lane, COUNT, T, TOKENS_LAST)
    b = _loaded(b_ptr, streams, streams < HC)
    logits = _loaded(product_ptr, at, mask) * rstd * _number(alpha_pre_ptr) + b
    tl.store(h_pre_ptr + vector, tl.sigmoid(logits) + pre_eps, mask=mask)

    at = _offsets(streams + HC, lane, COUNT, T, TOKENS_LAST)
    b = _loaded(b_ptr + HC, streams, streams < HC)
    logits = _loaded(product_ptr, at, mask) * rstd * _number(alpha_post_ptr) + b
    tl.store(h_post_ptr + vector, tl.sigmoid(logits) * post_mult, mask=mask)

    rows, columns = tl.arange(0, H)[:, None, None], tl.arange(0, H)[None, :, None]
    at, mask = _matrix_offsets(2 * HC, left, COUNT, HC, H, T, TOKENS_LAST)
    product = tl.reshape(_loaded(product_ptr, at, mask), (H, H, T))
    b = _matrix(b_ptr + 2 * HC, HC, H)[:, :, None]
    logits = product * rstd[None, :, :] * _number(alpha_res_ptr) + b
    matrix = sinkhorn(logits, rows, columns, tmax, sinkhorn_eps, HC)
    at, mask = _matrix_offsets(0, left, HC * HC, HC, H, T, TOKENS_LAST)
    tl.store(h_res_ptr + at, tl.reshape(matrix, at.shape), mask=mask)


@triton.jit
def _sigmoid_gradient(
    grad_ptr, product_ptr, b_ptr, alpha_ptr, dproduct_ptr, partial_ptr, rstd, first, factor, left,
    HC: tl.constexpr, H: tl.constexpr, T: tl.constexpr, TOKENS_LAST: tl.constexpr,
):  # fmt: skip
    """Write the gradients of the HC columns from `first` on, and return each token's sum of
    dmix * mix, where mix is the product times rstd."""
    COUNT: tl.constexpr = HC * HC + 2 * HC
    streams, lane = tl.arange(0, H)[:, None], tl.arange(0, T)[None, :]
    mask = (streams < HC) & (lane < left)
    at = _offsets(streams + first, lane, COUNT, T, TOKENS_LAST)
    mix = _loaded(product_ptr, at, mask) * rstd
    alpha = _number(alpha_ptr)
    sigmoid = tl.sigmoid(mix * alpha + _loaded(b_ptr + first, streams, streams < HC))
    dlogits = tl.zeros((H, T), tl.float32)
    if grad_ptr is not None:
        grad = _loaded(grad_ptr, _offsets(streams, lane, HC, T, TOKENS_LAST), mask)
        dlogits = grad * factor * sigmoid * (1.0 - sigmoid)
    dmix = dlogits * alpha
    tl.store(dproduct_ptr + at, dmix * rstd, mask=mask)
    if partial_ptr is not None:
        sums = tl.arange(0, H)
        tl.store(partial_ptr + first + sums, tl.sum(dlogits, axis=1), mask=sums < HC)
        of_alpha = tl.sum(dlogits * mix, axis=1)
        tl.store(partial_ptr + COUNT + first + sums, of_alpha, mask=sums < HC)
    return tl.sum(dmix * mix, axis=0)[None, :]


@triton.jit
def block_gradients(
    dh_pre_ptr, dh_post_ptr, dh_res_ptr, product_ptr, rstd_ptr, b_ptr,
    alpha_pre_ptr, alpha_post_ptr, alpha_res_ptr, dproduct_ptr, of_norm_ptr, partial_ptr,
    left, K, tmax, segment, sinkhorn_eps, post_mult,
    HC: tl.constexpr, H: tl.constexpr, T: tl.constexpr, TOKENS_LAST: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a block: that of the product; of_norm, the factor of x in the
    gradient through x's norm; and the block's sums of dlogits and of dlogits * mix, with COUNT
    columns each, one after the other."""
    COUNT: tl.constexpr = HC * HC + 2 * HC
    lanes = tl.arange(0, T)
    rstd = _loaded(rstd_ptr, lanes, lanes < left)[None, :]
    projection = _sigmoid_gradient(
        dh_pre_ptr, product_ptr, b_ptr, alpha_pre_ptr, dproduct_ptr, partial_ptr,
        rstd, 0, 1.0, left, HC, H, T, TOKENS_LAST,
    )  # fmt: skip
    projection += _sigmoid_gradient(
        dh_post_ptr, product_ptr, b_ptr, alpha_post_ptr, dproduct_ptr, partial_ptr,
        rstd, HC, post_mult, left, HC, H, T, TOKENS_LAST,
    )  # fmt: skip

    rows, columns = tl.arange(0, H)[:, None, None], tl.arange(0, H)[None, :, None]
    at, mask = _matrix_offsets(2 * HC, left, COUNT, HC, H, T, TOKENS_LAST)
    mix = tl.reshape(_loaded(product_ptr, at, mask), (H, H, T)) * rstd[None, :, :]
    alpha = _number(alpha_res_ptr)
    dlogits = tl.zeros((H, H, T), tl.float32)
    if dh_res_ptr is not None:
        of_res, _ = _matrix_offsets(0, left, HC * HC, HC, H, T, TOKENS_LAST)
        grad = tl.reshape(_loaded(dh_res_ptr, of_res, mask), (H, H, T))
        logits = mix * alpha + _matrix(b_ptr + 2 * HC, HC, H)[:, :, None]
        dlogits = sinkhorn_backward(grad, logits, rows, columns, tmax, segment, sinkhorn_eps, HC)
    dmix = dlogits * alpha
    tl.store(dproduct_ptr + at, tl.reshape(dmix * rstd[None, :, :], at.shape), mask=mask)
    if partial_ptr is not None:
        rows, columns = tl.arange(0, H)[:, None], tl.arange(0, H)[None, :]
        mask = (rows < HC) & (columns < HC)
        partial_ptr += 2 * HC + rows * HC + columns
        tl.store(partial_ptr, tl.sum(dlogits, axis=2), mask=mask)
        tl.store(partial_ptr + COUNT, tl.sum(dlogits * mix, axis=2), mask=mask)
    projection += tl.sum(tl.reshape(_column_sums(dmix * mix), (H, T)), axis=0)[None, :]
    of_norm = projection * rstd * rstd / K
    tl.store(of_norm_ptr + lanes[None, :], of_norm, mask=lanes[None, :] < left)
