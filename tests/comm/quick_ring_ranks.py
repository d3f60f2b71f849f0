"""Rank functions of `test_quick_ring`: operations in few calls beside those that `DeviceExchange` does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch

import tpoverlap as tpo
from tests.comm import operations as ops
from tests.costs.null_device import NullBackend, NullDriver
from tpoverlap import pieces
from tpoverlap.comm.quick_ring import QuickRing
from tpoverlap.memory.driver import OPERATION_BYTES, PACK, WAIT_32, WAIT_64, MemoryOperations

KINDS = ("ring_ag", "ring_rs", "bulk_ag", "bulk_rs")


@contextmanager
def cut_early(*, narrow: bool = True) -> Iterator[None]:
    """Chunks of few rows have several pieces; ``narrow``: of a gather they are multiplied one by one."""
    sizes = {
        **{"GATHER_ROWS_OF_TWO": 12, "FULL_PIECE": 3 * ops.WIDTH, "MIN_PIECE_ROWS": 2, "BYTES_OF_FOUR": 600},
        **{"NARROW_OUTPUT": 2048 if narrow else 0, "NARROW_OPERAND_BYTES": 0},
    }
    with mock.patch.multiple(pieces, **sizes):
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
            for kind in (*KINDS, "gathered"):
                driver.given.clear()
                if kind == "gathered":
                    x, w = ops._x(partition, seed)[partition.rows(rank)], ops._w(rank, seed, ops.OUT)
                    tpo.all_gather_gemm(x, w, mgr.layer("qkv"), partition=partition, return_gathered=True)
                else:
                    ops.run(mgr, kind, partition, seed)
                found.append(_named(driver.given, places))
        calls = dict(driver.calls)
    if quick:
        assert opened.quick > 4 * turns, f"only {opened.quick} operations were quick"
    return found, calls


def same_words(rank: int, size: int, turns: int, narrow: bool) -> list[str]:
    """What differs between the two ways: on each stream the same writes and copies in the same order, the same waits in
    the same order, in no more calls. Where nothing is sent after them, the comm stream may wait instead of the word
    stream.
    """
    quick, fewer = _given(rank, size, turns, narrow, quick=True)
    slow, more = _given(rank, size, turns, narrow, quick=False)
    wrong = []
    for number, both in enumerate(zip(quick, slow, strict=True)):
        mine, its = (_by_stream(given) for given in both)
        wrong += [
            f"operation {number}, {what}: {mine.get(what)} instead of {its.get(what)}"
            for what in {*mine, *its}
            if mine.get(what) != its.get(what)
        ]
    wrong += [f"{fewer[name]} {name} instead of {more[name]}" for name in more if fewer.get(name, 0) > more[name]]
    return wrong


def _by_stream(given: list[Given]) -> dict[str, list[Given]]:
    found: dict[str, list[Given]] = {}
    for one in given:
        waits = one.kind in (WAIT_32, WAIT_64)
        found.setdefault("waits" if waits else f"stream {one.stream}", []).append(one._replace(stream=0))
    return found
