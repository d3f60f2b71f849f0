"""What a tile multiplies: the sum over the terms of a[rows] @ b[:, columns], in float32; of FP8 operands, scaled.

FP8 tensor cores of Hopper keep fewer digits of a sum than float32 has. FAST leaves the whole sum of a term to them, as
cuBLAS's fast mode does; otherwise what 128 columns of K (four instructions) add up to is added in float32, which needs
registers for a second sum. Each term has its own scales, so terms are summed apart, too.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from tpoverlap.gemm.fp8.kernels.numbers import to_numbers


@triton.jit
def _dot(
    left,
    right,
    total,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
    SCALES: tl.constexpr,
    FAST: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    if SCALES == 0:
        total = tl.dot(left, right, total, input_precision=PRECISION)
    elif INTERPRETED:  # its own conversion knows no NaN
        total = tl.dot(_numbers(left), _numbers(right), total, input_precision="ieee")
    elif FAST:
        total = tl.dot(left, right, total)
    else:
        total = tl.dot(left, right, total, max_num_imprecise_acc=min(DEPTH, 128))
    return total


@triton.jit
def _numbers(x):
    return to_numbers(x.to(tl.uint8, bitcast=True), x.dtype == tl.float8e5, True)


@triton.jit
def multiply(
    total,
    a,
    b,
    row,
    stop,
    column,
    N,
    K,
    a_ld,
    b_ld,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    TMA: tl.constexpr,
    N_MAJOR: tl.constexpr,
    PRECISION: tl.constexpr,
    SCALES: tl.constexpr,
    FAST: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Total + a[row : row + ROWS] @ b[:, column : column + COLUMNS].

    ``a`` [., K] and ``b`` are descriptors with TMA, else pointers; ``b`` is stored [N, K] if N_MAJOR, else [K, N].
    """
    if TMA:
        for k in range(0, K, DEPTH):
            left = a.load([row, k])
            if N_MAJOR:
                total = _dot(left, b.load([column, k]).T, total, DEPTH, PRECISION, SCALES, FAST, INTERPRETED)
            else:
                total = _dot(left, b.load([k, column]), total, DEPTH, PRECISION, SCALES, FAST, INTERPRETED)
    else:
        rows = row + tl.arange(0, ROWS)
        columns = column + tl.arange(0, COLUMNS)
        depth = tl.arange(0, DEPTH)
        a_pointers = a + rows[:, None].to(tl.int64) * a_ld + depth[None, :]
        if N_MAJOR:
            b_pointers = b + depth[:, None] + columns[None, :].to(tl.int64) * b_ld
        else:
            b_pointers = b + depth[:, None].to(tl.int64) * b_ld + columns[None, :]
        for k in range(0, K, DEPTH):
            inside = depth < K - k
            left = tl.load(a_pointers, mask=(rows < stop)[:, None] & inside[None, :], other=0.0)
            right = tl.load(b_pointers, mask=inside[:, None] & (columns < N)[None, :], other=0.0)
            total = _dot(left, right, total, DEPTH, PRECISION, SCALES, FAST, INTERPRETED)
            a_pointers += DEPTH
            if N_MAJOR:
                b_pointers += DEPTH
            else:
                b_pointers += b_ld * DEPTH
    return total


@triton.jit
def sum_of_products(
    lefts,
    rights,
    depths,
    left_lds,
    right_lds,
    left_scales,
    right_scales,
    left_shift,
    row,
    stop,
    column,
    N,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    NUM_TERMS: tl.constexpr,
    TMA: tl.constexpr,
    N_MAJOR: tl.constexpr,
    PRECISION: tl.constexpr,
    SCALES: tl.constexpr,
    FAST: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """[ROWS, COLUMNS] in float32 from (row, column) on. Everything before ``left_shift`` is a tuple, one entry a term.

    Args:
        left_shift: the activation's row that is row 0 of each left operand.
        left_scales, right_scales: float32 in memory. SCALES 0: not there; 1: one number a term; 2: one a row of the
            activation, and one a column.
    """
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for term in tl.static_range(0, NUM_TERMS):
        start = total if SCALES == 0 else tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        product = multiply(
            start, lefts[term], rights[term], row - left_shift, stop - left_shift, column, N, depths[term],
            left_lds[term], right_lds[term], ROWS, COLUMNS, DEPTH, TMA, N_MAJOR, PRECISION, SCALES, FAST, INTERPRETED,
        )  # fmt: skip
        if SCALES == 1:
            product *= tl.load(left_scales[term]) * tl.load(right_scales[term])
        elif SCALES == 2:
            rows = row + tl.arange(0, ROWS)
            columns = column + tl.arange(0, COLUMNS)
            of_rows = tl.load(left_scales[term] + rows, mask=rows < stop, other=0.0)
            of_columns = tl.load(right_scales[term] + columns, mask=columns < N, other=0.0)
            product *= of_rows[:, None] * of_columns[None, :]
        if SCALES == 0 or term == 0:
            total = product
        else:
            total += product
    return total
