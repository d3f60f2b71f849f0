"""Tile plans and tile choice: every row once, words that match rows, and few kernels whatever T is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpoverlap.gemm.triton import PieceRows, RowBlock, TilePlan, choose_tile


@st.composite
def blocks(draw: st.DrawFn) -> tuple[RowBlock, ...]:
    made, row = [], draw(st.integers(0, 50))
    for number in range(draw(st.integers(0, 4))):
        cuts = draw(st.lists(st.integers(1, 40), max_size=4))
        pieces, start = [], row
        for piece, rows in enumerate(cuts):
            pieces.append(PieceRows(64 * number + piece, row, row + rows))
            row += rows
        made.append(RowBlock(start, row, tuple(pieces)))
        row += draw(st.integers(0, 3))
    return tuple(made)


@given(blocks(), st.sampled_from([1, 16, 64, 128]))
def test_every_row_once_in_order_with_its_words(blocks: tuple[RowBlock, ...], tile_rows: int) -> None:
    plan = TilePlan.of(blocks, tile_rows)
    covered = [row for start, stop, _, _ in plan.rows for row in range(start, stop)]
    assert covered == [row for block in blocks for row in range(block.start, block.stop)]
    word_of = {row: p.word for block in blocks for p in block.pieces for row in range(p.start, p.stop)}
    for start, stop, first, number in plan.rows:
        assert 0 < stop - start <= tile_rows
        assert set(range(first, first + number)) == {word_of[row] for row in range(start, stop)}


@given(blocks(), st.sampled_from([1, 16, 64]), st.integers(1, 5))
def test_counted_tiles_are_what_each_word_is_bumped(blocks: tuple[RowBlock, ...], tile_rows: int, columns: int) -> None:
    plan = TilePlan.of(blocks, tile_rows)
    counted = plan.tiles_per_word(columns)
    assert set(counted) == {piece.word for block in blocks for piece in block.pieces}
    for block in blocks:
        for piece in block.pieces:
            overlapping = sum(1 for start, stop, _, _ in plan.rows if start < piece.stop and piece.start < stop)
            assert counted[piece.word] == overlapping * columns


def test_the_plan_of_the_same_blocks_is_the_same_object() -> None:
    """The launcher keeps a device table by identity."""
    one, other = (RowBlock(0, 300, (PieceRows(5, 0, 300),)),), (RowBlock(0, 300, (PieceRows(5, 0, 300),)),)
    assert TilePlan.of(one, 128) is TilePlan.of(other, 128)


@pytest.mark.parametrize("columns", [1280, 4096, 14336])
def test_few_kernels_whatever_t_is(columns: int) -> None:
    chosen = {choose_tile((rows, rows), columns, 2, 132) for rows in range(1, 8193, 37)}
    assert len(chosen) <= 6
    assert choose_tile((4096, 4096), 8192, 2, 132).columns == 256, "large GEMMs get the largest tile"
    assert choose_tile((8, 8), columns, 2, 132).rows == 64, "small ones do not compute rows that are not there"


def test_two_sums_fit_the_registers() -> None:
    for rows in (64, 512, 8192):
        tile = choose_tile((rows,), 8192, 2, 132, two_sums=True)
        assert tile.rows * tile.columns <= 128 * 128
