"""Rank functions of `test_quick_ring`: operations in few calls beside those that `DeviceExchange` does."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, NamedTuple
from unittest import mock

import torch

import tpoverlap as tpo
from tests.comm import operations as ops
from tests.comm.rank_functions import Outcome, _own_threads, attempt, start_at
from tests.costs.null_device import NullBackend, NullDriver
from tpoverlap import pieces
from tpoverlap.comm import Meter, OneSidedExchange, Trace, device_exchange, quick_operation, word_sheet
from tpoverlap.comm.quick_ring import QuickRing
from tpoverlap.gemm import PartialGemm, RowGemm
from tpoverlap.memory.base import agree
from tpoverlap.memory.driver import OPERATION_BYTES, PACK, WAIT_32, WAIT_64, WRITE_64, MemoryOperations
from tpoverlap.overlap import context, fused_launch
from tpoverlap.testing import faults
from tpoverlap.testing.simulated import CALLER, SimulatedBackend, SimulatedDriver
from tpoverlap.tokens import TokenPartition

KINDS = ("ring_ag", "ring_rs", "bulk_ag", "bulk_rs")
MORE_KINDS = ("gathered", "nested", "launch_ag", "launch_rs")
"""With the gathered rows; forward and backward, where a scatter runs inside a gather; rows that a kernel moves."""


def _unequal(partition: TokenPartition, *others: int) -> pieces.Cut | None:
    """Of every other even T two pieces of different sizes, instead of as many equal ones."""
    rows = pieces.scatter_piece_rows(partition, *others[:-1])
    return rows if rows is None or partition.total % 4 else pieces.FirstPiece(2 * min(partition.counts) // 3)


@contextmanager
def cut_early(*, narrow: bool = True) -> Iterator[None]:
    """Chunks of few rows have several pieces, of a scatter some of different sizes; ``narrow``: of a gather they are
    multiplied one by one.
    """
    sizes = {
        **{"GATHER_ROWS_OF_TWO": 12, "FULL_PIECE": 3 * ops.WIDTH, "MIN_PIECE_ROWS": 2, "BYTES_OF_FOUR": 600},
        **{"NARROW_OUTPUT": 2048 if narrow else 0, "NARROW_OPERAND_BYTES": 0},
    }
    with mock.patch.multiple(pieces, **sizes), mock.patch.object(context, "scatter_cut", _unequal):
        yield


class Opened:
    """How many operations were opened in few calls, and how many were left to `DeviceExchange`."""

    def __init__(self) -> None:
        self.quick = self.left = 0


@contextmanager
def counted(*, allowed: bool = True) -> Iterator[Opened]:
    """Within the block quick operations are counted; not ``allowed``: none is quick."""
    opened, real = Opened(), QuickRing.open

    def open_(self: QuickRing) -> Any:
        turn = real(self) if allowed else None
        opened.quick += turn is not None
        opened.left += turn is None
        return turn

    with mock.patch.object(QuickRing, "open", open_):
        yield opened


# -- the same words ----------------------------------------------------------------------------------------------


class Given(NamedTuple):
    """What a stream was given: a memory operation, or a copy with its size as value."""

    stream: int
    kind: int
    address: Any
    value: int


COPY = 0


class _Recording(NullDriver):
    def __init__(self) -> None:
        super().__init__()
        self.given: list[Given] = []

    def submit(self, stream: int, operations: MemoryOperations) -> None:
        super().submit(stream, operations)
        for number in range(operations.count):
            kind, address, value, flags, alias = PACK.unpack_from(operations.buffer, number * OPERATION_BYTES)
            assert not flags or kind in (WAIT_32, WAIT_64), "a wait for equality is of 64 bits"
            self.given.append(Given(stream, kind, (address, flags, alias), value))

    def copy(self, stream: int, target: int, source: int, size_bytes: int) -> None:
        super().copy(stream, target, source, size_bytes)
        self.given.append(Given(stream, COPY, (target, 0, 0), size_bytes))


class _RecordingBackend(NullBackend):
    def driver(self) -> NullDriver:
        return _Recording()


def _places(mgr: tpo.UserBufferManager) -> list[tuple[str, int, int]]:
    """(what, first byte, end) of the memory that words may lie in."""
    channel = mgr.channel
    assert channel is not None, "several ranks"
    signals: Any = channel.transport.signals  # type: ignore[attr-defined]
    found = []
    for number, arena in enumerate(channel.arenas):
        for rank in range(mgr.tp_size):
            found.append(
                (f"arena {number} of rank {rank}", arena.address(rank), arena.address(rank) + arena.size_bytes)
            )
    found.append(("host words", signals._done_words.address, signals._done_words.address + 4 * 4096))
    return found


def _named(given: list[Given], places: list[tuple[str, int, int]]) -> list[Given]:
    named = []
    for one in given:
        address, *rest = one.address
        where = [(what, address - start) for what, start, stop in places if start <= address < stop]
        assert len(where) == 1, f"{one} is nowhere that we know: {where}"
        named.append(one._replace(address=(*where[0], *rest)))
    return named


def _launch(mgr: tpo.UserBufferManager, partition: TokenPartition, *, scatter: bool) -> None:
    """`fused` in one launch, but for the launch."""
    name = "fc2_fprop" if scatter else "qkv_fprop"
    context = mgr.operation(mgr.get(name), partition, scatter=scatter)
    if not fused_launch._quickly(context, lambda view: [], scatter=scatter):
        opened = context.open_scatter(order="at_once") if scatter else context.open_gather(order="at_once")
        with opened as exchange:
            assert isinstance(exchange, OneSidedExchange), "mapped memory"
            assert fused_launch._credits_on_the_callers_stream(exchange, mgr.channel), "a device"


def _given(rank: int, size: int, turns: int, narrow: bool, *, quick: bool) -> tuple[list[list[Given]], dict[str, int]]:
    """By operation what the streams were given, and the driver's calls."""
    with (
        cut_early(narrow=narrow),
        counted(allowed=quick) as opened,
        ops.make_manager(_RecordingBackend, max_rows_per_rank=ops.CAPACITY) as mgr,  # type: ignore[arg-type]
        torch.no_grad(),
    ):
        driver = mgr.channel.transport.driver  # type: ignore[union-attr]
        assert isinstance(driver, _Recording), "the backend's"
        places, found = _places(mgr), []
        for seed, partition in enumerate(ops.partitions(size, turns)):
            x, w = ops._x(partition, seed)[partition.rows(rank)], ops._w(rank, seed, ops.OUT)
            for kind in (*KINDS, *MORE_KINDS):
                driver.given.clear()
                if kind == "gathered":
                    tpo.all_gather_gemm(x, w, mgr.layer("qkv"), partition=partition, return_gathered=True)
                elif kind == "nested":
                    with torch.enable_grad():
                        inputs = x.clone().requires_grad_(), w.clone().requires_grad_()
                        y = tpo.all_gather_gemm(*inputs, mgr.layer("qkv"), partition=partition)
                        y.sum().backward()
                elif kind.startswith("launch"):
                    _launch(mgr, partition, scatter=kind == "launch_rs")
                else:
                    ops.run(mgr, kind, partition, seed)
                named = _named(driver.given, places)
                if kind == "nested":  # a quick operation takes its host word earlier
                    named = [
                        one._replace(address="", value=0) if one.address[0] == "host words" else one for one in named
                    ]
                found.append(named)
        calls = dict(driver.calls)
    if quick:
        assert opened.quick == 10 * turns - 2, f"only {opened.quick} operations were quick"
    return found, calls


