"""The end that every reduce-scatter of rows shares: own partial sum and the peers' blocks, added in rank order."""

from __future__ import annotations

from functools import partial

import torch

from tpoverlap.comm import Exchange, sum_in_rank_order


def reduce_blocks(exchange: Exchange, own_partial: torch.Tensor, out: torch.Tensor) -> None:
    """``out`` [T_r, N] = sum over ranks, on the caller's stream.

    Args:
        exchange: all its steps have been waited for; its slot holds one [T_r, N] block a peer, in rank order.
        own_partial: [T_r, N], this rank's own contribution.
    """
    count, width = out.shape
    if count == 0:
        return
    received = exchange.view(0, (exchange.tp_size - 1, count, width)).unbind(0)
    blocks = [*received[: exchange.rank], own_partial, *received[exchange.rank :]]
    exchange.run(exchange.caller, partial(sum_in_rank_order, blocks, out), "reduce")
