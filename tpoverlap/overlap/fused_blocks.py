"""Rows and words of the `fused` forms, as data: which rows a kernel computes, and which word each piece has."""

from __future__ import annotations

from functools import lru_cache

from tpoverlap.comm import ArrivalWords, Transfer, all_gather_schedule, reduce_scatter_schedule
from tpoverlap.gemm.triton import PieceRows, RowBlock
from tpoverlap.memory.layout import MAX_PIECES
from tpoverlap.tokens import TokenPartition


@lru_cache(maxsize=256)
def gather_blocks(partition: TokenPartition, width: int, rank: int, piece_rows: int) -> tuple[RowBlock, ...]:
    """Rows that each step receives, with their arrival flags."""
    steps = all_gather_schedule(partition, width, rank, piece_rows)
    return _blocks(
        [[(ArrivalWords.word(t.source, t.piece), t.row_start, t.row_stop) for t in step.receives] for step in steps]
    )


@lru_cache(maxsize=256)
def scatter_blocks(partition: TokenPartition, width: int, rank: int, piece_rows: int) -> tuple[RowBlock, ...]:
    """Rows that each step sends, with the counters of their pieces."""
    steps = reduce_scatter_schedule(partition, width, rank, piece_rows)
    return _blocks([[(counter_word(t), t.row_start, t.row_stop) for t in step.sends] for step in steps])


def counter_word(transfer: Transfer) -> int:
    """The local counter of a piece on its way to its destination."""
    return transfer.destination * MAX_PIECES + transfer.piece


def _blocks(steps: list[list[tuple[int, int, int]]]) -> tuple[RowBlock, ...]:
    """One block a step that has rows."""
    pieces = [tuple(PieceRows(*piece) for piece in step) for step in steps if step]
    return tuple(RowBlock(block[0].start, block[-1].stop, block) for block in pieces)
