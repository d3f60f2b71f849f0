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
        data: uint8 [num_rows, width]; PACKED: int32 words, ``data_ld`` from row to row, the scale after each row's.
    """
    width = columns * UNIT
    x_pitch = x_ld.to(tl.int64) * UNIT
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    lines = row < num_rows
    line = row.to(tl.int64)[:, None]
    if ONE_BLOCK:
        numbers, inside = _block(x + line * x_pitch, 0, width, lines, COLUMNS)
        largest = tl.max(magnitude_bits(numbers), 1)
        chosen = scale_of(largest.to(tl.float32, bitcast=True), factor, 0.0, False)
        bits = to_bytes(numbers, tl.div_rn(1.0, chosen)[:, None], E5M2, INTERPRETED)
        _store(data, bits, inside, line, 0, width, data_ld, lines, ROWS, COLUMNS, PACKED)
    else:
        found = tl.zeros([ROWS, COLUMNS], tl.int32)
        for start in range(0, width, COLUMNS):
            numbers, inside = _block(x + line * x_pitch, start, width, lines, COLUMNS)
            found = tl.maximum(found, magnitude_bits(numbers))
        largest = tl.max(found, 1)
        chosen = scale_of(largest.to(tl.float32, bitcast=True), factor, 0.0, False)
        inverse = tl.div_rn(1.0, chosen)[:, None]
        for start in range(0, width, COLUMNS):
            numbers, inside = _block(x + line * x_pitch, start, width, lines, COLUMNS)
            bits = to_bytes(numbers, inverse, E5M2, INTERPRETED)
            _store(data, bits, inside, line, start, width, data_ld, lines, ROWS, COLUMNS, PACKED)
    if PACKED:
        place = data + row.to(tl.int64) * data_ld + width // 4
        tl.store(place, chosen.to(tl.int32, bitcast=True), mask=lines)
    else:
        tl.store(scale + row, chosen, mask=lines)


@triton.jit
def _block(x_row, start, width, lines, COLUMNS: tl.constexpr):
    column = start + tl.arange(0, COLUMNS)
    inside = lines[:, None] & (column < width)[None, :]
    return tl.load(x_row + column[None, :], mask=inside, other=0.0).to(tl.float32), inside


@triton.jit
def _store(
    data,
    bits,
    inside,
    line,
    start,
    width,
    data_ld,
    lines,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PACKED: tl.constexpr,
):
    if PACKED:  # rows of N + 4 bytes start on 4 bytes only: words, or it would be byte by byte
        # Not a sum over shifted bytes: Triton 3.6 gets one byte in eight of that wrong on sm_90.
        even, odd = tl.split(tl.reshape(bits.to(tl.int32) & 0xFF, [ROWS, COLUMNS // 4, 2, 2]))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        word = first | (second << 8) | (third << 16) | (fourth << 24)
        index = start // 4 + tl.arange(0, COLUMNS // 4)
        tl.store(data + line * data_ld + index[None, :], word, mask=lines[:, None] & (index < width // 4)[None, :])
    else:
        tl.store(data + line * width + (start + tl.arange(0, COLUMNS))[None, :], bits, mask=inside)


@triton.jit(do_not_specialize=["num_rows", "words", "pitch"])
def unpack_rows(
    packed,
    out,
    num_rows,
    words,
    pitch,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
    E5M2: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """``out`` float32 [num_rows, 4 * words] = the numbers of rows that `quantize_rows` packed, as int32 words."""
    word_tiles = tl.cdiv(words, WORDS)
    for tile in range(tl.program_id(0), tl.cdiv(num_rows, ROWS) * word_tiles, tl.num_programs(0)):
        row = (tile // word_tiles) * ROWS + tl.arange(0, ROWS)
        index = (tile % word_tiles) * WORDS + tl.arange(0, WORDS)
        lines = row < num_rows
        line = row.to(tl.int64)
        scale = tl.load(packed + line * pitch + words, mask=lines, other=0).to(tl.float32, bitcast=True)[:, None]
        inside = lines[:, None] & (index < words)[None, :]
        word = tl.load(packed + line[:, None] * pitch + index[None, :], mask=inside, other=0)
        first = to_numbers((word & 0xFF).to(tl.uint8), E5M2, INTERPRETED) * scale
        second = to_numbers(((word >> 8) & 0xFF).to(tl.uint8), E5M2, INTERPRETED) * scale
        third = to_numbers(((word >> 16) & 0xFF).to(tl.uint8), E5M2, INTERPRETED) * scale
        fourth = to_numbers(((word >> 24) & 0xFF).to(tl.uint8), E5M2, INTERPRETED) * scale
        numbers = tl.reshape(tl.join(tl.join(first, third), tl.join(second, fourth)), [ROWS, WORDS * 4])
        column = (tile % word_tiles) * (WORDS * 4) + tl.arange(0, WORDS * 4)
        inside = lines[:, None] & (column < words * 4)[None, :]
        tl.store(out + line[:, None] * (words * 4) + column[None, :], numbers, mask=inside)
