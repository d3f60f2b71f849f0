"""sequential: the collective, then the GEMM (or the other way round). The twin that every method is tested against.

It needs no registered buffer, so it also runs a T above the capacity. The ranks still compare descriptors first:
otherwise ranks that disagree on T would hang, or worse, inside the collective.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from tpoverlap.comm import all_gather_rows, reduce_scatter_rows
from tpoverlap.gemm import PartialGemm, RowGemm
from tpoverlap.overlap.context import OperationContext

Work = Callable[[], object]
ReadGathered = Callable[[torch.Tensor], None]


def gather(context: OperationContext, x_shard_t: torch.Tensor) -> torch.Tensor:
    """[T_r, H] -> [T, H]: an ordinary tensor."""
    channel, partition = context.channel, context.partition
    if channel is None:
        return all_gather_rows(x_shard_t, partition, context.group)
    with channel.announced(context.label("all-gather"), partition, context.dtype) as descriptor:
        finish = functools.partial(channel.finish_collective, descriptor)
        return all_gather_rows(x_shard_t, partition, context.group, finish)


def scatter(context: OperationContext, summands: torch.Tensor, out: torch.Tensor) -> None:
    """[T, N] partial sums -> ``out`` [T_r, N]."""
    channel, partition = context.channel, context.partition
    if channel is None:
        reduce_scatter_rows(summands, partition, context.group, out)
        return
    with channel.announced(context.label("reduce-scatter"), partition, context.dtype) as descriptor:
        finish = functools.partial(channel.finish_collective, descriptor)
        reduce_scatter_rows(summands, partition, context.group, out, finish)


def all_gather(
    context: OperationContext, x_shard_t: torch.Tensor, gemm: RowGemm, read_gathered: ReadGathered | None
) -> None:
    """See `tpoverlap.overlap.registry.gather_then_gemm`."""
    gathered = gather(context, x_shard_t)
    gemm.rows(gathered, 0)
    if read_gathered is not None:
        read_gathered(gathered)


def reduce_scatter(context: OperationContext, gemm: PartialGemm, out: torch.Tensor) -> None:
    """See `tpoverlap.overlap.registry.gemm_then_scatter`."""
    summands = gemm.empty(context.partition.total, gemm.width)
    gemm.rows(0, context.partition.total, summands)
    if gemm.bias is not None:
        summands[context.own_rows].add_(gemm.bias)
    scatter(context, summands, out)
