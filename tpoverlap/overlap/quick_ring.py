"""ring_exchange on a device in few calls of Python, where nobody looks closer (`tpoverlap.comm.quick_ring`).

What runs when is what `tpoverlap.overlap.ring_exchange` says. A function that returns False has done nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from tpoverlap.comm import sum_in_rank_order
from tpoverlap.comm.quick_ring import QuickRing, Turn
from tpoverlap.comm.ring_sheet import Form, groups
from tpoverlap.comm.transport import DeviceTransport
from tpoverlap.gemm import PartialGemm, RowGemm
from tpoverlap.gemm.cublaslt import ALIGNMENT_BYTES
from tpoverlap.overlap.context import OperationContext
from tpoverlap.overlap.ring_tapes import GatherTapes, ScatterTapes, write_gather, write_scatter
from tpoverlap.overlap.scatter import sum_blocks
from tpoverlap.overlap.tapes import Kinds, kinds_of
from tpoverlap.pieces import Cut, gather_piece_rows, multiplies_pieces

Work = Callable[[], object]
ReadGathered = Callable[[torch.Tensor], None]
_Chunk = tuple[int, tuple[int, int], int]
"""First element in the slot, shape, first row."""


class RingGather:
    """The all-gathers of one context.

    Attributes:
        ring: what moves the rows.
        chunks: what is multiplied after each wait; None: nothing.
        by_piece: the same with a GEMM a piece; None: chunks have one piece.
        kinds: their tapes; None: they have none.
    """

    def __init__(self, context: OperationContext, ring: QuickRing, by_piece: RingGather | None) -> None:
        width = context.width
        self.ring, self.by_piece = ring, by_piece
        self.kinds = kinds_of(context.channel)
        self.own_start = context.own_rows.start
        self.whole = (context.partition.total, width)
        self.chunks: list[_Chunk | None] = []
        for group in groups(ring.steps, ring.form):
            received = group[-1].receives
            if received:
                start, stop = received[0].row_start, received[-1].row_stop
                self.chunks.append((start * width, (stop - start, width), start))
            else:
                self.chunks.append(None)


class RingScatter:
    """The reduce-scatters of one context.

    Attributes:
        ring: what moves the rows.
        rows: (first, row after the last) of each transfer.
        by_piece: the same where own rows are added to each piece as it arrives; None: chunks have one piece.
        pieces: of such, what arrives with each wait: (first element in the slot, first row, row after the last).
        own: own rows.
        kinds: their tapes; None: they have none.
    """

    def __init__(self, context: OperationContext, ring: QuickRing, by_piece: RingScatter | None) -> None:
        self.ring, self.by_piece, self.own = ring, by_piece, context.own_rows
        self.kinds = kinds_of(context.channel)
        self.rows = [(transfer.row_start, transfer.row_stop) for step in ring.steps for transfer in step.sends]
        self.pieces = [
            [(transfer.slot_element, transfer.row_start, transfer.row_stop) for transfer in group[-1].receives]
            for group in groups(ring.steps, ring.form)
        ]


def gather(
    context: OperationContext, x_shard_t: torch.Tensor, gemm: RowGemm, read_gathered: ReadGathered | None
) -> bool:
    """See `ring_exchange.all_gather`."""
    plans, key = context.plans, "ring gather" if read_gathered is None else "ring gather, read"
    plan: RingGather | None = plans[key] if key in plans else _new_gather(context, key, own=read_gathered is not None)
    if plan is None:
        return False
    if plan.by_piece is not None and multiplies_pieces(gemm.num_features):
        plan = plan.by_piece
    ring = plan.ring
    turn = ring.open()
    if turn is None:
        return False
    try:
        if plan.kinds is not None and _play_gather(plan, plan.kinds, turn, x_shard_t, gemm, read_gathered):
            return True
        ring.fill(turn)
        ring.push(turn, x_shard_t)
        gemm.rows(x_shard_t, plan.own_start)
        if read_gathered is not None:
            ring.copy_own(turn, x_shard_t)
        epoch, region = turn[1], ring.region
        for group, chunk in enumerate(plan.chunks):
            ring.wait(turn, group)
            if chunk is not None:
                first, shape, start = chunk
                gemm.rows(region.view(ring.rank, epoch, first, shape, ring.dtype), start)
        if read_gathered is not None:
            ring.wait_own(turn)
            read_gathered(region.view(ring.rank, epoch, 0, plan.whole, ring.dtype))
        ring.end(turn)
    except BaseException as error:
        ring.fail(error, turn)
        raise
    finally:
        ring.leave()
    return True


def scatter(context: OperationContext, gemm: PartialGemm, out: torch.Tensor) -> bool:
    """See `ring_exchange.reduce_scatter`."""
    plans, row_bytes = context.plans, gemm.operand_row_bytes  # which decide about pieces, the rest is the context's
    plan: RingScatter | None = plans[row_bytes] if row_bytes in plans else _new_scatter(context, row_bytes)
    if plan is None:
        return False
    if plan.by_piece is not None and gemm.can_add:
        plan = plan.by_piece
    ring = plan.ring
    turn = ring.open()
    if turn is None:
        return False
    try:
        summand = gemm.empty(context.partition.total, context.width)
        assert summand.is_contiguous(), "a copy engine moves contiguous bytes"
        if plan.kinds is not None and _play_scatter(context, plan, plan.kinds, turn, gemm, summand, out):
            return True
        ring.fill(turn)
        epoch, slot, address = turn[1], turn[3], summand.data_ptr()
        if slot.sheet.start is not None:
            ring.start(turn)
        for number, (start, stop) in enumerate(plan.rows):
            gemm.rows(start, stop, summand[start:stop])
            ring.send(turn, number, address)
        own = context.own_rows
        if ring.form.waits == "piece":
            for group, pieces in enumerate(plan.pieces):
                ring.wait(turn, group)
                for first, start, stop in pieces:
                    received = ring.region.view(ring.rank, epoch, first, (stop - start, out.shape[1]), ring.dtype)
                    gemm.rows_added(start, stop, received, out[start - own.start : stop - own.start])
        else:
            own_partial = summand[own]
            gemm.rows(own.start, own.stop, own_partial, owned=True)
            ring.wait(turn, 0)
            add_blocks(ring, epoch, own_partial, out, context.packed_format)
        ring.end(turn)
    except BaseException as error:
        ring.fail(error, turn)
        raise
    finally:
        ring.leave()
    return True


def _play_gather(
    plan: RingGather,
    kinds: Kinds,
    turn: Turn,
    x_shard_t: torch.Tensor,
    gemm: RowGemm,
    read_gathered: ReadGathered | None,
) -> bool:
    """By tape, all but the reader. False: nothing was done."""
    found = gemm.operands()
    own, reads, ring = x_shard_t.data_ptr(), read_gathered is not None, plan.ring
    if found is None or own % ALIGNMENT_BYTES or (reads and ring.has_own(turn, x_shard_t)) or not kinds.is_current():
        return False
    kind, operands = found
    key = turn[1] % ring.region.depth, turn[0].handle, kind
    tapes: GatherTapes | None = kinds.get(key)
    if tapes is None:
        tapes = kinds.new(key, partial(write_gather, plan, turn, x_shard_t, gemm, reads))
    if tapes is None:
        return False
    whole, after = tapes
    whole.play(*ring.numbers(turn), own, *operands)
    if read_gathered is not None and after is not None:
        read_gathered(ring.region.view(ring.rank, turn[1], 0, plan.whole, ring.dtype))
        after.play()
    ring.land(turn)
    return True


def _play_scatter(
    context: OperationContext,
    plan: RingScatter,
    kinds: Kinds,
    turn: Turn,
    gemm: PartialGemm,
    summand: torch.Tensor,
    out: torch.Tensor,
) -> bool:
    """By tape, all but the sum of blocks. False: nothing was done."""
    found = gemm.operands()
    source, result, ring = summand.data_ptr(), out.data_ptr(), plan.ring
    if found is None or (source | result) % ALIGNMENT_BYTES or not kinds.is_current():
        return False
    kind, operands = found
    key = turn[1] % ring.region.depth, turn[0].handle, kind
    tapes: ScatterTapes | None = kinds.get(key)
    if tapes is None:
        tapes = kinds.new(key, partial(write_scatter, plan, turn, gemm, summand, out))
    if tapes is None:
        return False
    whole, after = tapes
    whole.play(*ring.numbers(turn), source, result, *operands)
    if after is not None:
        add_blocks(ring, turn[1], summand[plan.own], out, context.packed_format)
        after.play()
    ring.land(turn)
    return True


def add_blocks(
    ring: QuickRing, epoch: int, own_partial: torch.Tensor, out: torch.Tensor, packed_format: torch.dtype | None
) -> None:
    """`tpoverlap.overlap.scatter.reduce_blocks`, of what arrived in the slot of use ``epoch``."""
    count, width = own_partial.shape
    if count == 0:
        return
    rank, view = ring.rank, ring.region.view
    if ring.num_peers == 1:  # a view that is kept, instead of a new one
        peers = view(rank, epoch, 0, (count, width), ring.dtype)
        blocks = [own_partial, peers] if rank == 0 else [peers, own_partial]
    else:
        received = view(rank, epoch, 0, (ring.num_peers, count, width), ring.dtype).unbind(0)
        blocks = [*received[:rank], own_partial, *received[rank:]]
    if packed_format is None:
        sum_in_rank_order(blocks, out)
    else:
        sum_blocks(blocks, out, packed_format)


def launch_ring(context: OperationContext, *, scatter: bool) -> QuickRing | None:
    """For an operation whose rows a kernel on the caller's stream moves, without a comm stream."""
    plans, key = context.plans, "launch scatter" if scatter else "launch gather"
    if key not in plans:
        plans[key] = new_ring(context, None, Form(scatter, "at_once", waits="none"))
    found: QuickRing | None = plans[key]
    return found


