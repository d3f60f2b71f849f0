"""Rank functions of `test_quick_order`: what comes before what, over all streams of a rank."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch

from tests.comm import operations as ops
from tests.comm.quick_ring_ranks import KINDS, _launch, counted
from tests.costs.null_device import NullBackend, NullDriver
from tpoverlap.comm.device_streams import DeviceStream
from tpoverlap.memory.driver import OPERATION_BYTES, PACK, WAIT_32, WAIT_64, WRITE_64, MemoryOperations
from tpoverlap.testing.simulated import CALLER, SimulatedBackend
from tpoverlap.tokens import TokenPartition

COPY = 0
_LAUNCHED = ("launch_ag", "launch_rs")


class Event(NamedTuple):
    """One memory operation, or a copy, and the latest event that its stream is behind, by stream."""

    stream: int
    kind: int
    behind: dict[int, int]


class _Ordering(NullDriver):
    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.behind: dict[int, dict[int, int]] = {}

    def submit(self, stream: int, operations: MemoryOperations) -> None:
        super().submit(stream, operations)
        for number in range(operations.count):
            self._add(stream, PACK.unpack_from(operations.buffer, number * OPERATION_BYTES)[0])

    def copy(self, stream: int, target: int, source: int, size_bytes: int) -> None:
        super().copy(stream, target, source, size_bytes)
        self._add(stream, COPY)

    def follow(self, stream: int, leader: int) -> None:
        super().follow(stream, leader)
        mine = self.behind.setdefault(stream, {})
        for which, number in self.behind.get(leader, {}).items():
            mine[which] = max(number, mine.get(which, -1))

    def _add(self, stream: int, kind: int) -> None:
        behind = self.behind.setdefault(stream, {})
        self.events.append(Event(stream, kind, dict(behind)))
        behind[stream] = len(self.events) - 1


class _OrderingBackend(NullBackend):
    def driver(self) -> NullDriver:
        return _Ordering()


def _manager() -> Any:
    return ops.make_manager(_OrderingBackend, max_rows_per_rank=ops.CAPACITY)  # type: ignore[arg-type]


def _ordering(mgr: Any) -> _Ordering:
    driver = mgr.channel.transport.driver
    assert isinstance(driver, _Ordering), "the backend's"
    return driver


def joined(rank: int, size: int, turns: int) -> list[str]:
    """Quick operations after which the caller's stream goes on before a compare, an arrival or a copy."""
    wrong = []
    with _manager() as mgr, counted() as opened, torch.no_grad():
        driver = _ordering(mgr)
        for seed, partition in enumerate(ops.partitions(size, turns)):
            for kind in (*KINDS, *_LAUNCHED):
                first = len(driver.events)
                if kind in _LAUNCHED:
                    _launch(mgr, partition, scatter=kind == "launch_rs")
                else:
                    ops.run(mgr, kind, partition, seed)
                reached = driver.behind[CALLER]
                wrong += [
                    f"{kind}, {partition.counts}: event {number} of kind {event.kind} on stream {event.stream}"
                    for number, event in enumerate(driver.events[first:], first)
                    if event.kind in (COPY, WAIT_32, WAIT_64) and reached.get(event.stream, -1) < number
                ]
    assert opened.quick == len((*KINDS, *_LAUNCHED)) * turns - 2, "all but the first use of each region"
    return wrong


def ahead(rank: int, size: int, others: int) -> int:
    """After ``others`` operations without the word stream comes one launch. Operations between the last one whose end
    its descriptor is behind, and it.
    """
    partition = TokenPartition.balanced(31, size)
    with _manager() as mgr, torch.no_grad():
        driver = _ordering(mgr)
        for seed in range(2):
            ops.run(mgr, "ring_ag", partition, seed)
        ends = [len(driver.events)]
        for seed in range(others):
            ops.run(mgr, "sequential_ag", partition, seed)
            ends.append(len(driver.events))
        with counted() as opened:
            _launch(mgr, partition, scatter=False)
        assert opened.quick == 1, "it was quick"
        published = next(event for event in driver.events[ends[-1] :] if event.kind == WRITE_64)
        last = max(published.behind.values(), default=-1)
        return sum(last < end - 1 for end in ends)


def late_credits(rank: int, size: int) -> int:
    """The word stream of rank 0 is late with the credits of an operation. The second one after it, all on the caller's
    stream, gives credits for the same slot, to a rank that sends nothing. Then that rank sends again.
    """
    even, one_sends = TokenPartition.balanced(24, size), TokenPartition((24, *[0] * (size - 1)))
    turns = [("ring_ag", even)] * 3 + [("sequential_ag", one_sends)] * 2 + [("ring_ag", even)] * 4
    with ops.make_manager(SimulatedBackend, 5.0, max_rows_per_rank=24) as mgr:  # type: ignore[arg-type]
        words = mgr.channel.word_stream  # type: ignore[union-attr]
        assert isinstance(words, DeviceStream), "a device"
        for seed, (kind, partition) in enumerate(turns):
            if seed == 2 and rank == 0:
                words.driver.launch(words.handle, lambda: time.sleep(0.7))
            ops.run_checked(mgr, kind, partition, seed)
            if seed == 4:
                time.sleep(1.0)
        mgr.check()
    return len(turns)
