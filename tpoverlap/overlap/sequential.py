"""sequential: the collective, then the GEMM (or the other way round). The twin that every method is tested against.

====================  ==============================================  ===============================================
                      through the registered buffers                  through the group's own collectives (plain)
====================  ==============================================  ===============================================
when                  peers' memory is mapped                         messages; T above the capacity; a name without
                                                                      a buffer
all-gather            every rank pushes its rows, all wait, one GEMM  all-gather, one GEMM
reduce-scatter        one GEMM, pushes, float32 sum in rank order     one GEMM, all-to-all, the same sum
ranks that disagree   meet in stream order: nothing was exchanged     meet on the host, before they enter: a collective
                                                                      of different sizes would never end
====================  ==============================================  ===============================================
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from tpoverlap.comm import Channel, all_gather_rows, reduce_scatter_rows
from tpoverlap.gemm import PartialGemm, RowGemm
from tpoverlap.overlap.context import OperationContext
from tpoverlap.overlap.scatter import reduce_blocks
from tpoverlap.overlap.tapes import Kinds, kinds_of
from tpoverlap.overlap.trade_tapes import OpenTrade, open_gather, play_add, play_gather

Work = Callable[[], object]
ReadGathered = Callable[[torch.Tensor], None]


def gather_plainly(context: OperationContext, x_shard_t: torch.Tensor) -> torch.Tensor:
    """[T_r, H] -> [T, H] by the group's own collective: an ordinary tensor."""
    channel, partition = context.channel, context.partition
    if channel is None:
        return all_gather_rows(x_shard_t, partition, context.group)
    _mark(channel, "wait")
    with channel.announced(context.plainly("all-gather")) as descriptor:
        _mark(channel, "arrived")
        _mark(channel, "collective_begin")
        finish = functools.partial(channel.finish_collective, descriptor)
        gathered = all_gather_rows(x_shard_t, partition, context.group, finish)
        _mark(channel, "collective_end")
        return gathered


def scatter(context: OperationContext, summands: torch.Tensor, out: torch.Tensor) -> None:
    """[T, N] partial sums -> ``out`` [T_r, N]."""
    channel, partition = context.channel, context.partition
    if channel is None:
        reduce_scatter_rows(summands, partition, context.group, out)
        return
    quick = context.quick_trade(scatter=True)
    if quick is not None:
        kinds = _kinds(context)
        played = None if kinds is None else functools.partial(play_add, quick, kinds, summands, None, out)
        if quick.add(summands, None, None, out, played):
            return
    if context.uses_buffers:
        _through_buffers(context, summands, None, None, out)
    else:
        _mark(channel, "wait")
        with channel.announced(context.plainly("reduce-scatter")) as descriptor:
            _mark(channel, "arrived")
            _mark(channel, "collective_begin")
            finish = functools.partial(channel.finish_collective, descriptor)
            reduce_scatter_rows(summands, partition, context.group, out, finish)
            _mark(channel, "collective_end")


def open_quickly(context: OperationContext, x_shard_t: torch.Tensor) -> OpenTrade | None:
    """See `bulk.PendingGather`. None: nothing was done."""
    quick = context.quick_trade(scatter=False)
    return None if quick is None else open_gather(quick, _kinds(context), x_shard_t)


def gather_quickly(context: OperationContext, x_shard_t: torch.Tensor, work: Work, read: ReadGathered) -> bool:
    """See `tpoverlap.overlap.registry.gather_beside`. False: nothing was done."""
    gather = open_quickly(context, x_shard_t)
    if gather is None:
        return False
    try:
        work()
        gather.read(read)
    except BaseException as error:
        gather.close(error)
        raise
    gather.close(None)
    return True


def _mark(channel: Channel, what: str) -> None:
    trace = channel.trace
    if trace is not None:
        stream = channel.caller_stream()
        stream.run(lambda: trace.mark(stream, what))


def all_gather(
    context: OperationContext, x_shard_t: torch.Tensor, gemm: RowGemm, read_gathered: ReadGathered | None
) -> None:
    """See `tpoverlap.overlap.registry.gather_then_gemm`."""
    quick = context.quick_trade(scatter=False)
    if quick is not None:
        kinds = _kinds(context)
        played = None if kinds is None else functools.partial(play_gather, quick, kinds, x_shard_t, gemm, read_gathered)
        if quick.gather(x_shard_t, gemm.rows, read_gathered, played):
            return
    if context.uses_buffers:
        own = context.own_rows
        with context.open_trade(scatter=False) as exchange:
            exchange.trade(x_shard_t, own.start, own.start * context.width)
            whole = exchange.view(0, (context.partition.total, context.width))
            exchange.run(exchange.caller, functools.partial(gemm.rows, whole, 0), "gemm", 0)
            if read_gathered is not None:
                exchange.run(exchange.caller, functools.partial(read_gathered, whole), "read")
    else:
        gathered = gather_plainly(context, x_shard_t)
        gemm.rows(gathered, 0)
        if read_gathered is not None:
            read_gathered(gathered)


def reduce_scatter(context: OperationContext, gemm: PartialGemm, out: torch.Tensor) -> None:
    """See `tpoverlap.overlap.registry.gemm_then_scatter`."""
    summands = gemm.empty(context.partition.total, gemm.width)
    quick = context.quick_trade(scatter=True)
    if quick is not None:
        kinds = _kinds(context)
        played = None if kinds is None else functools.partial(play_add, quick, kinds, summands, gemm, out)
        if quick.add(summands, gemm.rows, gemm.bias, out, played):
            return
    if context.uses_buffers:
        _through_buffers(context, summands, gemm.rows, gemm.bias, out)
    else:
        gemm.rows(0, context.partition.total, summands)
        if gemm.bias is not None:
            summands[context.own_rows].add_(gemm.bias)
        scatter(context, summands, out)


def _kinds(context: OperationContext) -> Kinds | None:
    plans = context.plans
    if "sequential tapes" not in plans:
        plans["sequential tapes"] = kinds_of(context.channel)
    found: Kinds | None = plans["sequential tapes"]
    return found


def _through_buffers(
    context: OperationContext,
    summands: torch.Tensor,
    multiply: Callable[[int, int, torch.Tensor], object] | None,
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Compute ``summands``, then send all of them, then add, ``bias`` to own rows before that."""
    with context.open_trade(scatter=True) as exchange:
        if multiply is not None:
            work = functools.partial(multiply, 0, context.partition.total, summands)
            exchange.run(exchange.caller, work, "gemm", 0)
        if exchange.trade_and_add(summands, bias, out):
            return
        own_partial = summands[context.own_rows]
        if bias is not None:
            exchange.run(exchange.caller, functools.partial(own_partial.add_, bias), "reduce")
        exchange.trade(summands, 0)
        reduce_blocks(exchange, own_partial, out)
