"""The one-launch form of `fused`, for few tokens: the GEMM's own programs move the rows.

::

    all-gather, rank r:      caller | credits? | one kernel: some programs push own rows, others multiply them |
                                                 r+1's rows as they arrive | ...                 | same operation? |

    reduce-scatter, rank r:  caller | credits? | one kernel: r+1's rows, into its slot | ... | own rows + what arrived |
                                                                                                 | same operation? |

Deadlock: programs that push (or compute a peer's rows) wait for nothing, and the GPU starts them first. A program waits
only for what such programs of the peers send; and programs that wait leave `RESERVED_PROGRAMS` multiprocessors free, so
that another library's kernel, which a peer's kernel may be queued behind, finds room here. Where every program has one
tile at most, those that wait for nobody may use these, too: they end, and then there is room.

The kernel may read rows of an operation that is not the same one; what it made of them goes nowhere: the descriptors
are compared before the caller's stream goes on, and an unequal one stops it (docs/protocol.md).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import torch

from tpoverlap.comm import Channel, Copier, CopyJob, OneSidedExchange
from tpoverlap.comm.device_exchange import DeviceExchange
from tpoverlap.comm.device_streams import CallerDeviceStream
from tpoverlap.comm.quick_ring import QuickRing, Turn
from tpoverlap.comm.signals import Signals
from tpoverlap.comm.streams import Stream
from tpoverlap.comm.word_sheet import EPOCH, NUM_REGISTERS
from tpoverlap.gemm import PartialGemm, RowGemm
from tpoverlap.gemm.triton.launcher import GemmLauncher, Launch
from tpoverlap.native import Tape, register
from tpoverlap.overlap.context import OperationContext
from tpoverlap.overlap.fused_blocks import Slots, gather_rows, scatter_rows
from tpoverlap.overlap.quick_ring import launch_ring
from tpoverlap.overlap.tapes import Kinds, TapeMaker, kinds_of

RESERVED_PROGRAMS: Final = 16
_PIECE_ROWS: Final = 128
"""Rows that one flag stands for: as many as the largest tile has."""


View = Callable[[int, tuple[int, ...]], torch.Tensor]
"""(first element, shape) of a part of the local slot."""


class InKernel(Copier):
    """Moves nothing: the kernel does. What is left of a send is the wait for the peer's credit."""

    def push(self, signals: Signals, stream: Stream, job: CopyJob) -> None:
        pass


_IN_KERNEL: Final = InKernel()


def all_gather(
    context: OperationContext, launcher: GemmLauncher, slots: Slots, x_shard_t: torch.Tensor, gemm: RowGemm
) -> None:
    """Nobody else reads the gathered rows, and there is at least one matrix."""
    width = context.width
    rows = gather_rows(context.partition.counts, width, context.rank, _PIECE_ROWS)

    def prepared(view: View) -> list[Launch]:
        slot, epoch = slots.at(context.region)
        pushes = bool(rows.pushes)
        launches: list[Launch] = []
        for number, (matrix, bias, out, scaling) in enumerate(
            zip(gemm.matrices, gemm.biases, gemm.outs, gemm.scalings, strict=True)
        ):
            launches.append(
                launcher.gathered_rows(
                    rows, x_shard_t, slot, view, matrix, bias, out, epoch, pushes=pushes, number=number, scaling=scaling
                )
            )
            pushes = False  # the first kernel's programs send; those of the others find the flags set
        return launches

    if _quickly(context, prepared, scatter=False):
        return
    with context.open_gather(order="at_once") as exchange:
        assert isinstance(exchange, OneSidedExchange), "checked before"
        launches = prepared(exchange.view)
        if not _credits_on_the_callers_stream(exchange, context.channel):
            _wait_for_credits(exchange, x_shard_t, rows.own.start, launcher)
        if exchange.hands_out_slot:
            exchange.copy_own(x_shard_t, rows.own.start * width)
        for number, launch in enumerate(launches):
            exchange.run(exchange.caller, launch, "gemm", number)
        exchange.wait_own(exchange.caller)


