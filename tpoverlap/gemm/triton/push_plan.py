"""What the one-launch forms send from inside a GEMM kernel: rows of the shard, or tiles of the product. Arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from tpoverlap.gemm.triton.tile_plan import RowBlock

LEAST_PART_BYTES: Final = 16 * 1024
"""A program copies at least this much, or its counter costs more than its copy."""


@dataclass(frozen=True)
class Push:
    """Rows [start, stop) of the shard go to row ``slot_row`` and on of the slot of rank ``peer``, as its ``piece``.

    ``word``: the local counter of this piece on its way to this peer.
    """

    peer: int
    start: int
    stop: int
    slot_row: int
    word: int
    piece: int


@dataclass(frozen=True)
class RemoteBlock:
    """Rows of the product that another rank owns: ``block.start`` is row ``slot_row`` of its slot."""

    block: RowBlock
    peer: int
    slot_row: int


@dataclass(frozen=True)
class PushPlan:
    """Pushes cut into parts for several programs.

    Attributes:
        rows: (peer, first row, row after the last, slot row, word, piece, parts of the piece, 0) of each part.
    """

    rows: tuple[tuple[int, int, int, int, int, int, int, int], ...]

    @classmethod
    def of(
        cls, pushes: tuple[Push, ...], row_bytes: int, most_parts: int, least_part_bytes: int = LEAST_PART_BYTES
    ) -> PushPlan:
        """Cut ``pushes`` into at most ``most_parts`` parts in all (one each at least), none of them too short."""
        return _cut(pushes, row_bytes, most_parts, least_part_bytes)


@lru_cache(maxsize=1024)
def _cut(pushes: tuple[Push, ...], row_bytes: int, most_parts: int, least_part_bytes: int) -> PushPlan:
    rows = []
    for push in pushes:
        count = push.stop - push.start
        parts = max(1, min(most_parts // len(pushes), count, count * row_bytes // least_part_bytes))
        for part in range(parts):
            start, stop = count * part // parts, count * (part + 1) // parts
            rows.append(
                (
                    push.peer,
                    push.start + start,
                    push.start + stop,
                    push.slot_row + start,
                    push.word,
                    push.piece,
                    parts,
                    0,
                )
            )
    return PushPlan(tuple(rows))
