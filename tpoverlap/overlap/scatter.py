"""The end that every reduce-scatter of rows shares: own partial sum and the peers' blocks, added in rank order."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from tpoverlap.comm import Exchange, sum_in_rank_order
from tpoverlap.gemm.fp8 import unpack_rows


def reduce_blocks(
    exchange: Exchange, own_partial: torch.Tensor, out: torch.Tensor, packed_format: torch.dtype | None = None
) -> None:
    """``out`` [T_r, N] = sum over ranks, on the caller's stream.

    Args:
        exchange: all its steps have been waited for; its slot holds one [T_r, N] block a peer, in rank order.
        own_partial: [T_r, N], this rank's own contribution.
        packed_format: blocks and own contribution are FP8 rows of this dtype, made by `pack_rows`; None: plain rows.
    """
    count, width = own_partial.shape
    if count == 0:
        return
    received = exchange.view(0, (exchange.tp_size - 1, count, width)).unbind(0)
    blocks = [*received[: exchange.rank], own_partial, *received[exchange.rank :]]
    exchange.run(exchange.caller, partial(sum_blocks, blocks, out, packed_format), "reduce")


def sum_blocks(blocks: Sequence[torch.Tensor], out: torch.Tensor, packed_format: torch.dtype | None) -> None:
    """`sum_in_rank_order` of plain or packed blocks."""
    if packed_format is not None:
        blocks = [unpack_rows(block, packed_format) for block in blocks]
    sum_in_rank_order(blocks, out)
