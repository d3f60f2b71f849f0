"""One persistent GEMM kernel for `fused`: its tiles wait for rows, count themselves, or add what peers sent.

::

    program p:  for each tile p, p + P, p + 2P, ... of the table
                    GATED     wait until the pieces that its rows overlap have arrived
                    multiply  sum over the terms of a[rows] @ b[:, columns], float32
                    epilogue  + addend + bias, RECEIVED: + the peers' blocks in rank order; round once; store
                    SIGNALS   bump the counter of each piece that its rows overlap

The table lists tile rows in order (`TilePlan`); a first part of it may read its rows from another tensor ("own": the
caller's shard instead of the slot). All integers that change from call to call are arguments that are not specialised,
so there is one binary for each combination of the constants, whatever T, N, K and the epoch are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tpoverlap.gemm.triton.words import bump_words, wait_for_words

# ruff: noqa: N803


@triton.jit
def _multiply(  # type: ignore[no-untyped-def]
    total,
    a,
    b,
    row,
    stop,
    column,
    N,
    K,
    a_stride,
    b_k_stride,
    b_n_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    TMA: tl.constexpr,
    N_MAJOR: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """total += a[row : row + ROWS] @ b[:, column : column + COLUMNS]. With TMA ``a`` and ``b`` are descriptors."""
    if TMA:
        for k in range(0, K, DEPTH):
            left = a.load([row, k])
            if N_MAJOR:
                total = tl.dot(left, b.load([column, k]).T, total, input_precision=PRECISION)
            else:
                total = tl.dot(left, b.load([k, column]), total, input_precision=PRECISION)
    else:
        rows = row + tl.arange(0, ROWS)
        columns = column + tl.arange(0, COLUMNS)
        depth = tl.arange(0, DEPTH)
        a_pointers = a + rows[:, None].to(tl.int64) * a_stride + depth[None, :]
        b_pointers = b + depth[:, None].to(tl.int64) * b_k_stride + columns[None, :].to(tl.int64) * b_n_stride
        for k in range(0, K, DEPTH):
            inside = depth < K - k
            left = tl.load(a_pointers, mask=(rows < stop)[:, None] & inside[None, :], other=0.0)
            right = tl.load(b_pointers, mask=inside[:, None] & (columns < N)[None, :], other=0.0)
            total = tl.dot(left, right, total, input_precision=PRECISION)
            a_pointers += DEPTH
            b_pointers += b_k_stride * DEPTH
    return total


@triton.jit
def _sum_in_rank_order(  # type: ignore[no-untyped-def]
    own, received, offsets, mask, block_elements, NUM_RANKS: tl.constexpr, RANK: tl.constexpr
):
    """Blocks of ranks 0 .. R-1, this rank's being ``own``, added in that order in float32."""
    total = own
    for source in tl.static_range(0, NUM_RANKS):
        if source == RANK:
            if source > 0:
                total += own
        else:
            index = source if source < RANK else source - 1
            block = tl.load(received + index * block_elements + offsets, mask=mask, other=0.0).to(tl.float32)
            total = block if source == 0 else total + block  # noqa: SIM108
    return total


@triton.jit
def _tile(  # type: ignore[no-untyped-def]
    tile,
    first_tile,
    table,
    table_rows,
    a0, a1, a2,
    b0, b1, b2,
    K0, K1, K2,
    a0_stride, a1_stride, a2_stride,
    b0_k_stride, b1_k_stride, b2_k_stride,
    b0_n_stride, b1_n_stride, b2_n_stride,
    a_shift,
    out, out_descriptor, out_shift,
    bias, addend, addend_stride,
    received, block_elements,
    flags, epoch, limit, error, given_up,
    counters,
    N,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
    NUM_TERMS: tl.constexpr, TMA: tl.constexpr, TMA_STORE: tl.constexpr, N_MAJOR: tl.constexpr,
    PRECISION: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_ADDEND: tl.constexpr,
    GATED: tl.constexpr, SIGNALS: tl.constexpr, NUM_RANKS: tl.constexpr, RANK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """One tile; returns ``given_up``. ``first_tile``: number of the tile that the table's first row starts with."""
    # L2: walk GROUP tile rows column by column. The order of the rows themselves is the table's.
    column_tiles = tl.cdiv(N, COLUMNS)
    number = tile - first_tile
    group = number // (GROUP * column_tiles)
    first = group * GROUP
    height = tl.minimum(table_rows - first, GROUP)
    within = number - group * GROUP * column_tiles
    entry = table + (first + within % height) * 4
    column = within // height * COLUMNS
    row = tl.load(entry)
    stop = tl.load(entry + 1)
    first_word = tl.load(entry + 2)
    num_words = tl.load(entry + 3)

    if GATED:
        given_up = wait_for_words(flags, first_word, num_words, epoch, limit, error, given_up, INTERPRETED)

    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    total = _multiply(
        total, a0, b0, row - a_shift, stop - a_shift, column, N, K0, a0_stride, b0_k_stride, b0_n_stride,
        ROWS, COLUMNS, DEPTH, TMA, N_MAJOR, PRECISION,
    )
    if NUM_TERMS > 1:
        total = _multiply(
            total, a1, b1, row - a_shift, stop - a_shift, column, N, K1, a1_stride, b1_k_stride, b1_n_stride,
            ROWS, COLUMNS, DEPTH, TMA, N_MAJOR, PRECISION,
        )
    if NUM_TERMS > 2:
        total = _multiply(
            total, a2, b2, row - a_shift, stop - a_shift, column, N, K2, a2_stride, b2_k_stride, b2_n_stride,
            ROWS, COLUMNS, DEPTH, TMA, N_MAJOR, PRECISION,
        )

    rows = row + tl.arange(0, ROWS)
    columns = column + tl.arange(0, COLUMNS)
    mask = (rows < stop)[:, None] & (columns < N)[None, :]
    offsets = (rows - out_shift)[:, None].to(tl.int64) * N + columns[None, :]
    if HAS_ADDEND:
        addends = addend + rows[:, None].to(tl.int64) * addend_stride + columns[None, :]
        total += tl.load(addends, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        total += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    if NUM_RANKS > 1:
        blocks = received.to(tl.pointer_type(out.dtype.element_ty))
        total = _sum_in_rank_order(total, blocks, offsets, mask, block_elements, NUM_RANKS, RANK)
    if GATED:
        total = tl.where(given_up != 0, float("nan"), total)
    value = total.to(out.dtype.element_ty)
    if TMA_STORE:
        if stop - row == ROWS:
            out_descriptor.store([row - out_shift, column], value)
        else:  # the rows after the last belong to another block
            tl.store(out + offsets, value, mask=mask)
    else:
        tl.store(out + offsets, value, mask=mask)
    if SIGNALS:
        bump_words(counters, first_word, num_words)
    return given_up


_CHANGING = [
    "own_tiles", "own_table_rows", "num_tiles", "table_rows", "K0", "K1", "K2", "a_stride", "a0_stride", "a1_stride",
    "a2_stride", "b0_k_stride", "b1_k_stride", "b2_k_stride", "b0_n_stride", "b1_n_stride", "b2_n_stride", "own_shift",
    "out_shift", "addend_stride", "received", "block_elements", "flags", "epoch", "limit", "error", "N",
]  # fmt: skip


@triton.jit(do_not_specialize=_CHANGING)
def tile_gemm(  # type: ignore[no-untyped-def]
    own, own_stride_shift_pad,
):
    """Replaced below."""
