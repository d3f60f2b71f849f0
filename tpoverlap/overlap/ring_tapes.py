"""Tapes of ring operations: what `tpoverlap.overlap.quick_ring` calls in turn, written down for one slot.

====================  ==========================================================================================
registers             what they hold
====================  ==========================================================================================
0 to 6                `tpoverlap.comm.quick_ring.QuickRing.numbers`
all-gather: 7         own rows; from 8 on `RowGemm.operands`
reduce-scatter: 7, 8  the partial sums, the result; from 9 on `PartialGemm.operands`
====================  ==========================================================================================
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from tpoverlap.comm.quick_ring import QuickRing, Turn
from tpoverlap.gemm import PartialGemm, RowGemm
from tpoverlap.native import Tape, register
from tpoverlap.overlap.tapes import RESULT, SOURCE, TapeMaker

if TYPE_CHECKING:
    from tpoverlap.overlap.quick_ring import RingGather, RingScatter

GatherTapes = tuple[Tape, Tape | None]
"""Everything; or, for gathered rows that are read, what comes before the reader and what comes after it."""
ScatterTapes = tuple[Tape, Tape | None]
"""Everything; or what comes before the sum of the blocks and what comes after it."""
MoveTapes = tuple[Tape, Tape, Tape]
"""Of an operation that runs beside something else: the start, with the source in register 7; what comes before the
reader, with the source in register 0; the end."""


def write_gather(
    plan: RingGather, turn: Turn, x_shard_t: torch.Tensor, gemm: RowGemm, reads: bool, maker: TapeMaker
) -> GatherTapes | None:
    """None: a product is not one of cublasLt's."""
    if maker.products is None or not maker.has_room(SOURCE + 1, gemm):
        return None
    recording = maker.recording()
    ring, region, epoch = plan.ring.recorder(recording), plan.ring.region, turn[1]
    write = partial(maker.products.record, recording, turn[0].handle)
    own, operands = register(SOURCE), SOURCE + 1
    recording.patch(turn[3].sheet.patches)
    ring.push_from(turn, own)
    if not gemm.record(write, x_shard_t, own, plan.own_start, operands):
        return None
    if reads:
        ring.copy_own_from(turn, own)
    for group, chunk in enumerate(plan.chunks):
        ring.wait(turn, group)
        if chunk is not None:
            first, shape, start = chunk
            rows = region.view(ring.rank, epoch, first, shape, ring.dtype)
            if not gemm.record(write, rows, rows.data_ptr(), start, operands):
                return None
    if reads:
        ring.wait_own(turn)
    before, num_registers = recording, operands + gemm.num_operands
    if reads:
        recording = maker.recording()
        ring = plan.ring.recorder(recording)
    ring.finish(turn)
    whole = maker.tape(before, num_registers)
    return whole, maker.tape(recording, 0) if reads else None


def write_scatter(
    plan: RingScatter, turn: Turn, gemm: PartialGemm, summand: torch.Tensor, out: torch.Tensor, maker: TapeMaker
) -> ScatterTapes | None:
    """None: a product is not one of cublasLt's."""
    if maker.products is None:
        return None
    recording = maker.recording()
    ring = plan.ring.recorder(recording)
    write = partial(maker.products.record, recording, turn[0].handle)
    row_bytes, operands = summand.shape[1] * summand.element_size(), RESULT + 1
    recording.patch(turn[3].sheet.patches)
    if turn[3].sheet.start is not None:
        ring.start(turn)
    for number, (start, stop) in enumerate(plan.rows):
        target = register(SOURCE, start * row_bytes)
        if start < stop and not gemm.record(write, (start, stop), summand[start:stop], target, operands):
            return None
        ring.send(turn, number, register(SOURCE))
    num_registers = operands + gemm.num_operands
    if ring.form.waits == "piece":
        for group, pieces in enumerate(plan.pieces):
            ring.wait(turn, group)
            for first, start, stop in pieces:
                received = ring.region.view(ring.rank, turn[1], first, (stop - start, out.shape[1]), ring.dtype)
                begin = start - plan.own.start
                result, target = out[begin : stop - plan.own.start], register(RESULT, begin * row_bytes)
                if not gemm.record(write, (start, stop), result, target, operands, received, owned=True):
                    return None
        ring.finish(turn)
        return maker.tape(recording, num_registers), None
    own = plan.own
    target = register(SOURCE, own.start * row_bytes)
    if own.start < own.stop and not gemm.record(
        write, (own.start, own.stop), summand[own], target, operands, owned=True
    ):
        return None
    ring.wait(turn, 0)
    after = maker.recording()
    plan.ring.recorder(after).finish(turn)
    return maker.tape(recording, num_registers), maker.tape(after, 0)


def write_moves(ring: QuickRing, turn: Turn, maker: TapeMaker) -> MoveTapes:
    """Without products, so any device's turn will do."""
    recordings = [maker.recording() for _ in range(3)]
    start, waits, end = (ring.recorder(recording) for recording in recordings)
    recordings[0].patch(turn[3].sheet.patches)
    start.push_from(turn, register(SOURCE))
    if ring.form.own:
        waits.copy_own_from(turn, register(0))
    waits.wait_all(turn)
    end.finish(turn)
    first, second, third = recordings
    return maker.tape(first, SOURCE + 1), maker.tape(second, 1), maker.tape(third, 0)
