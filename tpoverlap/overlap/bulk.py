"""bulk: a whole collective beside a GEMM that does not depend on it.

By copy engine: rows are pushed while the GEMM has every multiprocessor to itself.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

import torch

from tpoverlap.comm import Exchange
from tpoverlap.overlap import quick_bulk, sequential
from tpoverlap.overlap.context import OperationContext
from tpoverlap.overlap.quick_bulk import QuickGather
from tpoverlap.overlap.scatter import reduce_blocks
from tpoverlap.overlap.trade_tapes import OpenTrade

Work = Callable[[], object]
ReadGathered = Callable[[torch.Tensor], None]


class PendingGather:
    """An all-gather under way; other operations may run between `start` and `read`.

    Use as a context manager; leaving it finishes the operation. Not ``quickly``: that it cannot is known already.
    """

    def __init__(self, context: OperationContext, x_shard_t: torch.Tensor, *, quickly: bool = True) -> None:
        self._context, self._quickly = context, quickly
        self._x_shard_t = x_shard_t
        self._waited = False
        self._quick: QuickGather | OpenTrade | None = None  # does all of it, if it can

    def __enter__(self) -> PendingGather | QuickGather | OpenTrade:
        context = self._context
        at_once = context.method == "sequential"
        if self._quickly:
            open_quickly = sequential.open_quickly if at_once else quick_bulk.open_gather
            self._quick = open_quickly(context, self._x_shard_t)
            if self._quick is not None:
                return self._quick
        exchange = self._exchange = context.open_trade(scatter=False) if at_once else context.open_gather()
        exchange.__enter__()
        try:
            self._send(exchange, at_once)
        except BaseException as error:  # the block is not entered, so nobody else ends the operation
            exchange.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def _send(self, exchange: Exchange, at_once: bool) -> None:
        own, x_shard_t = self._context.own_rows, self._x_shard_t
        own_element = own.start * self._context.width
        if at_once:
            exchange.trade(x_shard_t, own.start, own_element)
            self._waited = True
            return
        for step in exchange.steps:
            exchange.send(step, x_shard_t, own.start)
        exchange.copy_own(x_shard_t, own_element)

    def wait(self) -> None:
        """The caller's stream goes on once everything is here; it is, from the start, if the method is sequential."""
        if self._waited:
            return
        for step in self._exchange.steps:
            self._exchange.wait(step, self._exchange.caller)
        self._exchange.wait_own(self._exchange.caller)
        self._waited = True

    def run_beside(self, work: Work) -> None:
        """An independent GEMM, on the caller's stream."""
        self._exchange.run(self._exchange.caller, work, "gemm", 0)

    def read(self, read_gathered: ReadGathered) -> None:
        """Call ``read_gathered`` with the gathered [T, H]: a view of the slot, not valid after leaving."""
        exchange = self._exchange
        self.wait()
        whole = exchange.view(0, (self._context.partition.total, self._context.width))
        exchange.run(exchange.caller, lambda: read_gathered(whole), "read")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._quick is not None:
            self._quick.close(error)
            return
        self._exchange.__exit__(kind, error, trace)


def all_gather(context: OperationContext, x_shard_t: torch.Tensor, work: Work, read_gathered: ReadGathered) -> None:
    """Gather ``x_shard_t`` beside ``work``. See `tpoverlap.overlap.registry.gather_beside`."""
    with PendingGather(context, x_shard_t) as gather:
        gather.run_beside(work)
        gather.read(read_gathered)


def reduce_scatter(context: OperationContext, partial: torch.Tensor, work: Work, out: torch.Tensor) -> None:
    """Reduce-scatter ``partial`` [T, H] beside ``work``. See `tpoverlap.overlap.registry.scatter_beside`."""
    if quick_bulk.scatter_beside(context, partial, work, out):
        return
    with context.open_scatter() as exchange:
        for step in exchange.steps:
            exchange.send(step, partial, 0)
        exchange.run(exchange.caller, work, "gemm", 0)
        for step in exchange.steps:
            exchange.wait(step, exchange.caller)
        reduce_blocks(exchange, partial[context.own_rows], out)