def same_words(rank: int, size: int, turns: int, narrow: bool) -> list[str]:
    """What differs between the two ways: on each stream the same writes and copies in the same order, the same waits in
    the same order, in no more calls (but for the compare behind a launch). Where nothing is sent after them, the comm
    stream may wait instead of the word stream.
    """
    quick, fewer = _given(rank, size, turns, narrow, quick=True)
    slow, more = _given(rank, size, turns, narrow, quick=False)
    wrong = []
    kinds = (*KINDS, *MORE_KINDS)
    for number, both in enumerate(zip(quick, slow, strict=True)):
        kind = kinds[number % len(kinds)]
        mine, its = (_by_stream(given, one_writer="launch" in kind) for given in both)
        wrong += [
            f"operation {number}, {kind}, {what}: {mine.get(what)} instead of {its.get(what)}"
            for what in {*mine, *its}
            if mine.get(what) != its.get(what)
        ]
    more["submit"] += 2 * turns  # beside the kernel, not after it
    wrong += [f"{fewer[name]} {name} instead of {more[name]}" for name in more if fewer.get(name, 0) > more[name]]
    return wrong


def _by_stream(given: list[Given], *, one_writer: bool) -> dict[str, list[Given]]:
    """``one_writer``: whichever of the caller's and the word stream that is."""
    found: dict[str, list[Given]] = {}
    for one in given:
        where = "writes" if one_writer else f"stream {one.stream}"
        where = "waits" if one.kind in (WAIT_32, WAIT_64) else where
        found.setdefault(where, []).append(one._replace(stream=0))
    return found


