"""The always-on meter: how long operations waited, and for which rank. A `Trace` keeps every mark; this keeps sums.

=========  ===========================  ======================================================================
           measured                     how
=========  ===========================  ======================================================================
CPU        every operation              clock readings before and after each wait
CUDA       one in 128 of each           timing events before and after each wait, read when the GPU has passed them
           operation                    (asking never waits) and used again
=========  ===========================  ======================================================================

Each operation (name, direction and method) is counted for itself: a step repeats the same ones, so one in 128 of
all would meet some names always and others never. They start at different counts, so that no step measures all.

While a `Trace` records, the meter pauses.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from typing import Final

import torch

from tpoverlap.comm.descriptor import Descriptor

EVERY_ON_CUDA: Final = 128
"""A measured operation costs the host about as much as two that are not."""
_STRIDE: Final = 5
"""From one operation's first count to the next one's; has no factor in common with 128."""
_MOST_PENDING: Final = 64
"""Operations whose events the GPU has not passed. Beyond it a new one is not measured: the host runs far ahead."""

PART_OF_A_CALL: Final = "/fp8-scales"
"""Ends the label of an operation that belongs to another one's call: its time counts, it does not."""

_Point = float | torch.cuda.Event


class Meter:
    """Sums by GEMM name, for one manager.

    Args:
        device: of the manager.
        every: measure one call of each operation in so many; None: 1 on the CPU, 128 on CUDA.
    """

    def __init__(self, device: torch.device, every: int | None = None) -> None:
        self._cuda = device.type == "cuda"
        self.every = every if every is not None else EVERY_ON_CUDA if self._cuda else 1
        self._counts: dict[str, int] = {}  # by label
        self._pending: deque[MeteredOperation] = deque()
        self._spare: list[torch.cuda.Event] = []
        self._sums: dict[str, _Sums] = defaultdict(_Sums)

    def of(self, descriptor: Descriptor) -> MeteredOperation | None:
        """What an operation reports to, or None when this one is not measured."""
        label = descriptor.label
        count = self._counts[label] = self._count(label) + 1
        if count % self.every:
            return None
        self._collect()
        if len(self._pending) >= _MOST_PENDING or (self._cuda and torch.cuda.is_current_stream_capturing()):
            return None
        operation = MeteredOperation(label.partition(" ")[0], self._spare if self._cuda else None)
        operation.is_part = label.endswith(PART_OF_A_CALL)
        self._pending.append(operation)
        return operation

    def passes(self, label: str) -> bool:
        """Whether the next operation with ``label`` is not measured, and so need not ask `of`: it was counted then."""
        count = self._count(label) + 1
        if count % self.every == 0:
            return False
        self._counts[label] = count
        return True

    def _count(self, label: str) -> int:
        """Operations with ``label`` so far, from a start of its own."""
        count = self._counts.get(label)
        return len(self._counts) * _STRIDE % self.every if count is None else count

    def stats(self) -> dict[str, dict[str, float]]:
        """Name -> ``metered_calls``, ``exposed_us`` (waited, a metered call), ``exposed_percent`` of the operation, and
        ``waited_for_rank``, -1 when nobody in particular was waited for. Does not wait for the device.
        """
        self._collect()
        return {name: sums.as_dict() for name, sums in self._sums.items()}

    def _collect(self) -> None:
        pending = self._pending
        while pending and pending[0].is_over():
            operation = pending.popleft()
            self._sums[operation.name].add(operation)
            if self._cuda and not operation.failed:  # a failed one's events may never have been recorded
                self._spare += operation.events()


class MeteredOperation:
    """The points of one operation: begin, end, and pairs round each wait.

    ``spare``: events to use before new ones are made; None: clock readings.
    """

    __slots__ = ("_spare", "begin", "end", "failed", "is_part", "name", "points")

    def __init__(self, name: str, spare: list[torch.cuda.Event] | None) -> None:
        self.name = name
        self._spare = spare
        self.points: list[tuple[bool, int, _Point]] = []
        self.failed = self.is_part = False
        self.begin: _Point | None = None
        self.end: _Point | None = None

    def mark(self, what: str, peer: int) -> None:
        """``what``: begin, end, wait or arrived; anything else is not the meter's. Call it on the stream meant."""
        if what == "wait" or what == "arrived":
            self.points.append((what == "wait", peer, self._now()))
        elif what == "begin":
            self.begin = self._now()
        elif what == "end":
            self.end = self._now()

    def _now(self) -> _Point:
        spare = self._spare
        if spare is None:
            return time.perf_counter()
        event = spare.pop() if spare else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def events(self) -> list[torch.cuda.Event]:
        """Those of its points, when nobody asks for its times any more."""
        points = (self.begin, self.end, *(point for _, _, point in self.points))
        return [point for point in points if isinstance(point, torch.cuda.Event)]

    def is_over(self) -> bool:
        """Whether all its points have passed. Never blocks."""
        return self.failed or (self.end is not None and (isinstance(self.end, float) or bool(self.end.query())))

    def wall_us(self) -> float:
        """From begin to end; 0 for one that failed."""
        return _between(self.begin, self.end) if self.begin is not None and self.end is not None else 0.0

    def waits_us(self) -> list[tuple[int, float]]:
        """(peer, time) of each wait, in stream order; waits of one operation do not overlap."""
        waits, begun = [], None
        for is_wait, peer, point in self.points:
            if is_wait:
                begun = point
            elif begun is not None:
                waits.append((peer, _between(begun, point)))
                begun = None
        return waits


class _Sums:
    """Of one name."""

    def __init__(self) -> None:
        self.calls = 0
        self.wall_us = 0.0
        self.exposed_us = 0.0
        self.by_rank: dict[int, float] = defaultdict(float)

    def add(self, operation: MeteredOperation) -> None:
        if operation.failed:
            return
        self.calls += not operation.is_part
        self.wall_us += operation.wall_us()
        for peer, wait_us in operation.waits_us():
            self.exposed_us += wait_us
            if peer >= 0:
                self.by_rank[peer] += wait_us

    def as_dict(self) -> dict[str, float]:
        calls = max(1, self.calls)
        late = max(self.by_rank, key=lambda rank: self.by_rank[rank]) if any(self.by_rank.values()) else -1
        return {
            "metered_calls": self.calls,
            "exposed_us": round(self.exposed_us / calls, 1),
            "exposed_percent": round(100.0 * self.exposed_us / self.wall_us, 1) if self.wall_us else 0.0,
            "waited_for_rank": late,
        }


def _between(begin: _Point, end: _Point) -> float:
    if isinstance(begin, float):
        assert isinstance(end, float), "points of one operation are of one kind"
        return 1e6 * (end - begin)
    assert isinstance(end, torch.cuda.Event), "points of one operation are of one kind"
    return 1e3 * float(begin.elapsed_time(end))
