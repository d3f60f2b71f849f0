"""Tapes of `sequential` for few rows: the exchange kernel and the GEMM before or after it.

Registers hold what they hold in `ring_tapes`, the first seven `tpoverlap.comm.quick_trade.QuickTrade.numbers`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import torch

from tpoverlap.comm.quick_trade import QuickTrade, TradeTurn
from tpoverlap.gemm import PartialGemm, RowGemm
from tpoverlap.gemm.cublaslt import ALIGNMENT_BYTES
from tpoverlap.native import Tape, register
from tpoverlap.overlap.tapes import RESULT, SOURCE, Kinds, TapeMaker

ReadGathered = Callable[[torch.Tensor], None]
_BIAS: Final = RESULT + 3
"""The last of `PartialGemm.operands`."""


def play_gather(
    quick: QuickTrade,
    kinds: Kinds,
    own: torch.Tensor,
    gemm: RowGemm,
    read: ReadGathered | None,
    turn: TradeTurn,
) -> bool:
    """All of ``turn``'s all-gather. False: nothing was done."""
    found, address = gemm.operands(), own.data_ptr()
    if found is None or address % ALIGNMENT_BYTES or not kinds.is_current():
        return False
    region, epoch = quick.region, turn[1]
    kind, operands = found
    key = epoch % region.depth, turn[0].handle, read is None, kind
    tapes: tuple[Tape, Tape | None] | None = kinds.get(key)
    if tapes is None:
        tapes = kinds.new(key, partial(_write_gather, quick, turn, own, gemm, read is not None))
    if tapes is None:
        return False
    whole, after = tapes
    whole.play(*quick.numbers(turn), address, *operands)
    if read is not None and after is not None:
        read(quick.gathered(turn))
        after.play()
    return True


def _write_gather(
    quick: QuickTrade, turn: TradeTurn, own: torch.Tensor, gemm: RowGemm, reads: bool, maker: TapeMaker
) -> tuple[Tape, Tape | None] | None:
    if maker.products is None or not maker.has_room(SOURCE + 1, gemm):
        return None
    recording, own_at = maker.recording(), register(SOURCE)
    whole = quick.gathered(turn)
    write = partial(maker.products.record, recording, turn[0].handle)
    if not quick.record_gather(recording, turn, own, own_at):
        return None
    if not gemm.record(write, whole, whole.data_ptr(), 0, SOURCE + 1):
        return None
    before, num_registers = recording, SOURCE + 1 + gemm.num_operands
    if reads:
        recording = maker.recording()
    quick.record_end(recording, turn)
    return maker.tape(before, num_registers), maker.tape(recording, 0) if reads else None


class OpenTrade:
    """A gather that has its rows and is open until its last reader, see `bulk.PendingGather`.

    Whoever got it from `open_gather` calls `close`.
    """

    def __init__(self, quick: QuickTrade, turn: TradeTurn, tapes: tuple[Tape, Tape] | None) -> None:
        self._quick, self._turn, self._tapes = quick, turn, tapes

    def run_beside(self, work: Callable[[], object]) -> None:
        """An independent GEMM, on the caller's stream: beside nothing any more."""
        work()

    def read(self, read_gathered: ReadGathered) -> None:
        """Call ``read_gathered`` with the gathered [T, H]: a view of the slot, not valid after `close`."""
        read_gathered(self._quick.gathered(self._turn))

    def close(self, error: BaseException | None) -> None:
        """The end of the operation; ``error``: it failed."""
        quick, turn = self._quick, self._turn
        try:
            if error is not None:
                quick.fail(error, turn)
                return
            try:
                if self._tapes is None:
                    quick.finish(turn)
                else:
                    self._tapes[1].play()
                quick.land(turn)
            except BaseException as failure:
                quick.fail(failure, turn)
                raise
        finally:
            quick.leave()


def open_gather(quick: QuickTrade, kinds: Kinds | None, own: torch.Tensor) -> OpenTrade | None:
    """Exchange own rows [T_r, H]. None: it is out of the ordinary, and nothing was done."""
    turn = quick.open()
    if turn is None:
        return None
    try:
        tapes: tuple[Tape, Tape] | None = None
        address = own.data_ptr()
        if kinds is not None and address % ALIGNMENT_BYTES == 0:
            key = turn[1] % quick.region.depth, turn[0].handle
            tapes = kinds.get(key)
            if tapes is None:
                tapes = kinds.new(key, partial(_write_open, quick, turn, own))
        if tapes is None:
            quick.start(turn, own)
        else:
            tapes[0].play(*quick.numbers(turn), address)
        return OpenTrade(quick, turn, tapes)
    except BaseException as error:
        quick.fail(error, turn)
        quick.leave()
        raise


def _write_open(quick: QuickTrade, turn: TradeTurn, own: torch.Tensor, maker: TapeMaker) -> tuple[Tape, Tape] | None:
    start, end = maker.recording(), maker.recording()
    if not quick.record_gather(start, turn, own, register(SOURCE)):
        return None
    quick.record_end(end, turn)
    return maker.tape(start, SOURCE + 1), maker.tape(end, 0)


def play_add(
    quick: QuickTrade,
    kinds: Kinds,
    summands: torch.Tensor,
    gemm: PartialGemm | None,
    out: torch.Tensor,
    turn: TradeTurn,
) -> bool:
    """All of ``turn``'s GEMM, if it has one, and reduce-scatter. False: nothing was done."""
    found = (None, []) if gemm is None else gemm.operands()
    source, result = summands.data_ptr(), out.data_ptr()
    if found is None or (source | result) % ALIGNMENT_BYTES or not kinds.is_current():
        return False
    kind, operands = found
    key = turn[1] % quick.region.depth, turn[0].handle, kind
    tape: Tape | None = kinds.get(key)
    if tape is None:
        tape = kinds.new(key, partial(_write_add, quick, turn, summands, gemm, out))
    if tape is None:
        return False
    tape.play(*quick.numbers(turn), source, result, *operands)
    return True


def _write_add(
    quick: QuickTrade,
    turn: TradeTurn,
    summands: torch.Tensor,
    gemm: PartialGemm | None,
    out: torch.Tensor,
    maker: TapeMaker,
) -> Tape | None:
    recording, total, bias, num_operands = maker.recording(), summands.shape[0], None, 0
    if gemm is not None:
        if maker.products is None:
            return None
        write = partial(maker.products.record, recording, turn[0].handle)
        if total and not gemm.record(write, (0, total), summands, register(SOURCE), RESULT + 1):
            return None
        bias, num_operands = gemm.bias, gemm.num_operands
    places = register(SOURCE), register(RESULT), 0 if bias is None else register(_BIAS)
    if not quick.record_add(recording, turn, summands, bias, out, places):
        return None
    return maker.tape(recording, RESULT + 1 + num_operands)
