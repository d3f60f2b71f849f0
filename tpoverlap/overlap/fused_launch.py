"""The one-launch form of `fused`, for few tokens: the GEMM's own programs move the rows.

::

    all-gather, rank r:      caller | credits? | one kernel: some programs push own rows, others multiply them |
                                                 r+1's rows as they arrive | ...                 | same operation? |

    reduce-scatter, rank r:  caller | credits? | one kernel: r+1's rows, into its slot | ... | own rows + what arrived |
                                                                                                 | same operation? |

Deadlock: programs that push (or compute a peer's rows) wait for nothing, and the GPU starts them first. A program waits
only for what such programs of the peers send; and it leaves `RESERVED_PROGRAMS` multiprocessors free, so that another
library's kernel, which a peer's kernel may be queued behind, finds room here.

The kernel may read rows of an operation that is not the same one; what it made of them goes nowhere: the descriptors
are compared before the caller's stream goes on, and an unequal one stops it (docs/protocol.md).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import torch

from tpoverlap.comm import Channel, Copier, CopyJob, OneSidedExchange, all_gather_schedule, reduce_scatter_schedule
from tpoverlap.comm.schedule import scatter_block
from tpoverlap.comm.signals import Signals, SlotRef
from tpoverlap.comm.streams import Stream
from tpoverlap.gemm import PartialGemm, RowGemm
from tpoverlap.gemm.triton import PieceRows, RowBlock
from tpoverlap.gemm.triton.gates import Gate, Received
from tpoverlap.gemm.triton.launcher import GemmLauncher
from tpoverlap.gemm.triton.push_plan import Push, PushTo, RemoteBlock
from tpoverlap.memory.layout import MAX_PIECES
from tpoverlap.overlap.context import OperationContext
from tpoverlap.overlap.fused_blocks import counter_word, gather_blocks
from tpoverlap.tokens import TokenPartition

RESERVED_PROGRAMS: Final = 16
_PIECE_ROWS: Final = 128
"""Rows that one flag stands for: as many as the largest tile has."""


class InKernel(Copier):
    """Moves nothing: the kernel does. What is left of a send is the wait for the peer's credit."""

    def push(self, signals: Signals, stream: Stream, job: CopyJob) -> None:
        pass


class PeerTables:
    """For each slot: int64 [R, 2] on the device, the address of every rank's slot and of this rank's words in it."""

    def __init__(self, channel: Channel) -> None:
        self._rank, self._size, self._device = channel.rank, channel.tp_size, channel.device
        self._tables: dict[tuple[int, int, int], torch.Tensor] = {}

    def table(self, ref: SlotRef) -> torch.Tensor:
        """For one slot; made once."""
        key = (id(ref.arena), ref.region, ref.slot)  # arenas live as long as their channel
        if key not in self._tables:
            slot = ref.layout.slot_offset(ref.region, ref.slot)
            words = ref.layout.arrival_offset(ref.region, ref.slot, self._rank, 0)
            bases = [ref.arena.bytes_of(rank).data_ptr() for rank in range(self._size)]
            host = torch.tensor([(base + slot, base + words) for base in bases], dtype=torch.int64)
            if self._device.type == "cuda":
                host = host.pin_memory()
            self._tables[key] = host.to(self._device, non_blocking=True)
        return self._tables[key]


def all_gather(
    context: OperationContext, launcher: GemmLauncher, peers: PeerTables, x_shard_t: torch.Tensor, gemm: RowGemm
) -> None:
    """Nobody else reads the gathered rows, and there is at least one matrix."""
    partition, width, own = context.partition, context.width, context.own_rows
    with context.open_gather() as exchange:
        assert isinstance(exchange, OneSidedExchange), "checked before"
        caller = exchange.caller
        arrivals = exchange.arrivals
        gate = Gate(arrivals.address, arrivals.epoch)
        whole = exchange.view(0, (partition.total, width))
        blocks = gather_blocks(partition, width, context.rank, _PIECE_ROWS)
        pushes = _pushes(partition, width, context.rank)
        push_to = PushTo(pushes, peers.table(_slot(context, arrivals.epoch))) if pushes else None
        launches = []
        for matrix, bias, out in zip(gemm.matrices, gemm.biases, gemm.outs, strict=True):
            block = RowBlock(own.start, own.stop)
            launches.append(launcher.gathered_rows(x_shard_t, block, whole, blocks, matrix, bias, out, gate, push_to))
            push_to = None  # the first kernel's programs send; those of the others find the flags set
        _wait_for_credits(exchange, x_shard_t, own.start, launcher)
        if exchange.hands_out_slot:
            exchange.copy_own(x_shard_t, own.start * width)
        for number, launch in enumerate(launches):
            exchange.run(caller, launch, "gemm", number)
        exchange.wait_own(caller)


