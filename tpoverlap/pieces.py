"""Into how many pieces ring_exchange cuts a chunk: pure functions of what all ranks agree on.

A piece costs a copy, a flag and, where it is multiplied by itself, a GEMM that is smaller and so a little less
efficient. It pays where something long would else be waited for as a whole.
"""

from __future__ import annotations

from typing import Final

from tpoverlap.tokens import TokenPartition

ROWS_OF_TWO: Final = 1024
"""Chunks of at least that many rows are cut in two; the GEMM of half of it still fills a GPU."""
BYTES_OF_FOUR: Final = 256 << 20
"""Chunks of at least that many bytes are cut in four."""
MIN_PIECE_ROWS: Final = 128
NARROW_OUTPUT: Final = 2048
"""Below that many output features a row is multiplied faster than a link moves it (bf16, NVLink)."""


def scatter_piece_rows(partition: TokenPartition, width: int, itemsize: int) -> int | None:
    """Most rows of a piece in a reduce-scatter between two ranks; None: chunks are not cut.

    Cut, peer's piece 2 is computed while piece 1 travels, and own piece 1 is added to what arrived while piece 2
    travels: no copy is left at the end, and no separate sum. With one piece own rows are computed while it travels.
    """
    if partition.tp_size != 2 or min(partition.counts) < ROWS_OF_TWO:
        return None
    return _piece_rows(partition, width, itemsize)


def gather_piece_rows(partition: TokenPartition, width: int, itemsize: int) -> int | None:
    """Most rows of a piece in an all-gather; None: chunks are not cut.

    The receiver need not multiply piece by piece; it does where its output is narrow (`multiplies_pieces`).
    """
    if min(partition.counts) < 2 * ROWS_OF_TWO:
        return None
    return _piece_rows(partition, width, itemsize)


def multiplies_pieces(num_features: int) -> bool:
    """Whether the receiver of an all-gather multiplies piece by piece: local, it may differ from rank to rank."""
    return num_features < NARROW_OUTPUT


def _piece_rows(partition: TokenPartition, width: int, itemsize: int) -> int:
    rows = partition.max_count
    pieces = 4 if rows * width * itemsize >= BYTES_OF_FOUR else 2
    return max(MIN_PIECE_ROWS, -(-rows // pieces))
