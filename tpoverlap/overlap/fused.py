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
from functools import lru_cache, partial
from typing import Final, Literal

import torch

from tpoverlap.comm import Channel, OneSidedExchange, Transfer
from tpoverlap.comm.epochs import MASK
from tpoverlap.comm.streams import Stream
from tpoverlap.errors import BackendUnavailableError
from tpoverlap.fused_form import choose_form
from tpoverlap.gemm import PartialGemm, RowGemm
from tpoverlap.gemm.triton import require_kernels
from tpoverlap.gemm.triton.launcher import GemmLauncher
from tpoverlap.memory.layout import MAX_PIECES
from tpoverlap.overlap import fused_launch
from tpoverlap.overlap.context import OperationContext
from tpoverlap.overlap.fused_blocks import Slots, counter_word, gather_rows, last_words, scatter_rows
from tpoverlap.overlap.kernel_limit import kernel_limit_s, watch_kernels

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
_SHARED_GPU_PROGRAMS: Final = 16


class PieceCounters:
    """Words that `GemmLauncher.partial_rows` bumps: one row of words an operation, rows used in turn, never reset."""

    def __init__(self, device: torch.device, tp_size: int) -> None:
        self._words = tp_size * MAX_PIECES
        self._counters = torch.zeros(_COUNTED_OPERATIONS, self._words, dtype=torch.int32, device=device)
        self._rows = self._counters.unbind()  # made once: an index costs as much as a launch
        self._totals = [[0] * self._words for _ in range(_COUNTED_OPERATIONS)]
        self._uses = 0

    def next(self, tiles_per_word: dict[int, int]) -> tuple[torch.Tensor, dict[int, int]]:
        """Counters for one more operation, and the value of each word once all its tiles are done (mod 2**32)."""
        turn = self._uses % _COUNTED_OPERATIONS
        self._uses += 1
        totals, targets = self._totals[turn], {}
        for word, tiles in tiles_per_word.items():
            targets[word] = totals[word] = (totals[word] + tiles) & MASK
        return self._rows[turn], targets


@dataclass(frozen=True)
class _Kernels:
    """What a channel keeps for this method."""

    launcher: GemmLauncher
    counters: PieceCounters
    slots: Slots


def all_gather(
    context: OperationContext, x_shard_t: torch.Tensor, gemm: RowGemm, read_gathered: ReadGathered | None
) -> None:
    """Own rows first, straight from ``x_shard_t``; others as they arrive. See `registry.gather_then_gemm`."""
    if read_gathered is None and gemm.matrices and _one_launch(context, "gather"):
        kernels = _kernels(context, fused_launch.RESERVED_PROGRAMS)
        fused_launch.all_gather(context, kernels.launcher, kernels.slots, x_shard_t, gemm)
        return
    kernels = _kernels(context)
    launcher, partition, width = kernels.launcher, context.partition, context.width
    piece_rows = _piece_rows(partition.max_count, width, context.dtype.itemsize, _GATHER_PIECES)
    rows = gather_rows(partition.counts, width, context.rank, piece_rows)
    with context.open_gather(piece_rows) as exchange:
        assert isinstance(exchange, OneSidedExchange), "checked before"
        caller = exchange.caller
        needs_own_copy = read_gathered is not None or exchange.hands_out_slot
        slot, epoch = kernels.slots.at(context.region)
        launches = []  # prepared before the first wait: a binary that is loaded may have to wait for the device
        for matrix, bias, out, scaling in zip(gemm.matrices, gemm.biases, gemm.outs, gemm.scalings, strict=True):
            launches.append(
                launcher.gathered_rows(rows, x_shard_t, slot, exchange.view, matrix, bias, out, epoch, scaling=scaling)
            )
        for step in exchange.steps:
            exchange.send(step, x_shard_t, rows.own.start)
        if needs_own_copy:
            exchange.copy_own(x_shard_t, rows.own.start * width)
        if launcher.interpreted and not context.config.use_ce:
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
            whole = exchange.view(0, (partition.total, width))
            exchange.run(caller, lambda: read_gathered(whole), "read")