# -- ranks of both kinds -----------------------------------------------------------------------------------------


@contextmanager
def refreshed(every: int) -> Iterator[None]:
    """Flags are refreshed in two of so many uses of a region."""
    with (
        mock.patch.object(device_exchange, "REFRESH_EVERY", every),
        mock.patch.object(quick_operation, "REFRESH_EVERY", every),
    ):
        yield


def mixed(rank: int, size: int, turns: int, late: int) -> tuple[int, int]:
    """Every rank is quick in every other turn, neighbours in turn; results bit by bit; how many were quick, and not.

    Flags are refreshed now and then, slots are held, and rank ``late`` (-1: none) is late.
    """
    generator, quick, left = random.Random(rank), 0, 0
    with cut_early(), refreshed(7), ops.make_manager(SimulatedBackend, 30.0) as mgr:  # type: ignore[arg-type]
        mgr.register("wide", 2 * ops.WIDTH)  # in regions of its own
        for seed, partition in enumerate(ops.partitions(size, turns)):
            with counted(allowed=(rank + seed) % 2 == 0) as opened:
                for kind in KINDS:
                    if rank == late or (late < 0 and generator.random() < 0.2):
                        time.sleep(2e-3 * generator.random())
                    ops.run_checked(mgr, kind, partition, seed)
                wide, weight = ops.integers(seed, partition.total, 2 * ops.WIDTH), ops.integers(rank, 3, 2 * ops.WIDTH)
                y = tpo.all_gather_gemm(wide[partition.rows(rank)], weight, mgr.layer("wide"), partition=partition)
                ops.require_equal(y, wide @ weight.t(), "another width")
                if seed % 3 == 2:
                    mgr.set_active_shape((partition.total, ops.WIDTH), partition)
                    held = mgr.get("qkv_fprop").get_buffer()
                    ops.run_checked(mgr, "ring_ag", partition, seed)
                    ops.run_checked(mgr, "bulk_ag", partition, seed + 1)
                    ops.require_equal(held, ops._x(partition, seed), "what was gathered into a held slot")
            quick, left = quick + opened.quick, left + opened.left
        mgr.check()
    return quick, left


class TwoCallersDriver(SimulatedDriver):
    """Two callers' streams, both of which do everything at once; torch's work is on ``current_handle``."""

    current_handle = CALLER

    def caller_stream(self) -> int:
        return self.current_handle

    def _give(self, stream: int, work: Any) -> None:
        super()._give(CALLER if stream == OTHER else stream, work)


class TwoCallersBackend(SimulatedBackend):
    def driver(self) -> SimulatedDriver:
        return TwoCallersDriver()


OTHER = 1000


