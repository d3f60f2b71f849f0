"""Into how many pieces ring_exchange cuts a chunk: pure functions of what all ranks agree on.

A piece costs a copy, a flag and, where it is multiplied by itself, a GEMM that is smaller and so a little less
efficient. It pays where something long would else be waited for as a whole.
"""

from __future__ import annotations

from typing import Final

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
