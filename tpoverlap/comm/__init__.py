"""HOW ROWS MOVE: schedules, flags and credits, streams, exchanges, the watchdog. Knows no GEMM."""

from tpoverlap.comm.channel import Channel
from tpoverlap.comm.collectives import all_gather_rows, reduce_scatter_rows
from tpoverlap.comm.copier import Copier, CopyJob, EngineCopier
from tpoverlap.comm.exchange import ArrivalWords, Exchange, OneSidedExchange
from tpoverlap.comm.meter import Meter
from tpoverlap.comm.outline import Order, Outline
from tpoverlap.comm.reduce import sum_in_rank_order
from tpoverlap.comm.schedule import (
    Step,
    Transfer,
    all_gather_schedule,
    in_pieces,
    pipeline_schedule,
    reduce_scatter_schedule,
)
from tpoverlap.comm.trace import Call, Mark, Trace
from tpoverlap.comm.trader import Trader

__all__ = [
    "ArrivalWords",
    "Call",
    "Channel",
    "Copier",
    "CopyJob",
    "EngineCopier",
    "Exchange",
    "Mark",
    "Meter",
    "OneSidedExchange",
    "Order",
    "Outline",
    "Step",
    "Trace",
    "Trader",
    "Transfer",
    "all_gather_rows",
    "all_gather_schedule",
    "in_pieces",
    "pipeline_schedule",
    "reduce_scatter_rows",
    "reduce_scatter_schedule",
    "sum_in_rank_order",
]
