"""Kernels over [rows, columns] in tiles: magnitudes, quantisation (with its transposed copy), transposition, and back.

Sizes along a row come as multiples of ``UNIT`` (16 where everything is aligned): so the compiler knows that whole
16-byte vectors are inside or outside, whatever the size is. Programs walk over tiles; rows are addressed in 64 bits.
A transposing tile reads each fourth row four times and puts four bytes of a column into a word while they are in
registers: then 32-bit words instead of bytes cross the threads.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from tpoverlap.gemm.fp8.kernels.numbers import largest_of, magnitude_bits, scale_of, to_bytes, to_numbers


@triton.jit(do_not_specialize=["num_rows", "columns", "x_ld"])
def amax_tiles(x, maxima, num_rows, columns, x_ld, UNIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """``maxima[program]`` = largest magnitude of the tiles of this program (float32; NaN if there is one)."""
    width = columns * UNIT
    x_pitch = x_ld.to(tl.int64) * UNIT
    column_tiles = tl.cdiv(width, COLUMNS)
    largest = tl.zeros([ROWS, COLUMNS], tl.int32)
    for tile in range(tl.program_id(0), tl.cdiv(num_rows, ROWS) * column_tiles, tl.num_programs(0)):
        row = (tile // column_tiles) * ROWS + tl.arange(0, ROWS)
        column = (tile % column_tiles) * COLUMNS + tl.arange(0, COLUMNS)
        inside = (row < num_rows)[:, None] & (column < width)[None, :]
        numbers = tl.load(x + row.to(tl.int64)[:, None] * x_pitch + column[None, :], mask=inside, other=0.0)
        largest = tl.maximum(largest, magnitude_bits(numbers.to(tl.float32)))
    found = tl.max(tl.max(largest, 1), 0)
    tl.store(maxima + tl.program_id(0), found.to(tl.float32, bitcast=True))


@triton.jit(do_not_specialize=["num_maxima", "num_rows", "columns", "x_ld", "words", "factor", "epsilon"])
def quantize_tiles(
    x,
    maxima,
    scale,
    data,
    transposed,
    num_maxima,
    num_rows,
    columns,
    x_ld,
    words,
    factor,
    epsilon,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    MAXIMA: tl.constexpr,
    E5M2: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    TRANSPOSES: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """``data`` uint8 [num_rows, width] = x in FP8, and its transposed copy padded with zeros. One read of x.

    Args:
        maxima: ``num_maxima`` magnitudes, the largest of which decides the scale; 0 of them: the scale is given.
        scale: float32, written by the first program; read where it is given.
        transposed: int32 words of [width, padded rows]; four rows a word, 4 * ``words`` words a column of x.
    """
    width = columns * UNIT
    x_pitch = x_ld.to(tl.int64) * UNIT
    column_tiles = tl.cdiv(width, COLUMNS)
    if MAXIMA > 0:
        chosen = scale_of(largest_of(maxima, num_maxima, MAXIMA), factor, epsilon, POWER_OF_2)
        if tl.program_id(0) == 0:
            tl.store(scale, chosen)
    else:
        chosen = tl.load(scale)
    inverse = tl.div_rn(1.0, chosen)
    for tile in range(tl.program_id(0), tl.cdiv(num_rows, ROWS) * column_tiles, tl.num_programs(0)):
        quad = (tile // column_tiles) * (ROWS // 4) + tl.arange(0, ROWS // 4)
        column = (tile % column_tiles) * COLUMNS + tl.arange(0, COLUMNS)
        word = tl.zeros([ROWS // 4, COLUMNS], tl.int32)
        for part in tl.static_range(4):
            row = quad * 4 + part
            inside = (row < num_rows)[:, None] & (column < width)[None, :]
            line = row.to(tl.int64)[:, None]
            numbers = tl.load(x + line * x_pitch + column[None, :], mask=inside, other=0.0)
            bits = to_bytes(numbers.to(tl.float32), inverse, E5M2, INTERPRETED)
            tl.store(data + line * width + column[None, :], bits, mask=inside)
            if TRANSPOSES:
                word = word | (bits.to(tl.int32) << (8 * part))
        if TRANSPOSES:
            _store_transposed(transposed, word, quad, column, width, words)


@triton.jit(do_not_specialize=["num_rows", "columns", "source_ld", "words"])
def transpose_tiles(
    source,
    transposed,
    num_rows,
    columns,
    source_ld,
    words,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """``transposed`` (as in `quantize_tiles`) = bytes [num_rows, width] transposed, padded with zeros."""
    width = columns * UNIT
    pitch = source_ld.to(tl.int64) * UNIT
    column_tiles = tl.cdiv(width, COLUMNS)
    for tile in range(tl.program_id(0), tl.cdiv(num_rows, ROWS) * column_tiles, tl.num_programs(0)):
        quad = (tile // column_tiles) * (ROWS // 4) + tl.arange(0, ROWS // 4)
        column = (tile % column_tiles) * COLUMNS + tl.arange(0, COLUMNS)
        word = tl.zeros([ROWS // 4, COLUMNS], tl.int32)
        for part in tl.static_range(4):
            row = quad * 4 + part
            inside = (row < num_rows)[:, None] & (column < width)[None, :]
            bits = tl.load(source + row.to(tl.int64)[:, None] * pitch + column[None, :], mask=inside, other=0)
            word = word | (bits.to(tl.int32) << (8 * part))
        _store_transposed(transposed, word, quad, column, width, words)


@triton.jit
def _store_transposed(transposed, word, quad, column, width, words):
    """Words [quads, columns] of four rows each to ``transposed`` [columns, 4 * words]."""
    pitch = words * 4
    inside = (column < width)[:, None] & (quad < pitch)[None, :]
    tl.store(transposed + column.to(tl.int64)[:, None] * pitch + quad[None, :], tl.trans(word), mask=inside)


@triton.jit(do_not_specialize=["num_rows", "columns", "data_ld", "scale_step"])
def dequantize_tiles(
    data,
    scale,
    out,
    num_rows,
    columns,
    data_ld,
    scale_step,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    E5M2: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """``out`` [num_rows, width] = FP8 bytes times ``scale[row * scale_step]``, rounded once to its dtype."""
    width = columns * UNIT
    pitch = data_ld.to(tl.int64) * UNIT
    column_tiles = tl.cdiv(width, COLUMNS)
    for tile in range(tl.program_id(0), tl.cdiv(num_rows, ROWS) * column_tiles, tl.num_programs(0)):
        row = (tile // column_tiles) * ROWS + tl.arange(0, ROWS)
        column = (tile % column_tiles) * COLUMNS + tl.arange(0, COLUMNS)
        inside = (row < num_rows)[:, None] & (column < width)[None, :]
        line = row.to(tl.int64)[:, None]
        factor = tl.load(scale + row * scale_step, mask=row < num_rows, other=0.0)
        bits = tl.load(data + line * pitch + column[None, :], mask=inside, other=0)
        numbers = to_numbers(bits, E5M2, INTERPRETED) * factor[:, None]
        tl.store(out + line * width + column[None, :], numbers.to(out.dtype.element_ty), mask=inside)
