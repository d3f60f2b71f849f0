"""Into how many pieces ring_exchange cuts a chunk, as ``overlap/pieces.py`` does; a test compares the two.

This layer knows no schedule, and ``overlap`` no cost: each has the rule in the words of its own.
"""

from __future__ import annotations

from typing import Final

from tpoverlap.tuning.problem import Problem

ROWS_OF_TWO: Final = 1024
BYTES_OF_FOUR: Final = 256 << 20
MIN_PIECE_ROWS: Final = 128
NARROW_OUTPUT: Final = 2048


def pieces_of(problem: Problem) -> int:
    """Pieces of a chunk; 1 where it travels whole."""
    rows = problem.num_tokens // problem.tp_size  # the smallest chunk decides
    if problem.kind == "scatter":
        if problem.tp_size != 2 or rows < ROWS_OF_TWO:
            return 1
    elif rows < 2 * ROWS_OF_TWO:
        return 1
    wanted = 4 if problem.chunk_bytes >= BYTES_OF_FOUR else 2
    piece_rows = max(MIN_PIECE_ROWS, -(-problem.rows_per_rank // wanted))
    return -(-problem.rows_per_rank // piece_rows)


def multiplies_pieces(problem: Problem) -> bool:
    """Whether an all-gather's receiver multiplies piece by piece."""
    return problem.features < NARROW_OUTPUT
