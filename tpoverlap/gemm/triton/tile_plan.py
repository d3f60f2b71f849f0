"""Which rows a persistent kernel computes in which order, and which words guard or count them. Pure arithmetic.

Blocks are tiled one after the other, each from its own first row, so no tile mixes rows of two blocks. A tile that
overlaps several pieces of its block waits for (or bumps) the words of all of them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

MAX_TABLE_ROWS = 1 << 20


@dataclass(frozen=True)
class PieceRows:
    """Rows [start, stop) and the index of the word that belongs to them."""

    word: int
    start: int
    stop: int


@dataclass(frozen=True)
class RowBlock:
    """Rows [start, stop) that are tiled together. ``pieces``: in row order, without gaps, words counting up by one;
    empty where no word belongs to the rows.
    """

    start: int
    stop: int
    pieces: tuple[PieceRows, ...] = ()


@dataclass(frozen=True)
class TilePlan:
    """Tile rows in the order of their computation.

    Attributes:
        rows: (first row, row after the last, first word, number of words) of each tile row.
    """

    rows: tuple[tuple[int, int, int, int], ...]

    @classmethod
    def of(cls, blocks: tuple[RowBlock, ...], tile_rows: int) -> TilePlan:
        """Tile ``blocks`` in order, in tiles of ``tile_rows`` rows."""
        return _plan(blocks, tile_rows)

    def tiles_per_word(self, column_tiles: int) -> dict[int, int]:
        """How often a kernel with ``column_tiles`` tiles a row bumps each word."""
        counts: Counter[int] = Counter()
        for _, _, first, number in self.rows:
            for word in range(first, first + number):
                counts[word] += column_tiles
        return dict(counts)


@lru_cache(maxsize=1024)
def _plan(blocks: tuple[RowBlock, ...], tile_rows: int) -> TilePlan:
    rows = []
    for block in blocks:
        for start in range(block.start, block.stop, tile_rows):
            stop = min(start + tile_rows, block.stop)
            words = [piece.word for piece in block.pieces if piece.start < stop and start < piece.stop]
            assert words == list(range(words[0], words[0] + len(words))) if words else True, f"words {words} have gaps"
            rows.append((start, stop, words[0] if words else 0, len(words)))
    assert len(rows) <= MAX_TABLE_ROWS, f"{len(rows)} tile rows"
    return TilePlan(tuple(rows))
