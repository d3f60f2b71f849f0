"""sequential: the collective, then the GEMM (or the other way round). The twin that every method is tested against.

It needs no registered buffer, so it also runs a T above the capacity. The ranks still compare descriptors first:
otherwise ranks that disagree on T would hang, or worse, inside the collective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from tpoverlap.comm import Channel, all_gather_rows, reduce_scatter_rows
from tpoverlap.comm.collectives import FinishWork, wait_for_work
from tpoverlap.gemm import PartialGemm, RowGemm
from tpoverlap.overlap.context import OperationContext

Work = Callable[[], object]
ReadGathered = Callable[[torch.Tensor], None]


@contextmanager
def _announced(context: OperationContext, direction: str) -> Iterator[FinishWork]:
    channel = context.channel
    if channel is None:
        yield wait_for_work
        return
    _mark(channel, "wait")
    with channel.announced(context.label(direction), context.partition, context.dtype) as descriptor:
        _mark(channel, "arrived")
        _mark(channel, "collective_begin")
        yield partial(channel.finish_collective, descriptor)
        _mark(channel, "collective_end")


def _mark(channel: Channel, what: str) -> None:
    trace = channel.trace
    if trace is not None:
        stream = channel.caller_stream()
        stream.run(lambda: trace.mark(stream, what))


def gather(context: OperationContext, x_shard_t: torch.Tensor) -> torch.Tensor:
    """[T_r, H] -> [T, H]: an ordinary tensor."""
    with _announced(context, "all-gather") as finish:
        return all_gather_rows(x_shard_t, context.partition, context.group, finish)


def scatter(context: OperationContext, summands: torch.Tensor, out: torch.Tensor) -> None:
    """[T, N] partial sums -> ``out`` [T_r, N]."""
    with _announced(context, "reduce-scatter") as finish:
        reduce_scatter_rows(summands, context.partition, context.group, out, finish)


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
