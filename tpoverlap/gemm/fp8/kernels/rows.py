"""Kernels with one scale a row: quantisation, also into rows that carry their scale, and sums of such rows."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from tpoverlap.gemm.fp8.kernels.numbers import magnitude_bits, scale_of, to_bytes, to_numbers


@triton.jit(do_not_specialize=["num_rows", "columns", "x_ld", "data_ld", "factor"])
def quantize_rows(
    x,
    scale,
    data,
    num_rows,
    columns,
    x_ld,
    data_ld,
    factor,
    UNIT: tl.constexpr,
    PITCH_UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    E5M2: tl.constexpr,
    PACKED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Each row of x in FP8 under its own scale. One read of x, which stays in registers, where a row is one block.

    Args:
        scale: float32 [num_rows]; PACKED: not used.
        data: uint8, ``data_ld * PITCH_UNIT`` bytes from row to row; PACKED: the scale's four bytes follow each row.
    """
    width = columns * UNIT
    x_pitch, data_pitch = x_ld.to(tl.int64) * UNIT, data_ld.to(tl.int64) * PITCH_UNIT
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    lines = row < num_rows
    x_row = x + row.to(tl.int64)[:, None] * x_pitch
    data_row = data + row.to(tl.int64)[:, None] * data_pitch
    if ONE_BLOCK:
        column = tl.arange(0, COLUMNS)
        inside = lines[:, None] & (column < width)[None, :]
        numbers = tl.load(x_row + column[None, :], mask=inside, other=0.0).to(tl.float32)
        largest = tl.max(magnitude_bits(numbers), 1)
        chosen = scale_of(largest.to(tl.float32, bitcast=True), factor, 0.0, False)
        bits = to_bytes(numbers, tl.div_rn(1.0, chosen)[:, None], E5M2, INTERPRETED)
        tl.store(data_row + column[None, :], bits, mask=inside)
    else:
        found = tl.zeros([ROWS, COLUMNS], tl.int32)
        for start in range(0, width, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            inside = lines[:, None] & (column < width)[None, :]
            numbers = tl.load(x_row + column[None, :], mask=inside, other=0.0).to(tl.float32)
            found = tl.maximum(found, magnitude_bits(numbers))
        largest = tl.max(found, 1)
        chosen = scale_of(largest.to(tl.float32, bitcast=True), factor, 0.0, False)
        inverse = tl.div_rn(1.0, chosen)[:, None]
        for start in range(0, width, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            inside = lines[:, None] & (column < width)[None, :]
            numbers = tl.load(x_row + column[None, :], mask=inside, other=0.0).to(tl.float32)
            tl.store(data_row + column[None, :], to_bytes(numbers, inverse, E5M2, INTERPRETED), mask=inside)
    if PACKED:  # byte by byte: rows of N + 4 bytes start anywhere
        bits = chosen.to(tl.int32, bitcast=True)
        place = data + row.to(tl.int64) * data_pitch + width
        for part in tl.static_range(4):
            tl.store(place + part, ((bits >> (8 * part)) & 0xFF).to(tl.uint8), mask=lines)
    else:
        tl.store(scale + row, chosen, mask=lines)


@triton.jit(do_not_specialize=["num_rows", "columns", "pitch"])
def unpack_rows(
    packed,
    out,
    num_rows,
    columns,
    pitch,
    UNIT: tl.constexpr,
    PITCH_UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    E5M2: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """``out`` float32 [num_rows, width] = the numbers of rows that `quantize_rows` packed."""
    width = columns * UNIT
    packed_pitch = pitch.to(tl.int64) * PITCH_UNIT
    column_tiles = tl.cdiv(width, COLUMNS)
    for tile in range(tl.program_id(0), tl.cdiv(num_rows, ROWS) * column_tiles, tl.num_programs(0)):
        row = (tile // column_tiles) * ROWS + tl.arange(0, ROWS)
        column = (tile % column_tiles) * COLUMNS + tl.arange(0, COLUMNS)
        lines = row < num_rows
        inside = lines[:, None] & (column < width)[None, :]
        line = row.to(tl.int64)
        bits = tl.zeros([ROWS], tl.int32)
        for part in tl.static_range(4):
            byte = tl.load(packed + line * packed_pitch + width + part, mask=lines, other=0)
            bits = bits | (byte.to(tl.int32) << (8 * part))
        data = tl.load(packed + line[:, None] * packed_pitch + column[None, :], mask=inside, other=0)
        numbers = to_numbers(data, E5M2, INTERPRETED) * bits.to(tl.float32, bitcast=True)[:, None]
        tl.store(out + line[:, None] * width + column[None, :], numbers, mask=inside)
