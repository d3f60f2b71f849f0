"""pipeline: the GEMM cut along its output features in ``num_splits`` pieces, each scattered while the next computes.

The cut is along N, so it does not depend on T. Pieces go round ``num_max_streams`` compute streams.
"""

from __future__ import annotations

from functools import partial

import torch

from tpoverlap.comm import Exchange
from tpoverlap.comm.schedule import column_splits
from tpoverlap.gemm import PartialGemm
from tpoverlap.overlap.context import OperationContext
from tpoverlap.overlap.scatter import sum_blocks


def reduce_scatter(context: OperationContext, gemm: PartialGemm, out: torch.Tensor) -> None:
    """Column piece by column piece. See `tpoverlap.overlap.registry.gemm_then_scatter`."""
    own = context.own_rows
    columns = column_splits(context.width, context.config.num_splits, context.column_granule)
    with context.open_scatter() as exchange:
        streams = exchange.compute_streams[: context.config.num_max_streams] or [exchange.caller]
        begin = exchange.caller.record()
        summands = [gemm.empty(context.partition.total, stop - start) for start, stop in columns]
        for step, (start, stop), summand in zip(exchange.steps, columns, summands, strict=True):
            stream = streams[step.number % len(streams)]
            if stream is not exchange.caller:
                stream.wait(begin)
            exchange.run(
                stream,
                partial(gemm.columns, start, stop, summand, own),
                "gemm",
                step.number,
            )
            exchange.send(step, summand, 0, stream.record())
        for stream in streams:
            if stream is not exchange.caller:
                exchange.caller.wait(stream.record())
        first_column = 0  # in the slot, where a row may be wider than its columns
        for step, (start, stop), summand in zip(exchange.steps, columns, summands, strict=True):
            exchange.wait(step, exchange.caller)
            _reduce_columns(exchange, first_column, summand[own], out[:, start:stop], context.packed_format)
            first_column += summand.shape[1]


def _reduce_columns(
    exchange: Exchange,
    first_column: int,
    own_partial: torch.Tensor,
    out: torch.Tensor,
    packed_format: torch.dtype | None,
) -> None:
    count, width = own_partial.shape
    peers = exchange.tp_size - 1
    if count == 0:
        return
    received = exchange.view(count * peers * first_column, (peers, count, width)).unbind(0)
    blocks = [*received[: exchange.rank], own_partial, *received[exchange.rank :]]
    exchange.run(exchange.caller, lambda: sum_blocks(blocks, out, packed_format), "reduce")
