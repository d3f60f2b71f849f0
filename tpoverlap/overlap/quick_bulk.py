"""bulk on a device in few calls of Python, where nobody looks closer (`tpoverlap.overlap.quick_ring`).

What runs when is what `tpoverlap.overlap.bulk` says. A function that returns False or None has done nothing. Each has
the frame of try, fail and leave by itself, as in `quick_ring` and `fused_launch`: a helper would be a call more.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from tpoverlap.comm.quick_ring import QuickRing, Turn
from tpoverlap.comm.ring_sheet import Form
from tpoverlap.overlap.context import OperationContext
from tpoverlap.overlap.quick_ring import add_blocks, new_ring
from tpoverlap.overlap.ring_tapes import MoveTapes, write_moves
from tpoverlap.overlap.tapes import Kinds, kinds_of

Work = Callable[[], object]
ReadGathered = Callable[[torch.Tensor], None]


class QuickGather:
    """A whole all-gather that is open, see `bulk.PendingGather`. Whoever opened it calls `close`."""

    def __init__(
        self, ring: QuickRing, turn: Turn, tapes: MoveTapes | None, whole: tuple[int, int], own: torch.Tensor
    ) -> None:
        self._ring, self._turn, self._tapes, self._whole, self._own = ring, turn, tapes, whole, own
        self._waited = False

    def run_beside(self, work: Work) -> None:
        """An independent GEMM, on the caller's stream."""
        work()

    def read(self, read_gathered: ReadGathered) -> None:
        """Call ``read_gathered`` with the gathered [T, H]: a view of the slot, not valid after `close`."""
        ring, turn = self._ring, self._turn
        if not self._waited:
            self._waited = True
            _await(ring, turn, self._tapes, self._own)
        read_gathered(ring.region.view(ring.rank, turn[1], 0, self._whole, ring.dtype))

    def close(self, error: BaseException | None) -> None:
        """The end of the operation; ``error``: it failed."""
        ring = self._ring
        try:
            if error is not None:
                ring.fail(error, self._turn)
                return
            try:
                if not self._waited:
                    ring.wait_all(self._turn)  # every peer's operation is compared
                _end(ring, self._turn, self._tapes)
            except BaseException as failure:
                ring.fail(failure, self._turn)
                raise
        finally:
            ring.leave()


def open_gather(context: OperationContext, x_shard_t: torch.Tensor) -> QuickGather | None:
    """See `bulk.PendingGather`. None: nothing was done."""
    opened = _open(context, scatter=False)
    if opened is None:
        return None
    ring, turn = opened
    try:
        tapes = _push(context, ring, turn, x_shard_t)
        return QuickGather(ring, turn, tapes, (context.partition.total, context.width), x_shard_t)
    except BaseException as error:
        ring.fail(error, turn)
        ring.leave()
        raise


def gather_beside(context: OperationContext, x_shard_t: torch.Tensor, work: Work, read_gathered: ReadGathered) -> bool:
    """See `registry.gather_beside`."""
    opened = _open(context, scatter=False)
    if opened is None:
        return False
    ring, turn = opened
    try:
        tapes = _push(context, ring, turn, x_shard_t)
        work()
        _await(ring, turn, tapes, x_shard_t)
        whole = (context.partition.total, context.width)
        read_gathered(ring.region.view(ring.rank, turn[1], 0, whole, ring.dtype))
        _end(ring, turn, tapes)
    except BaseException as error:
        ring.fail(error, turn)
        raise
    finally:
        ring.leave()
    return True


def scatter_beside(context: OperationContext, partial_sum: torch.Tensor, work: Work, out: torch.Tensor) -> bool:
    """See `registry.scatter_beside`."""
    opened = _open(context, scatter=True)
    if opened is None:
        return False
    ring, turn = opened
    try:
        tapes = _push(context, ring, turn, partial_sum)
        work()
        _await(ring, turn, tapes, partial_sum)
        add_blocks(ring, turn[1], partial_sum[context.own_rows], out, None)
        _end(ring, turn, tapes)
    except BaseException as error:
        ring.fail(error, turn)
        raise
    finally:
        ring.leave()
    return True


def _push(context: OperationContext, ring: QuickRing, turn: Turn, source: torch.Tensor) -> MoveTapes | None:
    """Send everything, which is there from the start. The tapes of the rest, if it has some."""
    kinds: Kinds | None = context.plans["moves"]
    if kinds is not None and not ring.has_own(turn, source):
        key = ring.form.scatter, turn[1] % ring.region.depth, turn[0].handle
        tapes: MoveTapes | None = kinds.get(key)
        if tapes is None:
            tapes = kinds.new(key, partial(write_moves, ring, turn))
        if tapes is not None:
            assert source.is_contiguous(), "a copy engine moves contiguous bytes"
            tapes[0].play(*ring.numbers(turn), source.data_ptr())
            return tapes
    ring.fill(turn)
    ring.push(turn, source)
    return None


def _await(ring: QuickRing, turn: Turn, tapes: MoveTapes | None, source: torch.Tensor) -> None:
    """The caller's stream goes on once everything is here."""
    if tapes is not None:
        tapes[1].play(source.data_ptr())
        return
    if ring.form.own:
        ring.copy_own(turn, source)
    ring.wait_all(turn)


def _end(ring: QuickRing, turn: Turn, tapes: MoveTapes | None) -> None:
    """After the slot's last reader."""
    if tapes is None:
        ring.finish(turn)
    else:
        tapes[2].play()
    ring.land(turn)


def _open(context: OperationContext, *, scatter: bool) -> tuple[QuickRing, Turn] | None:
    """In the end comes `QuickRing.leave`. None: something is out of the ordinary, and nothing was done."""
    plans, key = context.plans, "bulk scatter" if scatter else "bulk gather"
    if key not in plans:
        plans[key] = new_ring(context, None, Form(scatter, "beside", own=not scatter))
        if "moves" not in plans:
            plans["moves"] = kinds_of(context.channel)  # before the operation: the first one compiles
    ring: QuickRing | None = plans[key]
    turn = None if ring is None else ring.open()
    return None if ring is None or turn is None else (ring, turn)
