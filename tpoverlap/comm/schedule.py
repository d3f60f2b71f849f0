"""Schedules as data: which rows go from which rank to which, in which step, into which part of the slot.

A schedule is a pure function of the partition, the width and the rank. Source and destination derive the same
transfers independently, so nothing about them is ever communicated. They are named tuples because a new T makes new
ones, and a frozen dataclass takes ten times as long to make.

Ring order: in step s = 1 .. R-1 rank r exchanges with ranks r + s and r - s, so every link carries one transfer a step
and no rank is the target of two. Chunks go straight to whoever needs them instead of being forwarded by neighbours:
the bytes on each link are those of a ring, but no chunk waits for R - 2 hops (an NVSwitch or a mesh has the links).
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from tpoverlap.memory.layout import MAX_PIECES
from tpoverlap.pieces import Cut, FirstPiece
from tpoverlap.tokens import TokenPartition


class Transfer(NamedTuple):  # a tuple: a new T makes many, and frozen dataclasses are several times as slow to make
    """Rows [row_start, row_stop) of the [T, width] activation, moved from ``source`` to ``destination``.

    Attributes:
        step: ring step or pipeline split.
        piece: index of this transfer's arrival flag among those of its source.
        slot_element: where it goes, in elements from the start of the destination's slot.
        col_start, col_stop: columns of the activation (all of them, except for pipeline splits).
    """

    step: int
    source: int
    destination: int
    piece: int
    row_start: int
    row_stop: int
    slot_element: int
    col_start: int
    col_stop: int

    @property
    def num_rows(self) -> int:
        """Rows moved."""
        return self.row_stop - self.row_start

    @property
    def num_elements(self) -> int:
        """Elements moved; they are contiguous in the slot."""
        return self.num_rows * (self.col_stop - self.col_start)


class Step(NamedTuple):
    """What one rank sends and receives in one step. Transfers without rows are left out on both sides.

    Attributes:
        peer: the rank received from in a ring step; -1 where a step receives from all peers.
    """

    number: int
    sends: tuple[Transfer, ...]
    receives: tuple[Transfer, ...]
    peer: int


@lru_cache(maxsize=256)
def all_gather_schedule(
    partition: TokenPartition, width: int, rank: int, max_piece_rows: int | None = None
) -> tuple[Step, ...]:
    """Own rows to every peer; slots hold the gathered [T, width] activation, rows at their final place.

    Args:
        partition: rows of each rank.
        width: H, columns of the activation.
        rank: whose steps.
        max_piece_rows: cut chunks into pieces of at most this many rows, each with a flag of its own; None: one piece.
    """
    size = partition.tp_size
    pieces = [
        _pieces(start, count, max_piece_rows) for start, count in zip(partition.offsets, partition.counts, strict=True)
    ]
    steps = []
    for step in range(1, size):
        destination, source = (rank - step) % size, (rank + step) % size
        sends = tuple(
            Transfer(step, rank, destination, piece, start, stop, start * width, 0, width)
            for piece, start, stop in pieces[rank]
        )
        receives = tuple(
            Transfer(step, source, rank, piece, start, stop, start * width, 0, width)
            for piece, start, stop in pieces[source]
        )
        steps.append(Step(step, sends, receives, source))
    return tuple(steps)


@lru_cache(maxsize=256)
def reduce_scatter_schedule(
    partition: TokenPartition, width: int, rank: int, cut: Cut | None = None
) -> tuple[Step, ...]:
    """Partial rows to their owner; slots hold one [T_r, width] block a source, in rank order without the owner.

    ``cut``: of chunks, in pieces with a flag of its own each; None: one piece.
    """
    size = partition.tp_size
    pieces = [_pieces(start, count, cut) for start, count in zip(partition.offsets, partition.counts, strict=True)]

    def block(step: int, source: int, owner: int) -> tuple[Transfer, ...]:
        first, count = partition.offsets[owner], partition.counts[owner]
        base = (scatter_block(source, owner) * count - first) * width
        return tuple(
            Transfer(step, source, owner, piece, start, stop, base + start * width, 0, width)
            for piece, start, stop in pieces[owner]
        )

    steps = []
    for step in range(1, size):
        destination, source = (rank + step) % size, (rank - step) % size
        steps.append(Step(step, block(step, rank, destination), block(step, source, rank), source))
    return tuple(steps)


@lru_cache(maxsize=256)
def pipeline_schedule(
    partition: TokenPartition, width: int, rank: int, num_splits: int, granule: int = 1, trailer: int = 0
) -> tuple[Step, ...]:
    """Reduce-scatter of column splits: step j moves columns of split j of every peer's rows.

    Slots hold split after split, and inside each one contiguous [T_r, width_j] block a source: a strided copy would
    not run on a copy engine.

    Args:
        partition, width, rank: as above.
        num_splits, granule: see `column_splits`.
        trailer: elements that every row of every split has at its end (scales of FP8 rows).
    """
    size = partition.tp_size

    def block(split: int, columns: tuple[int, int], source: int, destination: int) -> tuple[Transfer, ...]:
        rows = partition.rows(destination)
        count = rows.stop - rows.start
        if count == 0:
            return ()
        start, stop = columns
        base = count * ((size - 1) * start + scatter_block(source, destination) * (stop - start))
        return (Transfer(split, source, destination, split, rows.start, rows.stop, base, start, stop),)

    steps = []
    for split, (start, stop) in enumerate(column_splits(width, num_splits, granule)):
        columns = start + split * trailer, stop + (split + 1) * trailer
        others = [(rank + offset) % size for offset in range(1, size)]
        sends = tuple(transfer for peer in others for transfer in block(split, columns, rank, peer))
        receives = tuple(transfer for peer in others for transfer in block(split, columns, peer, rank))
        steps.append(Step(split, sends, receives, -1))
    return tuple(steps)


def in_pieces(step: Step) -> tuple[Step, ...]:
    """``step`` as one step a piece, in order, so that pieces can be sent and waited for one by one."""
    if len(step.sends) <= 1 and len(step.receives) <= 1:
        return (step,)
    return _cut(step)


@lru_cache(maxsize=256)
def _cut(step: Step) -> tuple[Step, ...]:
    count = max(len(step.sends), len(step.receives))
    return tuple(Step(step.number, step.sends[i : i + 1], step.receives[i : i + 1], step.peer) for i in range(count))


def scatter_block(source: int, owner: int) -> int:
    """Index of the block that ``source`` writes in ``owner``'s slot: rank order, the owner left out."""
    return source if source < owner else source - 1


def column_splits(width: int, num_splits: int, granule: int = 1) -> tuple[tuple[int, int], ...]:
    """``num_splits`` nearly equal column ranges in multiples of ``granule``, which divides ``width``.

    Fewer, if there are fewer granules.
    """
    granules = width // granule
    count = min(num_splits, granules)
    return tuple((granules * i // count * granule, granules * (i + 1) // count * granule) for i in range(count))


def _pieces(start: int, count: int, cut: Cut | None) -> tuple[tuple[int, int, int], ...]:
    """(number, first row, row after the last) of each piece of ``count`` rows from ``start``."""
    if count == 0:
        return ()
    if isinstance(cut, FirstPiece):
        middle = start + cut.rows
        return ((0, start, middle), (1, middle, start + count))
    if cut is None or count <= cut:
        return ((0, start, start + count),)
    number = min(-(-count // cut), MAX_PIECES)
    return tuple((i, start + count * i // number, start + count * (i + 1) // number) for i in range(number))
