"""Run by test_trade_kernels.py with TRITON_INTERPRET=1: one rank's kernels; a thread plays the other ranks.

``python -m tests.gemm.trade_cases CASE ...``
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tpoverlap.gemm.triton.gates import TradeSlot
from tpoverlap.gemm.triton.trade_launcher import TradeLauncher

FLAGS, RING_BYTES, RANKS, RANK = 64, 1024, 3, 1
DEPTH, PARTS = 2, 3
EPOCHS = (3, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1)
"""Around both ends of a signed and of an unsigned word; 1 after a wrap."""
NAN = float("nan")


class Ranks:
    """Memory of three ranks; the one in the middle is played by kernels."""

    def __init__(self, slot_bytes: int, before: int) -> None:
        def words(count: int) -> list[torch.Tensor]:
            return [torch.full((count,), _signed32(before), dtype=torch.int32) for _ in range(RANKS)]

        self.data = [torch.full((slot_bytes,), 0xFF, dtype=torch.uint8) for _ in range(RANKS)]
        self.arrivals, self.credits = words(RANKS * FLAGS), words(RANKS)
        self.descriptors = [torch.zeros(RANKS * RING_BYTES // 8, dtype=torch.int64) for _ in range(RANKS)]
        self.done = torch.zeros(1, dtype=torch.int32)
        self.slot = TradeSlot(
            RANK,
            tuple(one.data_ptr() for one in self.data),
            tuple(one.data_ptr() + 4 * FLAGS * RANK for one in self.arrivals),
            tuple(one.data_ptr() + RING_BYTES * RANK for one in self.descriptors),
            tuple(one.data_ptr() + 4 * RANK for one in self.credits),
            self.arrivals[RANK].data_ptr(),
            self.credits[RANK].data_ptr(),
            self.descriptors[RANK].data_ptr(),
            4 * FLAGS,
            RING_BYTES,
            DEPTH,
            slot_bytes,
        )

    def told(self, owner: int, source: int, entry: int) -> list[int]:
        """(record, digest) of ``source`` at ``owner``."""
        first = source * RING_BYTES // 8 + entry // 8
        return self.descriptors[owner][first : first + 2].tolist()

    def tell(self, source: int, entry: int, record: int, digest: int) -> None:
        first = source * RING_BYTES // 8 + entry // 8
        self.descriptors[RANK][first + 1] = _signed64(digest)
        self.descriptors[RANK][first] = _signed64(record)

    def sees(self, source: int, epoch: int, piece: int = 0) -> bool:
        """Whether this rank's arrival flag of ``epoch`` is at rank ``source``."""
        return int(self.arrivals[source][FLAGS * RANK + piece]) == _signed32(epoch)

    def sees_parts(self, source: int, epoch: int) -> bool:
        """Whether all flags of parts are."""
        return all(self.sees(source, epoch, 1 + part) for part in range(PARTS))


def _signed32(value: int) -> int:
    return ((value + (1 << 31)) % (1 << 32)) - (1 << 31)


def _signed64(value: int) -> int:
    return ((value + (1 << 63)) % (1 << 64)) - (1 << 63)


def _counters_are_zero(launcher: TradeLauncher) -> None:
    for counters in launcher._counters.values():
        assert counters.tolist() == [0, 0, 0, 0], "the next launch would count on"


def gathers() -> None:
    """Rows, descriptor and flags of the others come late, in an order that shows what the kernel waits for."""
    counts, width, entry = (2, 3, 0), 7, 5 * 16
    for number, epoch in enumerate(EPOCHS):
        x = torch.arange(5 * width, dtype=torch.float16).view(5, width) + number
        ranks, launcher = Ranks(x.nbytes, epoch - DEPTH - 1), TradeLauncher(torch.device("cpu"), 10.0)
        record, digest = (1 << 63) + number, (1 << 64) - 1 - number
        log: list[str] = []

        def others(
            ranks: Ranks = ranks, x: Any = x, epoch: int = epoch, record: int = record, digest: int = digest
        ) -> None:
            wanted = [_signed64(record), _signed64(digest)]
            _until(lambda: ranks.told(0, RANK, entry) == ranks.told(2, RANK, entry) == wanted)
            time.sleep(0.05)
            assert bool((ranks.data[0] == 0xFF).all()), "rows came without the credits"
            for peer in (0, 2):
                assert not ranks.sees(peer, epoch)
                ranks.credits[RANK][peer] = _signed32(epoch - DEPTH)
            _until(lambda: ranks.sees(0, epoch) and ranks.sees(2, epoch))
            for peer in (0, 2):
                assert torch.equal(ranks.data[peer].view(torch.float16).view(5, 7)[2:], x[2:]), "a flag before its rows"
            late = [lambda: ranks.tell(2, entry, record, digest), lambda: ranks.tell(0, entry, record, digest)]
            late.insert(2 * (number % 2), lambda: _put(ranks, 0, ranks.slot.data[RANK], x[:2], epoch))  # noqa: B023
            for act in late:
                time.sleep(0.02)
                log.append("late")  # noqa: B023
                act()

        _beside(others, launcher.gather(counts, 2 * width, 2, ranks.slot, True, 0), log,
                        x[2:].data_ptr(), epoch, record, digest, entry)  # fmt: skip
        assert log == ["late", "late", "late", "through"], log
        assert torch.equal(ranks.data[RANK].view(torch.float16).view(5, 7), x), "gathered"
        assert not launcher.error[0]
        _counters_are_zero(launcher)


