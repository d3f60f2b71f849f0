"""A few numbers a row, exchanged between ranks on the plain collectives, but announced like every other operation."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from tpoverlap.comm import Outline, all_gather_rows
from tpoverlap.tokens import TokenPartition

if TYPE_CHECKING:
    from tpoverlap.manager import UserBufferManager


def gather_statistics(manager: UserBufferManager, what: str, own: torch.Tensor, detail: int) -> torch.Tensor:
    """[n, T] float32 of each rank -> [R, n, T], in rank order.

    The ranks compare T and ``detail`` first: those that disagree get RankMismatchError, as in every operation.
    """
    if manager.channel is None:
        return own[None]
    size, count = manager.tp_size, own.shape[0]
    rows = TokenPartition.from_counts([count] * size)
    tokens = TokenPartition.balanced(own.shape[1], size)
    with manager.channel.announced(Outline(f"cross entropy {what}", tokens, own.dtype, detail)) as descriptor:
        finish = partial(manager.channel.finish_collective, descriptor)
        gathered = all_gather_rows(own.contiguous(), rows, manager.group, finish)
    return gathered.view(size, count, own.shape[1])
