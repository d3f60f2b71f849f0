"""Which tile a GEMM uses: a short table and a cost that counts waves. No tuning, and a finite number of kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final


@dataclass(frozen=True)
class TileShape:
    """Rows, columns and depth of a tile, and how the compiler spreads it.

    Attributes:
        rows, columns: of the output tile.
        depth: K columns a step.
        group: tile rows whose columns are visited together, so that their operands stay in the L2 cache.
        parts: 2: the result is staged and stored in two halves, which frees shared memory for a further stage.
    """

    rows: int
    columns: int
    depth: int
    num_stages: int
    num_warps: int
    group: int = 8
    parts: int = 1


# (tile, throughput of full waves of it relative to the best), measured on an H200 with K = 8192. Larger tiles reload
# operands less often; smaller ones fill the multiprocessors where there are few rows.
_HALF: Final = (
    (TileShape(128, 256, 64, 3, 8), 1.0),
    (TileShape(128, 128, 64, 5, 8), 0.97),
    (TileShape(64, 256, 64, 4, 4), 0.90),
    (TileShape(64, 128, 64, 5, 4), 0.68),
    (TileShape(64, 64, 128, 4, 4), 0.49),
)
_HALF_SUMMED: Final = _HALF[1:2] + _HALF[3:]
"""Where the epilogue holds two sums: a tile of 128 x 256 would not fit the registers."""
_BYTES: Final = (
    (TileShape(128, 256, 128, 3, 8), 1.0),
    (TileShape(128, 128, 128, 4, 8), 0.97),
    (TileShape(64, 256, 128, 4, 4), 0.90),
    (TileShape(64, 128, 128, 5, 4), 0.68),
    (TileShape(64, 64, 256, 4, 4), 0.49),
)
"""FP8: the bytes of `_HALF`'s tiles, and its throughputs, which nobody has measured for FP8."""
_BYTES_SUMMED: Final = _BYTES[1:2] + _BYTES[3:]
_SINGLE: Final = ((TileShape(64, 64, 32, 3, 4), 1.0),)
INTERPRETED: Final = TileShape(16, 32, 32, 1, 1, group=2)
"""Small, so that a test's few rows and columns make many tiles."""


def fits_one_wave(tiles: int, waiting: int, num_programs: int, lent: int) -> bool:
    """Whether each tile can have a program of its own.

    With few tokens the tiles are often a power of two, 128, a little above what a kernel may take that leaves some
    multiprocessors free: then it would need two waves. What has to be free is room beside programs that *wait*. The
    others end by themselves; so where no program has a second tile, they may use the ``lent`` multiprocessors, too.
    """
    return tiles <= num_programs or (tiles <= num_programs + lent and waiting <= num_programs)


@lru_cache(maxsize=4096)
def choose_tile(
    block_rows: Sequence[int],
    columns: int,
    itemsize_bytes: int,
    num_programs: int,
    *,
    two_sums: bool = False,
    lent: int = 0,
    waiting_rows: Sequence[int] = (),
) -> TileShape:
    """The tile with the least estimated time.

    Args:
        block_rows: rows of each block that is tiled on its own (a tuple).
        columns: N.
        itemsize_bytes: of the operands.
        num_programs: multiprocessors to use.
        two_sums: a second float32 sum is kept: by the epilogue, or of FP8 products.
        lent: see `fits_one_wave`.
        waiting_rows: of the blocks that wait for peers (a tuple).
    """
    alone, summed = {1: (_BYTES, _BYTES_SUMMED), 2: (_HALF, _HALF_SUMMED), 4: (_SINGLE, _SINGLE)}[itemsize_bytes]
    candidates = summed if two_sums else alone

    def cost(candidate: tuple[TileShape, float]) -> float:
        tile, throughput = candidate
        column_tiles = -(-columns // tile.columns)
        tiles = sum(-(-rows // tile.rows) for rows in block_rows) * column_tiles
        waiting = sum(-(-rows // tile.rows) for rows in waiting_rows) * column_tiles
        waves = 1 if fits_one_wave(tiles, waiting, num_programs, lent) else -(-tiles // num_programs)
        # A long run of waves is not quantised so sharply: multiprocessors drift apart and even out.
        return waves * tile.rows * tile.columns / throughput

    return min(candidates, key=cost)[0]
