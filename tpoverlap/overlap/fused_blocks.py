"""Rows and words of the `fused` forms, as data: which rows a kernel computes or sends, and which word each piece has.

Cached by the partition's counts, which hash faster than the partition does.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import torch

from tpoverlap.comm import ArrivalWords, Channel, Transfer, all_gather_schedule, reduce_scatter_schedule
from tpoverlap.comm.schedule import scatter_block
from tpoverlap.gemm.triton import PieceRows, RowBlock
from tpoverlap.gemm.triton.gates import Slot
from tpoverlap.gemm.triton.operation_rows import OperationRows
from tpoverlap.gemm.triton.push_plan import Push, RemoteBlock
from tpoverlap.memory.layout import MAX_PIECES
from tpoverlap.tokens import TokenPartition

_MAX_ROWS: Final = 1024


class Slots:
    """The slots of a channel's regions: made once each."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._slots: dict[tuple[str, int], Slot] = {}

    def at(self, region_name: str) -> tuple[Slot, int]:
        """(slot, epoch) of the operation that is open on that region; there is one at a time."""
        region = self._channel.regions[region_name]
        epoch = region.uses
        key = region_name, epoch % region.depth
        return self._slots.get(key) or self._make(key, epoch), epoch

    def _make(self, key: tuple[str, int], epoch: int) -> Slot:
        channel = self._channel
        ref = channel.regions[key[0]].ref(epoch)
        slot = ref.layout.slot_offset(ref.region, ref.slot)
        sent_words = ref.layout.arrival_offset(ref.region, ref.slot, channel.rank, 0)
        received_words = ref.layout.arrival_offset(ref.region, ref.slot, 0, 0)
        bases = [ref.arena.bytes_of(rank).data_ptr() for rank in range(channel.tp_size)]
        host = torch.tensor([(base + slot, base + sent_words) for base in bases], dtype=torch.int64)
        if channel.device.type == "cuda":
            host = host.pin_memory()
        own = bases[channel.rank]
        made = self._slots[key] = Slot(
            own + slot,
            own + received_words,
            channel.rank,
            channel.tp_size,
            MAX_PIECES,
            host.to(channel.device, non_blocking=True),
        )
        return made


@lru_cache(maxsize=_MAX_ROWS)
def gather_rows(counts: tuple[int, ...], width: int, rank: int, piece_rows: int) -> OperationRows:
    """Others: rows that each step receives, with their arrival flags. Pushes: own rows to every peer, in ring order;
    their row numbers count from the shard's first row.
    """
    partition = TokenPartition.from_counts(counts)
    steps = all_gather_schedule(partition, width, rank, piece_rows)
    own = partition.rows(rank)
    others = [[(ArrivalWords.word(t.source, t.piece), t.row_start, t.row_stop) for t in s.receives] for s in steps]
    pushes = tuple(
        Push(t.destination, t.row_start - own.start, t.row_stop - own.start, t.row_start, counter_word(t), t.piece)
        for step in steps
        for t in step.sends
    )
    return OperationRows(RowBlock(own.start, own.stop), _blocks(others), pushes)


@lru_cache(maxsize=_MAX_ROWS)
def scatter_rows(counts: tuple[int, ...], width: int, rank: int, piece_rows: int) -> OperationRows:
    """Others: rows that each step sends, with the counters of their pieces; remote: and their place in their owner's
    slot. Own: with the words of what one peer sends of them; every peer cuts them alike.
    """
    partition = TokenPartition.from_counts(counts)
    steps = reduce_scatter_schedule(partition, width, rank, piece_rows)
    others = _blocks([[(counter_word(t), t.row_start, t.row_stop) for t in step.sends] for step in steps])
    owners = [step.sends[0].destination for step in steps if step.sends]
    remote = tuple(
        RemoteBlock(block, owner, scatter_block(rank, owner) * counts[owner])
        for block, owner in zip(others, owners, strict=True)
    )
    own = partition.rows(rank)
    pieces = tuple(PieceRows(t.piece, t.row_start, t.row_stop) for t in steps[0].receives)
    return OperationRows(RowBlock(own.start, own.stop, pieces), others, (), remote)


@lru_cache(maxsize=_MAX_ROWS)
def last_words(counts: tuple[int, ...], width: int, rank: int, piece_rows: int) -> dict[int, int]:
    """For each destination of a reduce-scatter the counter of its last piece."""
    steps = reduce_scatter_schedule(TokenPartition.from_counts(counts), width, rank, piece_rows)
    return {step.sends[-1].destination: counter_word(step.sends[-1]) for step in steps if step.sends}


def counter_word(transfer: Transfer) -> int:
    """The local counter of a piece on its way to its destination."""
    return transfer.destination * MAX_PIECES + transfer.piece


def _blocks(steps: list[list[tuple[int, int, int]]]) -> tuple[RowBlock, ...]:
    """One block a step that has rows."""
    pieces = [tuple(PieceRows(*piece) for piece in step) for step in steps if step]
    return tuple(RowBlock(block[0].start, block[-1].stop, block) for block in pieces)
