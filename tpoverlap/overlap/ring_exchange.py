"""ring_exchange: GEMM on the chunk that is here while the next ones travel.

::

    all-gather, rank r:      comm   | own rows -> r-1 | own rows -> r-2 | ...
                             caller | GEMM own rows   | GEMM rows of r+1 | GEMM rows of r+2 | ...

    reduce-scatter, rank r:  caller | GEMM rows of r+1 | GEMM rows of r+2 | ... | GEMM own rows | add in rank order
                             comm                      | -> r+1           | -> r+2          ...

Every send is enqueued before the first wait, so a single hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1) works too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from tpoverlap.comm import Exchange, in_pieces
from tpoverlap.gemm import PartialGemm, RowGemm
from tpoverlap.overlap import quick_ring
from tpoverlap.overlap.context import OperationContext
from tpoverlap.overlap.scatter import reduce_blocks
from tpoverlap.pieces import gather_piece_rows, multiplies_pieces

ReadGathered = Callable[[torch.Tensor], None]


def all_gather(
    context: OperationContext, x_shard_t: torch.Tensor, gemm: RowGemm, read_gathered: ReadGathered | None
) -> None:
    """Own chunk first, then chunk by chunk as they arrive. See `tpoverlap.overlap.registry.gather_then_gemm`."""
    if quick_ring.gather(context, x_shard_t, gemm, read_gathered):
        return
    own, width, partition, config = context.own_rows, context.width, context.partition, context.config
    piece_rows = None
    if context.tells_pieces and not config.aggregate:
        piece_rows = gather_piece_rows(partition, width, context.dtype.itemsize)
    with context.open_gather(piece_rows) as exchange:
        caller, steps = exchange.caller, exchange.steps
        needs_own_copy = read_gathered is not None or config.aggregate or exchange.hands_out_slot
        for step in steps:
            exchange.send(step, x_shard_t, own.start)
        if needs_own_copy:
            exchange.copy_own(x_shard_t, own.start * width)
        if config.aggregate:
            _gemm_on_pairs(exchange, exchange.view(0, (partition.total, width)), gemm)
        else:
            exchange.run(caller, partial(gemm.rows, x_shard_t, own.start), "gemm", 0)
            if piece_rows is not None and multiplies_pieces(gemm.num_features):
                steps = tuple(piece for step in steps for piece in in_pieces(step))
            for step in steps:
                exchange.wait(step, caller)
                if step.receives:
                    start, stop = step.receives[0].row_start, step.receives[-1].row_stop
                    chunk = exchange.view(start * width, (stop - start, width))
                    exchange.run(caller, partial(gemm.rows, chunk, start), "gemm", step.number)
        if needs_own_copy:
            exchange.wait_own(caller)
        if read_gathered is not None:
            exchange.run(caller, partial(read_gathered, exchange.view(0, (partition.total, width))), "read")


def _gemm_on_pairs(exchange: Exchange, whole: torch.Tensor, gemm: RowGemm) -> None:
    """``aggregate``: one GEMM on the chunks of ranks 2i and 2i + 1 together; own pair first."""
    size, partition = exchange.tp_size, exchange.partition
    by_peer = {step.peer: step for step in exchange.steps}
    num_pairs = -(-size // 2)
    own_pair = exchange.rank // 2
    for turn in range(num_pairs):
        pair = (own_pair + turn) % num_pairs
        ranks = [rank for rank in (2 * pair, 2 * pair + 1) if rank < size]
        for rank in ranks:
            if rank == exchange.rank:
                exchange.wait_own(exchange.caller)
            else:
                exchange.wait(by_peer[rank], exchange.caller)
        start, stop = partition.rows(ranks[0]).start, partition.rows(ranks[-1]).stop
        exchange.run(exchange.caller, partial(gemm.rows, whole[start:stop], start), "gemm", turn)


def reduce_scatter(context: OperationContext, gemm: PartialGemm, out: torch.Tensor) -> None:
    """Peers' rows first, pushed as they finish; own rows last. See `registry.gemm_then_scatter`."""
    if quick_ring.scatter(context, gemm, out):
        return
    own = context.own_rows
    cut = context.scatter_cut(gemm.operand_row_bytes) if context.tells_pieces else None
    with context.open_scatter(cut, order="behind") as exchange:
        caller, steps = exchange.caller, exchange.steps
        summand = gemm.empty(context.partition.total, context.width)
        for whole_step in steps:  # step s receives from r - s and sends to r + s
            for step in in_pieces(whole_step):
                for transfer in step.sends:
                    start, stop = transfer.row_start, transfer.row_stop
                    target = summand[start:stop]
                    exchange.run(caller, partial(gemm.rows, start, stop, target), "gemm", step.number)
                exchange.send(step, summand, 0)
        if cut is not None and gemm.can_add:
            _add_own_pieces(exchange, gemm, out, own.start)
            return
        own_partial = summand[own]
        exchange.run(caller, partial(gemm.rows, own.start, own.stop, own_partial, owned=True), "gemm", 0)
        for step in steps:
            exchange.wait(step, caller)
        reduce_blocks(exchange, own_partial, out, context.packed_format)


def _add_own_pieces(exchange: Exchange, gemm: PartialGemm, out: torch.Tensor, own_start: int) -> None:
    """R = 2: each piece of own rows is computed on top of the peer's, as that arrives."""
    (whole_step,) = exchange.steps
    for step in in_pieces(whole_step):
        exchange.wait(step, exchange.caller)
        for transfer in step.receives:
            start, stop = transfer.row_start, transfer.row_stop
            received = exchange.view(transfer.slot_element, (stop - start, out.shape[1]))
            target = out[start - own_start : stop - own_start]
            exchange.run(exchange.caller, partial(gemm.rows_added, start, stop, received, target), "gemm", 0)
