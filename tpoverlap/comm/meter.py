"""The always-on meter: how long operations waited, and for which rank. A `Trace` keeps every mark; this keeps sums.

=========  ===========================  ======================================================================
           measured                     how
=========  ===========================  ======================================================================
CPU        every operation              clock readings before and after each wait
CUDA       one operation in sixteen     timing events before and after each wait, read when the GPU has passed them:
                                        asking never waits
=========  ===========================  ======================================================================

While a `Trace` records, the meter pauses.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from typing import Final

import torch

from tpoverlap.comm.descriptor import Descriptor

EVERY_ON_CUDA: Final = 16
_MOST_PENDING: Final = 64
"""Operations whose events the GPU has not passed. Beyond it a new one is not measured: the host runs far ahead."""

_Point = float | torch.cuda.Event


class Meter:
    """Sums by GEMM name, for one manager.

    Args:
        device: of the manager.
        every: measure one operation in so many; None: 1 on the CPU, 16 on CUDA.
    """

    def __init__(self, device: torch.device, every: int | None = None) -> None:
        self._cuda = device.type == "cuda"
        self._every = every if every is not None else EVERY_ON_CUDA if self._cuda else 1
        self._count = 0
        self._pending: deque[MeteredOperation] = deque()
        self._sums: dict[str, _Sums] = defaultdict(_Sums)

    def of(self, descriptor: Descriptor) -> MeteredOperation | None:
        """What an operation reports to, or None when this one is not measured."""
        self._count += 1
        if self._count % self._every:
            return None
        self._collect()
        if len(self._pending) >= _MOST_PENDING or (self._cuda and torch.cuda.is_current_stream_capturing()):
            return None
        operation = MeteredOperation(descriptor.label.partition(" ")[0], self._cuda)
        self._pending.append(operation)
        return operation

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


class MeteredOperation:
    """The points of one operation: begin, end, and pairs round each wait."""

    __slots__ = ("_cuda", "begin", "end", "failed", "name", "points")

    def __init__(self, name: str, cuda: bool) -> None:
        self.name = name
        self._cuda = cuda
        self.points: list[tuple[bool, int, _Point]] = []
        self.failed = False
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
        if not self._cuda:
            return time.perf_counter() * 1e6
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

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
        self.calls += 1
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
        return end - begin
    assert isinstance(end, torch.cuda.Event), "points of one operation are of one kind"
    return 1e3 * float(begin.elapsed_time(end))
