"""The sums of embedding's backward, for both devices: see lowering/common/embedding.py."""

import triton
import triton.language as tl


@triton.jit
def counts(word, V, padding):
    """Return whether a word's row of dweight is summed."""
    return (word >= 0) & (word < V) & (word != padding)


@triton.jit
def sum_chunk(
    words_ptr, order_ptr, dy_ptr, dweight_ptr, partial_ptr,
    n, N, V, padding, chunk, col,
    CHUNK: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Sum the runs of one chunk of the n positions, in BLOCK_N of N columns from `col` on."""
    # Offsets within a tile are int32; `chunk` and `col` are int64, and with them every start.
    cols = tl.arange(0, BLOCK_N)[None, :]
    mask = cols < tl.minimum(N - col, BLOCK_N).to(tl.int32)
    start = chunk * CHUNK
    stop = tl.minimum(start + CHUNK, n)
    # -1 stands for no word: no word that counts is negative.
    before = tl.load(words_ptr + start - 1, mask=start > 0, other=-1)
    total = tl.zeros((1, BLOCK_N), tl.float32)
    for i in tl.range(start, stop):
        word = tl.load(words_ptr + i)
        following = tl.load(words_ptr + i + 1, mask=i + 1 < n, other=-1)
        counted = counts(word, V, padding)
        if counted:
            row = tl.load(order_ptr + i)
            values = tl.load(dy_ptr + row * N + col + cols, mask=mask, other=0.0)
            total += values.to(tl.float32)
        if (i + 1 == stop) | (following != word):
            if counted:
                begun = before == word
                if begun | (following == word):
                    # Row 0 of the chunk for a run that began before it, though it may go on too;
                    # row 1 for one that begins here.
                    place = chunk * 2 + 1 - begun.to(tl.int64)
                    tl.store(partial_ptr + place * N + col + cols, total, mask=mask)
                else:
                    place = word.to(tl.int64) * N + col
                    value = total.to(dweight_ptr.dtype.element_ty)
                    tl.store(dweight_ptr + place + cols, value, mask=mask)
            total = tl.zeros((1, BLOCK_N), tl.float32)


@triton.jit
def sum_parts(
    words_ptr, ends_ptr, dweight_ptr, partial_ptr,
    N, V, padding, chunk, col,
    CHUNK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Add up the partial sums of the run that begins in a full chunk and goes on after it, if the
    chunk has one: BLOCK_M chunks at a time."""
    cols = tl.arange(0, BLOCK_N)[None, :]
    rows = tl.arange(0, BLOCK_M)[:, None]
    mask = cols < tl.minimum(N - col, BLOCK_N).to(tl.int32)
    start = chunk * CHUNK
    stop = start + CHUNK
    word = tl.load(words_ptr + stop - 1)
    before = tl.load(words_ptr + start - 1, mask=start > 0, other=-1)
    end = tl.load(ends_ptr + chunk)
    if (end > stop) & (before != word) & counts(word, V, padding):
        # Row 1 of the chunk in which the run begins, and row 0 of each later one.
        first = tl.load(partial_ptr + (chunk * 2 + 1) * N + col + cols, mask=mask, other=0.0)
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        last = (end + CHUNK - 1) // CHUNK
        for later in tl.range(chunk + 1, last, BLOCK_M):
            left = tl.minimum(last - later, BLOCK_M).to(tl.int32)
            start_of_rows = partial_ptr + later * 2 * N + col
            offsets = rows * (2 * N) + cols
            total += tl.load(start_of_rows + offsets, mask=mask & (rows < left), other=0.0)
        value = first + tl.sum(total, 0)[None, :]
        place = word.to(tl.int64) * N + col
        tl.store(dweight_ptr + place + cols, value.to(dweight_ptr.dtype.element_ty), mask=mask)
