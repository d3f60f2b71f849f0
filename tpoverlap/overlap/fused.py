"""fused: one persistent kernel whose tiles wait for pieces, count them, or add what peers sent.

::

    all-gather, rank r:      comm   | own rows -> r-1, piece by piece | -> r-2 | ...           (copy engine)
                             caller | peers in? | one kernel: own rows | r+1's, as pieces arrive | r+2's | ...

    reduce-scatter, rank r:  caller | kernel: r+1's rows | r+2's | ... | computed? | kernel: own rows + what arrived
                             comm          | piece counted -> r+1 | ...                        (copy engine)

Deadlock (docs/protocol.md): the gather's kernel may fill the GPU, so it starts only when every peer has entered the
operation, and then waits for nothing but copies that were enqueued before. The scatter's second kernel starts when
every peer has computed what it sends here (a stream-side wait, which occupies no multiprocessor), and then waits, in
its epilogue, for nothing but copies. Where programs copy (``use_ce: false``) the kernels leave them
their multiprocessors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

import torch

from tpoverlap.comm import (
    Channel,
    OneSidedExchange,
    Transfer,
)
from tpoverlap.comm.epochs import MASK
from tpoverlap.comm.streams import Stream
from tpoverlap.errors import BackendUnavailableError, PeerTimeoutError
from tpoverlap.gemm import PartialGemm, RowGemm
from tpoverlap.gemm.triton import PieceRows, RowBlock, require_kernels
from tpoverlap.gemm.triton.gates import Gate, Received
from tpoverlap.gemm.triton.launcher import GemmLauncher, Launch
from tpoverlap.memory.layout import MAX_PIECES
from tpoverlap.overlap import fused_launch
from tpoverlap.overlap.context import OperationContext
from tpoverlap.overlap.fused_blocks import counter_word, gather_blocks, scatter_blocks
from tpoverlap.overlap.fused_form import choose_form
from tpoverlap.tokens import TokenPartition

ReadGathered = Callable[[torch.Tensor], None]

__all__ = ["all_gather", "choose_form", "reduce_scatter"]
_MIB: Final = 1 << 20
_GATHER_PIECES: Final = ((4 * _MIB, 1), (16 * _MIB, 2), (None, 4))
"""(chunk smaller than, pieces): a piece costs a copy and a flag; own rows hide all but the first ones anyway."""
_SCATTER_PIECES: Final = ((2 * _MIB, 1), (8 * _MIB, 2), (32 * _MIB, 4), (None, 8))
"""The last piece's way is not hidden, so they are smaller here."""
_PIECE_ROWS: Final = 128
"""Pieces are cut at multiples of a tile's rows where they can be."""
_COUNTED_OPERATIONS: Final = 64
_GIVE_UP_FACTOR, _GIVE_UP_EXTRA_S = 2.0, 10.0
"""The watchdog satisfies waiting kernels at the time-out; their own bound is for a process whose watchdog is stuck."""
_SHARED_GPU_PROGRAMS: Final = 16


class PieceCounters:
    """Words that `GemmLauncher.partial_rows` bumps: one row of words an operation, rows used in turn, never reset."""

    def __init__(self, device: torch.device, tp_size: int) -> None:
        self._words = tp_size * MAX_PIECES
        self._counters = torch.zeros(_COUNTED_OPERATIONS, self._words, dtype=torch.int32, device=device)
        self._totals = [[0] * self._words for _ in range(_COUNTED_OPERATIONS)]
        self._uses = 0

    def next(self, tiles_per_word: dict[int, int]) -> tuple[torch.Tensor, dict[int, int]]:
        """Counters for one more operation, and the value of each word once all its tiles are done (mod 2**32)."""
        turn = self._uses % _COUNTED_OPERATIONS
        self._uses += 1
        totals = self._totals[turn]
        for word, tiles in tiles_per_word.items():
            totals[word] = (totals[word] + tiles) & MASK
        return self._counters[turn], {word: totals[word] for word in tiles_per_word}


