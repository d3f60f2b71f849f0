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

from tpoverlap.comm import Exchange
from tpoverlap.gemm import PartialGemm, RowGemm
from tpoverlap.overlap.context import OperationContext
from tpoverlap.overlap.scatter import reduce_blocks

ReadGathered = Callable[[torch.Tensor], None]


def all_gather(
    context: OperationContext, x_shard_t: torch.Tensor, gemm: RowGemm, read_gathered: ReadGathered | None
) -> None:
    """Own chunk first, then chunk by chunk as they arrive. See `tpoverlap.overlap.registry.gather_then_gemm`."""
    own, width = context.own_rows, context.width
    with context.open_gather() as exchange:
        whole = exchange.view(0, (context.partition.total, width))
        needs_own_copy = read_gathered is not None or context.config.aggregate or exchange.hands_out_slot
        for step in exchange.steps:
            exchange.send(step, x_shard_t, own.start)
        if needs_own_copy:
            exchange.copy_own(x_shard_t, own.start * width)
        if context.config.aggregate:
            _gemm_on_pairs(exchange, whole, gemm)
        else:
            exchange.run(exchange.caller, lambda: gemm.rows(x_shard_t, own.start), "gemm", 0)
            for step in exchange.steps:
                exchange.wait(step, exchange.caller)
                rows = context.partition.rows(step.peer)
                chunk = whole[rows]
                exchange.run(exchange.caller, partial(gemm.rows, chunk, rows.start), "gemm", step.number)
        if needs_own_copy:
            exchange.wait_own(exchange.caller)
        if read_gathered is not None:
            exchange.run(exchange.caller, lambda: read_gathered(whole), "read")


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
    partition, own = context.partition, context.own_rows
    with context.open_scatter() as exchange:
        summand = gemm.empty(partition.total, context.width)
        for step in exchange.steps:
            # step s receives from r - s and sends to r + s
            rows = partition.rows((context.rank + step.number) % partition.tp_size)
            exchange.run(
                exchange.caller,
                partial(gemm.rows, rows.start, rows.stop, summand[rows]),
                "gemm",
                step.number,
            )
            exchange.send(step, summand, 0, exchange.caller.record())
        exchange.run(exchange.caller, lambda: gemm.rows(own.start, own.stop, summand[own], owned=True), "gemm", 0)
        for step in exchange.steps:
            exchange.wait(step, exchange.caller)
        reduce_blocks(exchange, summand[own], out, context.packed_format)