def _new_gather(context: OperationContext, key: str, *, own: bool) -> RingGather | None:
    piece_rows = gather_piece_rows(context.partition, context.width, context.dtype.itemsize)
    ring = None if context.config.aggregate else new_ring(context, piece_rows, Form(False, "beside", own, "step"))
    plan = None
    if ring is not None:
        by_piece = None
        if piece_rows is not None:
            cut = new_ring(context, piece_rows, ring.form._replace(waits="piece"))
            by_piece = None if cut is None else RingGather(context, cut, None)
        plan = RingGather(context, ring, by_piece)
    context.plans[key] = plan
    return plan


def _new_scatter(context: OperationContext, row_bytes: int) -> RingScatter | None:
    cut = context.scatter_cut(row_bytes)
    ring, plan = new_ring(context, cut, Form(True, "behind")), None
    if ring is not None:
        by_piece = None
        if cut is not None:
            added = new_ring(context, cut, ring.form._replace(waits="piece"))
            by_piece = None if added is None else RingScatter(context, added, None)
        plan = RingScatter(context, ring, by_piece)
    context.plans[row_bytes] = plan
    return plan


def new_ring(context: OperationContext, cut: Cut | None, form: Form) -> QuickRing | None:
    """What moves the rows. None: something else does, or no batch takes them; an `Exchange` always can."""
    channel = context.channel
    if channel is None or not context.config.use_ce or not isinstance(channel.transport, DeviceTransport):
        return None
    outline = context.outline(cut, scatter=form.scatter, order=form.order)
    own = context.own_rows
    base_row = 0 if form.scatter else own.start
    first, elements = own.start * context.width, (own.stop - own.start) * context.width
    ring = QuickRing(channel, channel.transport.signals, outline, form, base_row, first, elements)
    return ring if ring.fits else None