@dataclass(frozen=True)
class _Kernels:
    """What a channel keeps for this method."""

    launcher: GemmLauncher
    counters: PieceCounters
    peers: fused_launch.PeerTables


def all_gather(
    context: OperationContext, x_shard_t: torch.Tensor, gemm: RowGemm, read_gathered: ReadGathered | None
) -> None:
    """Own rows first, straight from ``x_shard_t``; others as they arrive. See `registry.gather_then_gemm`."""
    if read_gathered is None and gemm.matrices and _one_launch(context, "gather"):
        kernels = _kernels(context, fused_launch.RESERVED_PROGRAMS)
        fused_launch.all_gather(context, kernels.launcher, kernels.peers, x_shard_t, gemm)
        return
    kernels = _kernels(context)
    partition, width, own = context.partition, context.width, context.own_rows
    piece_rows = _piece_rows(partition, width, context.dtype, _GATHER_PIECES)
    with context.open_gather(piece_rows) as exchange:
        assert isinstance(exchange, OneSidedExchange), "checked before"
        caller = exchange.caller
        whole = exchange.view(0, (partition.total, width))
        needs_own_copy = read_gathered is not None or exchange.hands_out_slot
        blocks = gather_blocks(partition, width, context.rank, piece_rows)
        own_block = RowBlock(own.start, own.stop)
        arrivals = exchange.arrivals
        gate = Gate(arrivals.address, arrivals.epoch)
        launches = [  # prepared before the first wait: a binary that is loaded may have to wait for the device
            kernels.launcher.gathered_rows(x_shard_t, own_block, whole, blocks, matrix, bias, out, gate)
            for matrix, bias, out in zip(gemm.matrices, gemm.biases, gemm.outs, strict=True)
        ]
        for step in exchange.steps:
            exchange.send(step, x_shard_t, own.start)
        if needs_own_copy:
            exchange.copy_own(x_shard_t, own.start * width)
        if kernels.launcher.interpreted and not context.config.use_ce:
            caller.wait(exchange.sent())  # interpreted kernels of one process run one at a time
        exchange.wait_entered(caller)
        for number, launch in enumerate(launches):
            exchange.run(caller, launch, "gemm", number)
        if read_gathered is not None or not gemm.matrices:
            for step in exchange.steps:
                exchange.wait(step, caller)
        if needs_own_copy:
            exchange.wait_own(caller)
        if read_gathered is not None:
            exchange.run(caller, lambda: read_gathered(whole), "read")


def reduce_scatter(context: OperationContext, gemm: PartialGemm, out: torch.Tensor) -> None:
    """Peers' rows first, pushed piece by piece as their tiles finish; own rows add what arrived.

    See `registry.gemm_then_scatter`.
    """
    if _one_launch(context, "scatter"):
        kernels = _kernels(context, fused_launch.RESERVED_PROGRAMS)
        fused_launch.reduce_scatter(context, kernels.launcher, kernels.peers, gemm, out)
        return
    kernels = _kernels(context)
    launcher, partition, own = kernels.launcher, context.partition, context.own_rows
    piece_rows = _piece_rows(partition, context.width, context.dtype, _SCATTER_PIECES)
    with context.open_scatter(piece_rows) as exchange:
        assert isinstance(exchange, OneSidedExchange), "checked before"
        caller = exchange.caller
        staging = gemm.empty(partition.total, context.width)
        blocks = scatter_blocks(partition, context.width, context.rank, piece_rows)
        counters, targets = kernels.counters.next(launcher.tiles_per_word(gemm, blocks))
        last_words = {step.sends[-1].destination: counter_word(step.sends[-1]) for step in exchange.steps if step.sends}
        own_rows = _own_rows(launcher, exchange, gemm, out, own)
        allocated = caller.record()  # before the kernel: sends follow its counters, not its end
        if blocks:
            # Both launches are prepared by now: nothing is compiled or loaded between them, while streams wait.
            exchange.run(caller, launcher.partial_rows(gemm, blocks, staging, counters), "gemm", 1)

        def until_computed(stream: Stream, transfer: Transfer) -> None:
            word = counter_word(transfer)
            stream.wait_counter(counters, word, targets[word])
            if word == last_words[transfer.destination]:
                exchange.announce_computed(transfer)

        for step in exchange.steps:
            exchange.send(step, staging, 0, allocated, until_computed)
        if launcher.interpreted and not context.config.use_ce:
            caller.wait(exchange.sent())
        exchange.wait_computed(caller)
        if own_rows is not None:
            exchange.run(caller, own_rows, "gemm", 0)