def scatters() -> None:
    """The same of a reduce-scatter: sums in rank order, the credits and the host's word after the last read.

    A peer sets flags of parts, another one that of the whole only. Where addresses are not aligned this rank does, too,
    and before it waits for anything.
    """
    counts, width, entry = (2, 3, 1), 2048, 0  # each program has something to add
    for number, (epoch, aligned) in enumerate([*((epoch, True) for epoch in EPOCHS), (EPOCHS[0], False)]):
        dtype = (torch.float32, torch.float16)[number % 2]
        generator = torch.Generator().manual_seed(number)
        partials = torch.randn(6, width, generator=generator).to(dtype)
        bias = torch.randn(width, generator=generator).to(dtype) if number % 2 else None
        sent = (torch.randn(2, 3, width, generator=generator) * 100).to(dtype)
        ranks, launcher = (
            Ranks(2 * 3 * width * dtype.itemsize, epoch - DEPTH - 1),
            TradeLauncher(torch.device("cpu"), 10.0),
        )
        out = torch.full((3, width), NAN, dtype=dtype)
        log: list[str] = []

        def others(
            ranks: Ranks = ranks,
            epoch: int = epoch,
            aligned: bool = aligned,
            partials: Any = partials,
            sent: Any = sent,
        ) -> None:
            time.sleep(0.05)
            assert bool((ranks.data[0] == 0xFF).all() and (ranks.data[2] == 0xFF).all()), "rows without a credit"
            assert not any(ranks.sees(peer, epoch, piece) for peer in (0, 2) for piece in range(1 + PARTS))
            for peer in (0, 2):
                ranks.credits[RANK][peer] = _signed32(epoch - DEPTH)
            sees = ranks.sees_parts if aligned else ranks.sees
            _until(lambda: sees(0, epoch) and sees(2, epoch))
            dtype = partials.dtype
            assert torch.equal(ranks.data[0].view(dtype)[: 2 * width].view(2, width), partials[:2]), "block 0 of rank 0"
            assert torch.equal(ranks.data[2].view(dtype)[width : 2 * width], partials[5]), "block 1 of rank 2"
            _until(lambda: ranks.told(0, RANK, entry) == ranks.told(2, RANK, entry) == [5, 6])
            block, pieces = 3 * width * dtype.itemsize, range(1, 1 + PARTS) if aligned else (0,)
            late = [
                lambda: ranks.tell(2, entry, 5, 6),
                lambda: _put(ranks, 2, ranks.slot.data[RANK] + block, sent[1], epoch, pieces),
                lambda: ranks.tell(0, entry, 5, 6),
                lambda: _put(ranks, 0, ranks.slot.data[RANK], sent[0], epoch),
            ]
            for act in late[:: 1 - 2 * (number % 2)]:  # noqa: B023
                time.sleep(0.02)
                assert ranks.done.tolist() == [0], "the host was told before the end"
                assert int(ranks.credits[0][RANK]) != _signed32(epoch), "a credit before the last read"
                log.append("late")  # noqa: B023
                act()
            _until(lambda: ranks.done.tolist() == [9])
            assert not torch.isnan(out).any(), "the host was told before the last sum"  # noqa: B023
            assert ranks.sees(0, epoch) and ranks.sees(2, epoch), "who knows of no parts waits for the whole"

        trade = launcher.scatter(counts, width, dtype, ranks.slot, aligned, bias is not None, 0)
        _beside(others, trade, log, partials.data_ptr(), out.data_ptr(), 0 if bias is None else bias.data_ptr(),
                        epoch, 5, 6, entry, ranks.done.data_ptr(), 9, 1)  # fmt: skip
        own = partials[2:5] if bias is None else partials[2:5] + bias
        wanted = (sent[0].float() + own.float() + sent[1].float()).to(dtype)
        assert log == ["late"] * 4 + ["through"], log
        assert torch.equal(out, wanted), (out, wanted)
        assert [int(ranks.credits[peer][RANK]) for peer in (0, 2)] == [_signed32(epoch)] * 2
        assert ranks.done.tolist() == [9]
        _counters_are_zero(launcher)


