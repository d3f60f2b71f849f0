"""Into how many pieces ring_exchange cuts a chunk: pure functions of what all ranks agree on.

A piece costs a copy, a flag and, where it is multiplied by itself, a GEMM that is smaller and so a little less
efficient. It pays where something long would else be waited for as a whole.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import lru_cache
from typing import Final, NamedTuple

from tpoverlap.tokens import TokenPartition

FULL_PIECE: Final = 128 * 256 * 128
"""Elements of a result that give each multiprocessor of a large GPU a tile; the GEMM of less wastes some of them."""
GATHER_ROWS_OF_TWO: Final = 2048
"""Chunks of an all-gather of at least that many rows are cut in two."""
BYTES_OF_FOUR: Final = 256 << 20
"""Chunks of at least that many bytes are cut in four."""
MIN_PIECE_ROWS: Final = 128
NARROW_OUTPUT: Final = 2048
"""Below that many output features a row is multiplied faster than a link moves it (bf16, NVLink)."""
NARROW_OPERAND_BYTES: Final = 2 * NARROW_OUTPUT
"""Likewise, below that many bytes of a row's operand a row of the result: a reduce-scatter waits for the link."""
_TILE_ROWS: Final = 128
_TILES: Final = (
    *((256, 128, 256 * 128), (320, 128, 320 * 128), (192, 128, 192 * 128), (160, 128, 160 * 128)),
    (128, 128, 128 * 128 + 1024),  # smaller tiles read their operands more often
)
"""Rows, columns (or the other way round) and cost of the tiles that cuBLAS was seen to choose for large results."""
_SAVES: Final = 33
"""Pieces differ where that saves one of so many parts of their GEMMs; else they are nearly equal."""
_COUNTED_FROM: Final = 3 * 256 * 128 // 2
"""Elements of a piece's result for each multiprocessor, a wave and a half: for less cuBLAS finds better tiles than are
counted here."""


class FirstPiece(NamedTuple):
    """Each chunk has two pieces, the first one of ``rows`` rows; both ranks have more."""

    rows: int


Cut = int | FirstPiece
"""How chunks are cut: most rows of nearly equal pieces, or `FirstPiece`."""


def scatter_cut(
    partition: TokenPartition, width: int, itemsize: int, operand_row_bytes: int, multiprocessors: int
) -> Cut | None:
    """How chunks of a reduce-scatter are cut; None: they are not.

    Two pieces are cut where waves of tiles make their GEMMs cheapest. One size for both ranks, so their rows may differ
    by less than a tile.

    Args:
        multiprocessors: of each rank's GPU; 0: not known, so pieces are nearly equal. Others: `scatter_piece_rows`.
    """
    rows = scatter_piece_rows(partition, width, itemsize, operand_row_bytes)
    if rows is None or multiprocessors == 0 or operand_row_bytes < NARROW_OPERAND_BYTES:
        return rows
    least, most = min(partition.counts), partition.max_count
    if most - least >= _TILE_ROWS or -(-most // rows) != 2 or least // 2 * width < _COUNTED_FROM * multiprocessors:
        return rows
    # A row's time on the link, in the unit of `_levels`: its GEMM's where an operand has NARROW_OPERAND_BYTES.
    link = width * itemsize * NARROW_OPERAND_BYTES / (2 * multiprocessors * operand_row_bytes)
    first = _cheapest(least, most, width, link, multiprocessors)
    return rows if first is None else FirstPiece(first)


def _cheapest(least: int, most: int, width: int, link: float, multiprocessors: int) -> int | None:
    """Rows of the first piece of chunks of ``least`` and ``most`` rows; None: halves are as good.

    It is the larger one. It travels while the peer's second piece is multiplied, which has to take as long; the second
    one travels during own first piece's GEMM, which is longer still. The second one has a quarter of the rows at least,
    since a GEMM of few rows has to read all weights, which is not counted.
    """
    levels, costs = _levels(width, multiprocessors, 1 << (most - 1).bit_length())
    last = min(least * 3 // 4, least - MIN_PIECE_ROWS) // _TILE_ROWS * _TILE_ROWS
    now = sum(costs[bisect_left(levels, rows)] for n in (least, most) for rows in (n // 2, n - n // 2))
    best, found = now - now / _SAVES, None
    for level in range(bisect_left(levels, -(-most // 2 // _TILE_ROWS) * _TILE_ROWS), len(levels)):
        first = min(levels[level] // _TILE_ROWS * _TILE_ROWS, last)
        rest = costs[bisect_left(levels, least - first)]
        if first * link > rest:
            break
        cost = 2 * costs[level] + rest + costs[bisect_left(levels, most - first)]
        if cost < best:
            best, found = cost, first
        if first == last:
            break
    return found


@lru_cache(maxsize=64)
def _levels(columns: int, multiprocessors: int, limit: int) -> tuple[list[int], list[int]]:
    """(most rows, cost) of GEMMs up to ``limit`` rows, ascending. A cost is elements of the result that each
    multiprocessor computes: waves of the best tile.
    """
    found = []
    for *sides, cost in _TILES:
        for height, across in zip(sides, (-(-columns // side) for side in reversed(sides)), strict=True):
            for wave in range(1, -(-(-(-limit // height) * across) // multiprocessors) + 1):
                found.append((wave * cost, wave * multiprocessors // across * height))
    levels, costs = [0], [0]
    for cost, rows in sorted(found, key=lambda one: (one[0], -one[1])):
        if rows > levels[-1]:
            levels.append(rows)
            costs.append(cost)
    return levels, costs


def scatter_piece_rows(partition: TokenPartition, width: int, itemsize: int, operand_row_bytes: int) -> int | None:
    """Most rows of a piece in a reduce-scatter between two ranks; None: chunks are not cut.

    Cut, peer's piece 2 is computed while piece 1 travels, and own piece 1 is added to what arrived while piece 2
    travels: no copy is left at the end, and no separate sum. With one piece own rows are computed while it travels,
    and a sum follows; small results are better off so. ``operand_row_bytes``: of a row of the GEMM's left operand.
    """
    if partition.tp_size != 2:
        return None
    is_long = operand_row_bytes < NARROW_OPERAND_BYTES or partition.max_count * width * itemsize >= BYTES_OF_FOUR
    pieces = min(4 if is_long else 2, min(partition.counts) * width // FULL_PIECE)
    return _piece_rows(partition, pieces) if pieces > 1 else None


def gather_piece_rows(partition: TokenPartition, width: int, itemsize: int) -> int | None:
    """Most rows of a piece in an all-gather; None: chunks are not cut.

    The receiver need not multiply piece by piece; it does where its output is narrow (`multiplies_pieces`).
    """
    if min(partition.counts) < GATHER_ROWS_OF_TWO:
        return None
    return _piece_rows(partition, 4 if partition.max_count * width * itemsize >= BYTES_OF_FOUR else 2)


def multiplies_pieces(num_features: int) -> bool:
    """Whether the receiver of an all-gather multiplies piece by piece: local, it may differ from rank to rank."""
    return num_features < NARROW_OUTPUT


def _piece_rows(partition: TokenPartition, pieces: int) -> int:
    return max(MIN_PIECE_ROWS, -(-partition.max_count // pieces))
