"""Methods by name: the one place that maps a dispatched method to its code. A new method is a file and a row here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import MappingProxyType

import torch

from tpoverlap.gemm import PartialGemm, RowGemm
from tpoverlap.overlap import bulk, fused, pipeline, quick_bulk, ring_exchange, sequential
from tpoverlap.overlap.context import OperationContext
from tpoverlap.overlap.quick_bulk import QuickGather
from tpoverlap.overlap.trade_tapes import OpenTrade

Work = Callable[[], object]
ReadGathered = Callable[[torch.Tensor], None]

GATHER_METHODS = MappingProxyType(
    {
        "ring_exchange": ring_exchange.all_gather,
        "fused": fused.all_gather,
        "sequential": sequential.all_gather,
    }
)
SCATTER_METHODS = MappingProxyType(
    {
        "ring_exchange": ring_exchange.reduce_scatter,
        "pipeline": pipeline.reduce_scatter,
        "fused": fused.reduce_scatter,
        "sequential": sequential.reduce_scatter,
    }
)
BESIDE_METHODS = ("bulk", "sequential")


def gather_then_gemm(
    context: OperationContext, x_shard_t: torch.Tensor, gemm: RowGemm, read_gathered: ReadGathered | None = None
) -> None:
    """All-gather + GEMM.

    Args:
        x_shard_t: [T_r, H], contiguous.
        gemm: computes rows of the outputs from rows of the gathered activation.
        read_gathered: also called with the gathered [T, H]; what it gets may be a view that is overwritten later.
    """
    channel = context.channel
    if channel is None or not channel.ranges:
        GATHER_METHODS[context.method](context, x_shard_t, gemm, read_gathered)
        return
    with context.nvtx_range("all-gather"):
        GATHER_METHODS[context.method](context, x_shard_t, gemm, read_gathered)


def gemm_then_scatter(context: OperationContext, gemm: PartialGemm, out: torch.Tensor) -> None:
    """GEMM + reduce-scatter into ``out`` [T_r, N]."""
    channel = context.channel
    if channel is None or not channel.ranges:
        SCATTER_METHODS[context.method](context, gemm, out)
        return
    with context.nvtx_range("reduce-scatter"):
        SCATTER_METHODS[context.method](context, gemm, out)


def gather_beside(context: OperationContext, x_shard_t: torch.Tensor, work: Work, read_gathered: ReadGathered) -> None:
    """All-gather of [T_r, H] beside ``work``, a GEMM that does not depend on it."""
    channel = context.channel
    if channel is not None and not channel.ranges:
        quickly = sequential.gather_quickly if context.method == "sequential" else quick_bulk.gather_beside
        if quickly(context, x_shard_t, work, read_gathered):
            return
        opened = _gather(context, x_shard_t, quickly=False)
    else:
        opened = open_gather(context, x_shard_t)
    with opened as gather:
        gather.run_beside(work)
        gather.read(read_gathered)


def scatter_beside(context: OperationContext, partial: torch.Tensor, work: Work, out: torch.Tensor) -> None:
    """Reduce-scatter of ``partial`` [T, H] into ``out`` [T_r, H] beside ``work``."""
    channel = context.channel
    if channel is None or not channel.ranges:
        _scatter_beside(context, partial, work, out)
        return
    with context.nvtx_range("reduce-scatter"):
        _scatter_beside(context, partial, work, out)


def _scatter_beside(context: OperationContext, partial: torch.Tensor, work: Work, out: torch.Tensor) -> None:
    if context.method == "bulk":
        bulk.reduce_scatter(context, partial, work, out)
    else:
        work()
        sequential.scatter(context, partial, out)


class _DoneGather:
    """A gather that has finished before anything runs beside it."""

    def __init__(self, context: OperationContext, x_shard_t: torch.Tensor) -> None:
        self._gathered = sequential.gather_plainly(context, x_shard_t)

    def __enter__(self) -> _DoneGather:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def run_beside(self, work: Work) -> None:
        work()

    def read(self, read_gathered: ReadGathered) -> None:
        read_gathered(self._gathered)


Gather = bulk.PendingGather | QuickGather | OpenTrade | _DoneGather


def open_gather(context: OperationContext, x_shard_t: torch.Tensor) -> AbstractContextManager[Gather]:
    """An all-gather under way: run other operations inside the block, then ``read`` the gathered [T, H]."""
    channel = context.channel
    if channel is None or not channel.ranges:
        return _gather(context, x_shard_t)
    return _named_gather(context, x_shard_t)


@contextmanager
def _named_gather(context: OperationContext, x_shard_t: torch.Tensor) -> Iterator[Gather]:
    with context.nvtx_range("all-gather"), _gather(context, x_shard_t) as gather:
        yield gather


def _gather(
    context: OperationContext, x_shard_t: torch.Tensor, *, quickly: bool = True
) -> AbstractContextManager[Gather]:
    if context.method == "sequential" and not context.uses_buffers:
        return _DoneGather(context, x_shard_t)
    return bulk.PendingGather(context, x_shard_t, quickly=quickly)