def two_callers(rank: int, size: int, turns: int) -> list[list[bool]]:
    """For each kind which of its turns were quick; the caller's stream is another one after every third."""
    found = []
    with ops.make_manager(TwoCallersBackend, 30.0) as mgr:  # type: ignore[arg-type]
        driver = mgr.channel.transport.driver  # type: ignore[union-attr]
        assert isinstance(driver, TwoCallersDriver), "the backend's"
        for kind in ("ring_ag", "ring_rs"):
            found.append([])
            for seed, partition in enumerate(ops.partitions(size, turns)):
                driver.current_handle = (CALLER, OTHER)[seed // 3 % 2]
                with counted() as opened:
                    ops.run_checked(mgr, kind, partition, seed)
                found[-1].append(opened.quick == 1)
        mgr.check()
    return found


def near_the_wrap(rank: int, size: int, before: int, turns: int) -> int:
    """Epochs that pass 2**32 after ``before`` uses; how many operations were quick."""
    with ops.make_manager(SimulatedBackend, 30.0) as mgr, counted() as opened:  # type: ignore[arg-type]
        assert mgr.channel is not None, "several ranks"
        start_at(mgr, (1 << 32) - before)
        agree(mgr.group, "set up")
        for seed, partition in enumerate(ops.partitions(size, turns)):
            for kind in KINDS:
                ops.run_checked(mgr, kind, partition, seed)
        mgr.check()
        assert mgr.channel.regions["ag"].uses > 1 << 32, "it was passed"
    return opened.quick


def batches_too_long(rank: int, size: int) -> tuple[int, int]:
    """Where the driver takes three operations at a time: how many operations were quick, and how many were refused."""
    with (
        mock.patch.object(word_sheet, "MAX_OPERATIONS", 3),
        counted() as opened,
        ops.make_manager(SimulatedBackend, 30.0) as mgr,  # type: ignore[arg-type]
    ):
        for seed, partition in enumerate(ops.partitions(size, 4)):
            for kind in KINDS:
                ops.run_checked(mgr, kind, partition, seed)
    return opened.quick, opened.left


def told_of_what_fails(rank: int, size: int) -> list[tuple[int, int]]:
    """Of operations whose first GEMM raises: words of its descriptor that peers get, and words that the host gets."""
    found, partition = [], TokenPartition.balanced(31, size)
    for kind, owner, name in (("ring_rs", PartialGemm, "rows"), ("ring_ag", RowGemm, "rows"), ("launch_ag", None, "")):
        mgr = ops.make_manager(_RecordingBackend)  # type: ignore[arg-type]
        driver, places = mgr.channel.transport.driver, _places(mgr)  # type: ignore[union-attr]
        assert isinstance(driver, _Recording), "the backend's"
        for seed in range(2):
            ops.run(mgr, "ring_rs" if kind == "ring_rs" else "ring_ag", partition, seed)
        driver.given.clear()

        def boom(*arguments: Any, **options: Any) -> Any:
            raise ValueError("something in the model")

        with counted() as opened, suppress(Exception):
            if owner is None:
                context = mgr.operation(mgr.get("qkv_fprop"), partition, scatter=False)
                fused_launch._quickly(context, boom, scatter=False)
            else:
                with mock.patch.object(owner, name, boom):
                    ops.run(mgr, kind, partition, 2)
        assert opened.quick == 1, "it was quick"
        named = _named(driver.given, places)
        published = {one.address for one in named if one.kind == WRITE_64}
        found.append((len(published), sum(one.address[0] == "host words" for one in named)))
        mgr.abort()
    return found


def aborts(rank: int, size: int, kind: str) -> tuple[Outcome, Outcome, int]:
    """The last rank aborts in its first GEMM, as a signal handler may: abort (others: close), check, threads left."""
    before, partition, aborted = len(_own_threads()), TokenPartition.balanced(31, size), []
    mgr = ops.make_manager(SimulatedBackend, 20.0)  # type: ignore[arg-type]
    for seed in range(2):
        ops.run_checked(mgr, kind, partition, seed)
    owner: Any = RowGemm if kind == "ring_ag" else PartialGemm
    real = owner.rows

    def rows(*arguments: Any, **options: Any) -> None:
        if not aborted:
            aborted.append(attempt(mgr.abort))
        real(*arguments, **options)

    disturbance = mock.patch.object(owner, "rows", rows) if rank == size - 1 else nullcontext()
    with counted() as opened, disturbance, suppress(Exception):
        ops.run(mgr, kind, partition, 2)
    assert opened.quick == 1, "it was quick"
    started, check = time.monotonic(), attempt(mgr.check)
    while check.error == "ok" and time.monotonic() < started + 8.0:
        time.sleep(0.02)
        check = attempt(mgr.check)
    return aborted[0] if rank == size - 1 else attempt(mgr.close), check, len(_own_threads()) - before


# -- what is left to the other way -------------------------------------------------------------------------------


def left_to_the_exchange(rank: int, size: int) -> dict[str, tuple[int, int]]:
    """Under each thing that is out of the ordinary on rank 0: how many operations were quick there, and were not."""
    found: dict[str, tuple[int, int]] = {}
    partition = TokenPartition.balanced(31, size)
    with ops.make_manager(SimulatedBackend, 30.0) as mgr:  # type: ignore[arg-type]
        channel = mgr.channel
        assert channel is not None, "several ranks"

        def set_to(name: str, value: Any, owner: Any = channel) -> Any:
            return mock.patch.object(owner, name, value)

        seen: list[str] = []
        cases: dict[str, Callable[[], Any]] = {
            "first uses": nullcontext,
            "nothing": nullcontext,
            "a transfer hook": lambda: faults.before_transfers(mgr, lambda transfer: seen.append("transfer")),
            "a GEMM hook": lambda: faults.before_gemms(mgr, lambda stream: seen.append("gemm")),
            "the comm stream": lambda: faults.delay_stream(mgr, "comm", 1e-4),
            "the word stream": lambda: faults.delay_stream(mgr, "words", 1e-4),
            "the caller's stream": lambda: faults.delay_stream(mgr, "caller", 1e-4),
            "a trace": lambda: set_to("trace", Trace(channel.device)),
            "a meter that measures": lambda: set_to("meter", Meter(channel.device, every=1)),
            "a meter, one in three": lambda: set_to("meter", Meter(channel.device, every=3)),
            "nothing again": nullcontext,
        }
        for seed, (what, disturb) in enumerate(cases.items()):
            with disturb() if rank == 0 else nullcontext(), counted() as opened:
                for repeat in range(3):
                    for kind in KINDS:
                        ops.run_checked(mgr, kind, partition, seed + repeat)
                if what == "a meter, one in three" and rank == 0:
                    assert channel.meter is not None
                    rows = channel.meter.stats().values()
                    found["metered"] = (sum(int(row["metered_calls"]) for row in rows), 0)
            found[what] = opened.quick, opened.left
        assert rank or {"transfer", "gemm"} <= set(seen), "the hooks were called"
        mgr.check()
    return found


def raises(rank: int, size: int, kind: str, after: int, who: int) -> tuple[Outcome, Outcome, int]:
    """Rank ``who`` raises in GEMM number ``after`` of its third operation: check, close, how many were quick."""
    partition = TokenPartition.balanced(31, size)
    mgr = ops.make_manager(SimulatedBackend, 20.0)  # type: ignore[arg-type]
    done = 0

    def boom(real: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal done
            done += 1
            if done > after:
                raise ValueError("something in the model")
            return real(*arguments, **options)

        return call

    with counted() as opened:
        for seed in range(2):
            ops.run_checked(mgr, kind, partition, seed)
        owner, name = {"ring_ag": (RowGemm, "rows"), "ring_rs": (PartialGemm, "rows")}.get(kind, (torch, "mm"))
        started = time.monotonic()
        with mock.patch.object(owner, name, boom(getattr(owner, name))) if rank == who else nullcontext():
            with suppress(Exception):
                ops.run(mgr, kind, partition, 2)
            outcome = attempt(mgr.check)
            while outcome.error == "ok" and time.monotonic() < started + 8.0:
                time.sleep(0.02)
                outcome = attempt(mgr.check)
        flights = mgr.channel.in_flight  # type: ignore[union-attr]
        while flights.oldest() is not None and time.monotonic() < started + 8.0:
            time.sleep(0.02)
        assert flights.oldest() is None, "the host never learns that the device has left it"
    return outcome._replace(seconds=time.monotonic() - started), attempt(mgr.close), opened.quick