def reduce_scatter(
    context: OperationContext, launcher: GemmLauncher, peers: PeerTables, gemm: PartialGemm, out: torch.Tensor
) -> None:
    """See `registry.gemm_then_scatter`."""
    partition, width, own, rank = context.partition, context.width, context.own_rows, context.rank
    with context.open_scatter() as exchange:
        assert isinstance(exchange, OneSidedExchange), "checked before"
        arrivals = exchange.arrivals
        count = own.stop - own.start
        received = exchange.view(0, (exchange.tp_size - 1, count, width))
        gate = Gate(arrivals.address, arrivals.epoch)
        address = received.data_ptr() or arrivals.address  # 0 without own rows; a small number has another type
        blocks = Received(address, rank, exchange.tp_size, gate, MAX_PIECES)
        launch = launcher.scatter_rows(
            gemm,
            _remote_blocks(partition, width, rank),
            _own_block(partition, width, rank),
            out,
            blocks,
            peers.table(_slot(context, arrivals.epoch)),
        )
        _wait_for_credits(exchange, out[:0], 0, launcher)
        exchange.run(exchange.caller, launch, "gemm", 0)


def _wait_for_credits(exchange: OneSidedExchange, source: torch.Tensor, base_row: int, launcher: GemmLauncher) -> None:
    exchange.copier = InKernel()
    for step in exchange.steps:
        exchange.send(step, source, base_row)
    if launcher.interpreted:  # an error is raised at once, not after the kernel has given up
        exchange.wait_entered(exchange.caller)
    exchange.caller.wait(exchange.sent())


def _slot(context: OperationContext, epoch: int) -> SlotRef:
    assert context.channel is not None, "R = 1 is sequential"
    return context.channel.regions[context.region].ref(epoch)


@lru_cache(maxsize=256)
def _pushes(partition: TokenPartition, width: int, rank: int) -> tuple[Push, ...]:
    """Own rows to every peer, in ring order; row numbers count from the shard's first row."""
    own = partition.rows(rank).start
    return tuple(
        Push(t.destination, t.row_start - own, t.row_stop - own, t.row_start, counter_word(t), t.piece)
        for step in all_gather_schedule(partition, width, rank, _PIECE_ROWS)
        for t in step.sends
    )


@lru_cache(maxsize=256)
def _remote_blocks(partition: TokenPartition, width: int, rank: int) -> tuple[RemoteBlock, ...]:
    """Rows of every peer, in ring order, with the counters of their pieces and their place in the peer's slot."""
    found = []
    for step in reduce_scatter_schedule(partition, width, rank, _PIECE_ROWS):
        if step.sends:
            pieces = tuple(PieceRows(counter_word(t), t.row_start, t.row_stop) for t in step.sends)
            owner = step.sends[0].destination
            rows = partition.rows(owner)
            block = RowBlock(rows.start, rows.stop, pieces)
            found.append(RemoteBlock(block, owner, scatter_block(rank, owner) * (rows.stop - rows.start)))
    return tuple(found)


@lru_cache(maxsize=256)
def _own_block(partition: TokenPartition, width: int, rank: int) -> RowBlock:
    """Own rows with the words of what one peer sends of them; every peer cuts them alike."""
    own = partition.rows(rank)
    first = reduce_scatter_schedule(partition, width, rank, _PIECE_ROWS)[0]
    return RowBlock(own.start, own.stop, tuple(PieceRows(t.piece, t.row_start, t.row_stop) for t in first.receives))