def _own_rows(
    launcher: GemmLauncher, exchange: OneSidedExchange, gemm: PartialGemm, out: torch.Tensor, own: slice
) -> Launch | None:
    """The second kernel: own rows and what the peers send of them; None without own rows."""
    count = own.stop - own.start
    if count == 0:
        return None
    received = exchange.view(0, (exchange.tp_size - 1, count, gemm.width))
    arrivals = exchange.arrivals
    # Every source cuts the rows alike, so the pieces of one stand for all.
    pieces = tuple(PieceRows(t.piece, t.row_start, t.row_stop) for t in exchange.steps[0].receives)
    gate = Gate(arrivals.address, arrivals.epoch)
    blocks = Received(received.data_ptr(), exchange.rank, exchange.tp_size, gate, MAX_PIECES)
    return launcher.own_rows(gemm, RowBlock(own.start, own.stop, pieces), out, blocks)


def _one_launch(context: OperationContext, direction: Literal["gather", "scatter"]) -> bool:
    # Copy programs were asked for: then these do the copying.
    return context.config.use_ce and choose_form(direction, context.partition.total) == "one_launch"


def _kernels(context: OperationContext, reserve: int = 0) -> _Kernels:
    """Raises BackendUnavailableError, before any rank waits, where the method cannot run."""
    channel = context.channel
    assert channel is not None, "R = 1 is sequential"
    if not channel.backend.one_sided:
        raise BackendUnavailableError(
            f"{context.name}: method 'fused' waits for flags in mapped peer memory, which backend "
            f"{channel.backend.name!r} does not have; use method 'ring_exchange'"
        )
    require_kernels(channel.device, f"{context.name}: method 'fused'")
    config = context.config
    # Copy programs need multiprocessors that no spinning kernel holds; the copy engine needs none.
    reserve = reserve if config.use_ce else config.num_sm
    if channel.shares_gpu:
        reserve = max(reserve, _SHARED_GPU_PROGRAMS)
    return channel.resource(f"fused/{reserve}", lambda: _make_kernels(channel, reserve))


def _make_kernels(channel: Channel, reserve: int) -> _Kernels:
    limit_s = _GIVE_UP_FACTOR * channel.timeout_s + _GIVE_UP_EXTRA_S
    launcher = GemmLauncher(channel.device, limit_s, reserve)

    def gave_up() -> BaseException | None:
        if not launcher.gave_up:
            return None
        return PeerTimeoutError(
            f"rank {channel.rank}: a kernel of method 'fused' waited more than {limit_s:g} s for rows of a peer and "
            "gave up; its output is NaN. Close the manager"
        )

    channel.probes.append(gave_up)
    return _Kernels(launcher, PieceCounters(channel.device, channel.tp_size), fused_launch.PeerTables(channel))


def _piece_rows(
    partition: TokenPartition, width: int, dtype: torch.dtype, table: tuple[tuple[int | None, int], ...]
) -> int:
    """Most rows of a piece: the same on every rank, because it is computed from what they agree on."""
    rows = max(partition.counts)
    chunk_bytes = rows * width * dtype.itemsize
    pieces = next(count for below, count in table if below is None or chunk_bytes < below)
    return max(1, -(-rows // (pieces * _PIECE_ROWS)) * _PIECE_ROWS)