def gives_up() -> None:
    """Nobody comes: the kernels end, the error word is set, and what they leave is no number."""
    for which in ("credit", "descriptor", "rows"):
        for scatter in (False, True):
            ranks, launcher = Ranks(6 * 8 * 4, 0), TradeLauncher(torch.device("cpu"), 0.02)
            for source in (0, 2):
                if which != "credit":
                    ranks.credits[RANK][source] = 1
                if which == "rows":
                    ranks.tell(source, 0, 5, 6)
            ranks.data[RANK].zero_()
            x, out = torch.ones(6, 8), torch.ones(2, 8)
            if scatter:
                trade = launcher.scatter((2, 2, 2), 8, torch.float32, ranks.slot, True, False, 0)
                trade.start(x.data_ptr(), out.data_ptr(), 0, 3, 5, 6, 0, ranks.done.data_ptr(), 1, 1)
                assert bool(torch.isnan(out).all()), which
            else:
                trade = launcher.gather((2, 2, 2), 32, 4, ranks.slot, True, 0)
                trade.start(x.data_ptr(), 3, 5, 6, 0)
                assert bool(torch.isnan(ranks.data[RANK].view(torch.float32)).all()), which
            assert launcher.error[0] == 1, which
            flags = [ranks.sees(peer, 3, piece) for peer in (0, 2) for piece in range(1 + PARTS)]
            assert which != "credit" or not any(flags), "peers take it for sent"
            sent = [bool((ranks.data[peer] != 0xFF).any()) for peer in (0, 2)]
            assert sent == [which != "credit"] * 2, "rows overwrite what a peer still reads"
            _counters_are_zero(launcher)


def gives_up_partly() -> None:
    """The credit comes when two programs have given it up: the third one, which sends its part, sets no flag either."""
    for scatter in (False, True):
        ranks, launcher = Ranks(6 * 8 * 4, 0), TradeLauncher(torch.device("cpu"), 0.1)
        x, out = torch.ones(6, 8), torch.ones(2, 8)
        counts = (6, 2, 0) if scatter else (0, 6, 0)

        def others(ranks: Ranks = ranks, launcher: TradeLauncher = launcher) -> None:
            _until(lambda: bool(launcher.error[0]))
            for peer in (0, 2):
                ranks.credits[RANK][peer] = 1

        log: list[str] = []
        if scatter:
            trade = launcher.scatter(counts, 8, torch.float32, ranks.slot, True, False, 0)
            given = x.data_ptr(), out.data_ptr(), 0, 3, 5, 6, 0, ranks.done.data_ptr(), 1, 1
        else:
            trade = launcher.gather(counts, 32, 4, ranks.slot, True, 0)
            given = x.data_ptr(), 3, 5, 6, 0
        _beside(others, trade, log, *given)
        assert not any(ranks.sees(peer, 3) for peer in (0, 2)), "peers take it for sent"
        _counters_are_zero(launcher)


def _put(ranks: Ranks, source: int, address: int, rows: torch.Tensor, epoch: int, pieces: Sequence[int] = (0,)) -> None:
    """Rows of ``source``, then its flags."""
    ctypes.memmove(address, rows.data_ptr(), rows.nbytes)
    for piece in pieces:
        ranks.arrivals[RANK][FLAGS * source + piece] = _signed32(epoch)


def _until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20.0
    while not reached():
        assert time.monotonic() < deadline, "the kernel did not get there"
        time.sleep(0.002)


def _beside(others: Callable[[], None], trade: Any, log: list[str], *changing: int) -> None:
    """Run the kernel while ``others`` run, in a thread; raises what they raise."""
    errors: list[BaseException] = []

    def play() -> None:
        try:
            others()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=play)
    thread.start()
    trade.start(*changing)
    log.append("through")
    thread.join()
    if errors:
        raise errors[0]


CASES: dict[str, Callable[[], None]] = {
    function.__name__: function for function in (gathers, scatters, gives_up, gives_up_partly)
}

if __name__ == "__main__":
    for case in sys.argv[1:] or CASES:
        CASES[case]()
        print(f"{case}: right")