def reduce_scatter(context: OperationContext, gemm: PartialGemm, out: torch.Tensor) -> None:
    """Peers' rows first, pushed piece by piece as their tiles finish; own rows add what arrived.

    See `registry.gemm_then_scatter`.
    """
    if _one_launch(context, "scatter"):
        kernels = _kernels(context, fused_launch.RESERVED_PROGRAMS)
        fused_launch.reduce_scatter(context, kernels.launcher, kernels.slots, gemm, out)
        return
    kernels = _kernels(context)
    launcher, partition, width = kernels.launcher, context.partition, context.width
    piece_rows = _piece_rows(partition.max_count, width, context.dtype.itemsize, _SCATTER_PIECES)
    parts = partition.counts, width, context.rank, piece_rows
    rows, last_word = scatter_rows(*parts), last_words(*parts)
    with context.open_scatter(piece_rows) as exchange:
        assert isinstance(exchange, OneSidedExchange), "checked before"
        caller = exchange.caller
        staging = gemm.empty(partition.total, width)
        counters, targets = kernels.counters.next(launcher.tiles_per_word(rows, gemm))
        slot, epoch = kernels.slots.at(context.region)
        own_rows = launcher.own_rows(rows, gemm, out, slot, epoch) if out.shape[0] else None
        allocated = caller.record()  # before the kernel: sends follow its counters, not its end
        if launcher.interpreted and not context.config.use_ce and context.channel is not None:
            caller.wait(context.channel.comm_stream.record())  # an open gather's copies are such kernels, too
        if rows.others:
            # Both launches are prepared by now: nothing is compiled or loaded between them, while streams wait.
            exchange.run(caller, launcher.partial_rows(rows, gemm, staging, counters), "gemm", 1)

        def until_computed(stream: Stream, transfer: Transfer) -> None:
            word = counter_word(transfer)
            stream.wait_counter(counters, word, targets[word])
            if word == last_word[transfer.destination]:
                exchange.announce_computed(transfer)

        for step in exchange.steps:
            exchange.send(step, staging, 0, allocated, until_computed)
        if launcher.interpreted and not context.config.use_ce:
            caller.wait(exchange.sent())
        exchange.wait_computed(caller)
        if own_rows is not None:
            exchange.run(caller, own_rows, "gemm", 0)


def _one_launch(context: OperationContext, direction: Literal["gather", "scatter"]) -> bool:
    # Copy programs were asked for: then these do the copying.
    return context.config.use_ce and choose_form(direction, context.partition.total) == "one_launch"


def _kernels(context: OperationContext, reserve: int = 0) -> _Kernels:
    """Raises BackendUnavailableError, before any rank waits, where the method cannot run."""
    channel, config = context.channel, context.config
    assert channel is not None, "R = 1 is sequential"
    # Copy programs need multiprocessors that no spinning kernel holds; the copy engine needs none.
    reserve = reserve if config.use_ce else config.num_sm
    lends = reserve > 0 and config.use_ce
    if channel.shares_gpu:
        reserve, lends = max(reserve, _SHARED_GPU_PROGRAMS), False
    return channel.resource(f"fused/{reserve}/{lends}", partial(_make_kernels, context, channel, reserve, lends))


def require_runnable(context: OperationContext) -> None:
    """Raise BackendUnavailableError, with what is missing, where the method cannot run."""
    channel = context.channel
    assert channel is not None, "R = 1 is sequential"
    if not channel.backend.one_sided:
        raise BackendUnavailableError(
            f"{context.name}: method 'fused' waits for flags in mapped peer memory, which backend "
            f"{channel.backend.name!r} does not have; use method 'ring_exchange'"
        )
    require_kernels(channel.device, f"{context.name}: method 'fused'")


def _make_kernels(context: OperationContext, channel: Channel, reserve: int, lends: bool) -> _Kernels:
    require_runnable(context)
    launcher = GemmLauncher(channel.device, kernel_limit_s(channel), reserve, lends=lends)
    waits = "a kernel of method 'fused' waited more than {limit} s for rows of a peer"
    watch_kernels(channel, launcher.error, waits)
    return _Kernels(launcher, PieceCounters(channel.device, channel.tp_size), Slots(channel))


@lru_cache(maxsize=1024)
def _piece_rows(rows: int, width: int, itemsize: int, table: tuple[tuple[int | None, int], ...]) -> int:
    """Most rows of a piece, where ``rows`` is the largest shard's: the same on every rank, because it is computed from
    what they agree on.
    """
    chunk_bytes = rows * width * itemsize
    pieces = next(count for below, count in table if below is None or chunk_bytes < below)
    return max(1, -(-rows // (pieces * _PIECE_ROWS)) * _PIECE_ROWS)
