"""Buckets of T: the only way in which T enters a choice, so that no exact T is ever tuned, compiled or looked up.

A bucket ends where the tiles of the [T, columns] output, 128 x 256 each, reach one of `EDGES` for each multiprocessor:
a quarter of a wave, half of one, three quarters, one, two, four, ... A GEMM within one bucket has about the same
efficiency, and what travels grows with T as the GEMM does, so one method is right for all of it.
"""

from __future__ import annotations

import math
from typing import Final

from tpoverlap.tuning.gemm_time import TILE_COLUMNS, TILE_ROWS
from tpoverlap.tuning.problem import Problem

EDGES: Final = (0.25, 0.5, 0.75, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""Tiles per multiprocessor at which a bucket ends; the last bucket has no end but the capacity."""


def bucket_bounds(columns: int, multiprocessors: int, max_tokens: int) -> tuple[int, ...]:
    """The largest T of each bucket, ascending; the last is ``max_tokens``.

    Args:
        columns: of the GEMM's [T, columns] output, see `columns_of`.
        multiprocessors: of the device; 1 for a CPU rank, which has one thread.
        max_tokens: C.
    """
    tile_columns = -(-columns // TILE_COLUMNS)
    ends = (TILE_ROWS * math.floor(edge * multiprocessors / tile_columns) for edge in EDGES)
    return (*sorted({end for end in ends if 0 < end < max_tokens}), max_tokens)


def columns_of(problem: Problem) -> int:
    """Columns of the [T, ...] matrix that grows with T: the GEMM's output, for a wgrad what it scatters beside it."""
    return problem.features if problem.kind == "gather" else problem.width


def samples(low: int, high: int) -> tuple[int, ...]:
    """The T at which a bucket (``low``, ``high``] is looked at: near its start, its middle, its end."""
    width = high - low
    return tuple(sorted({low + max(1, width // 8), low + max(1, (width + 1) // 2), high}))