def reduce_scatter(
    context: OperationContext, launcher: GemmLauncher, slots: Slots, gemm: PartialGemm, out: torch.Tensor
) -> None:
    """See `registry.gemm_then_scatter`."""
    rows = scatter_rows(context.partition.counts, context.width, context.rank, _PIECE_ROWS)

    def prepared(view: View) -> list[Launch]:
        slot, epoch = slots.at(context.region)
        return [launcher.scatter_rows(rows, gemm, out, slot, epoch)]

    if _quickly(context, prepared, scatter=True):
        return
    with context.open_scatter(order="at_once") as exchange:
        assert isinstance(exchange, OneSidedExchange), "checked before"
        (launch,) = prepared(exchange.view)
        if not _credits_on_the_callers_stream(exchange, context.channel):
            _wait_for_credits(exchange, out[:0], 0, launcher)
        exchange.run(exchange.caller, launch, "gemm", 0)


def _quickly(context: OperationContext, prepared: Callable[[View], list[Launch]], *, scatter: bool) -> bool:
    """The same in few calls of Python. False: it is out of the ordinary, and nothing was done."""
    ring, plans = launch_ring(context, scatter=scatter), context.plans
    if "launch tapes" not in plans:
        plans["launch tapes"] = kinds_of(context.channel)  # before the operation: the first one compiles
    turn = None if ring is None else ring.open()
    if ring is None or turn is None:
        return False
    try:
        region, rank, epoch, dtype = ring.region, ring.rank, turn[1], ring.dtype
        launches = prepared(lambda first, shape: region.view(rank, epoch, first, shape, dtype))
        if not _play(context, ring, turn, launches):
            ring.fill(turn)
            ring.start(turn)
            for launch in launches:
                launch()
            ring.wait_all(turn)  # nobody uses what was made of another operation's rows
            ring.finish(turn)
        ring.land(turn)
    except BaseException as error:
        ring.fail(error, turn)
        raise
    finally:
        ring.leave()
    return True


def _play(context: OperationContext, ring: QuickRing, turn: Turn, launches: list[Launch]) -> bool:
    """By tape. False: nothing was done."""
    kinds: Kinds | None = context.plans["launch tapes"]
    if kinds is None or ring.is_far_ahead(turn):
        return False
    key = turn[1] % ring.region.depth, turn[0].handle, tuple([id(launch.prepared) for launch in launches])
    tape: Tape | None = kinds.get(key)
    if tape is None:
        tape = kinds.new(key, partial(_write, ring, turn, launches))
    if tape is None:
        return False
    for launch in launches:
        launch.place()
    tape.play(*ring.numbers(turn))
    return True


def _write(ring: QuickRing, turn: Turn, launches: list[Launch], maker: TapeMaker) -> Tape | None:
    if len({id(launch.prepared) for launch in launches}) < len(launches):
        return None  # `place` of one would move the other's addresses, too
    recording = maker.recording()
    recorder = ring.recorder(recording)
    recording.patch(turn[3].sheet.patches)
    recorder.start(turn)
    for launch in launches:
        if not launch.prepared.record(recording, register(EPOCH)):
            return None
    recorder.wait_all(turn)
    recorder.finish(turn)
    return maker.tape(recording, NUM_REGISTERS)


def _credits_on_the_callers_stream(exchange: OneSidedExchange, channel: Channel | None) -> bool:
    """Let the stream that launches the kernel wait for the credits; False: it cannot, or somebody counts transfers."""
    if not isinstance(exchange, DeviceExchange) or type(exchange.caller) is not CallerDeviceStream:
        return False
    if channel is None or channel.before_copy is not None:
        return False
    exchange.collect_credit_waits()
    exchange.caller.flush()
    return True


def _wait_for_credits(exchange: OneSidedExchange, source: torch.Tensor, base_row: int, launcher: GemmLauncher) -> None:
    """By way of the comm stream, as if the rows were sent there."""
    exchange.copier = _IN_KERNEL
    for step in exchange.steps:
        exchange.send(step, source, base_row)
    if launcher.interpreted:  # an error is raised at once, not after the kernel has given up
        exchange.wait_entered(exchange.caller)
    exchange.caller.wait(exchange.sent())
