"""An optional record of what happened when, in stream order. For tests, `profile` and debugging; off by default.

====================  ============================  =====================================================
mark                  on                            when
====================  ============================  =====================================================
``begin``, ``end``    the caller's stream           an operation starts; everything it enqueued is ordered
``X_begin, X_end``    the stream that computes      X is gemm, read (of what was gathered) or reduce
``send``, ``sent``    the comm stream               the slot is free and the copy starts; it is done
``wait, arrived``     the stream that needs rows    it gets to the wait; the rows of ``peer`` are here
``collective_...``    the caller's stream           sequential's plain collective begins, ends
====================  ============================  =====================================================
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from tpoverlap.comm.streams import Stream


@dataclass(frozen=True)
class Call:
    """One traced operation: its place in the order of calls, its label (GEMM name, direction, method) and T."""

    number: int
    label: str
    num_tokens: int


@dataclass(frozen=True)
class Mark:
    """One point of a stream. ``time_us`` counts from the trace's start; ``peer`` is -1 where there is none."""

    time_us: float
    stream: str
    what: str
    step: int
    call: Call | None = None
    peer: int = -1


_Event = tuple[torch.cuda.Event, str, str, int, Call | None, int]


class Trace:
    """Marks on host or CUDA streams. `marks` waits for the device.

    Attributes:
        start_s: ``time.perf_counter()`` at mark time 0; one clock for all processes of a host.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._lock = threading.Lock()
        self._host: list[Mark] = []
        self._events: list[_Event] = []
        self._numbers = itertools.count()
        self._open = threading.local()
        if self._cuda:
            torch.cuda.synchronize(device)  # the start event then happens at start_s
        self.start_s = time.perf_counter()
        if self._cuda:
            self._start_event = torch.cuda.Event(enable_timing=True)
            self._start_event.record()

    @contextmanager
    def operation(self, label: str, num_tokens: int, stream: Stream) -> Iterator[Call]:
        """Marks made inside, by this thread, belong to this call, unless they name another."""
        call = Call(next(self._numbers), label, num_tokens)
        stack: list[Call] = self._open.__dict__.setdefault("calls", [])
        stack.append(call)
        stream.run(lambda: self.mark(stream, "begin", call=call))
        try:
            yield call
        finally:
            stream.run(lambda: self.mark(stream, "end", call=call))
            stack.pop()

    def current(self) -> Call | None:
        """The innermost operation that this thread has open."""
        stack: list[Call] = self._open.__dict__.get("calls", [])
        return stack[-1] if stack else None

    def mark(self, stream: Stream, what: str, step: int = -1, peer: int = -1, call: Call | None = None) -> None:
        """Note that ``stream`` has got here. Call it inside ``stream.run``."""
        if call is None:
            call = self.current()
        if self._cuda:
            if torch.cuda.is_current_stream_capturing():
                return  # a graph's events have no time of their own
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            with self._lock:
                self._events.append((event, stream.label, what, step, call, peer))
        else:
            now_us = (time.perf_counter() - self.start_s) * 1e6
            with self._lock:
                self._host.append(Mark(now_us, stream.label, what, step, call, peer))

    def marks(self) -> list[Mark]:
        """All marks so far, by time."""
        if self._cuda:
            torch.cuda.synchronize()
            marks = [
                Mark(1e3 * self._start_event.elapsed_time(event), label, what, step, call, peer)
                for event, label, what, step, call, peer in self._events
            ]
        else:
            with self._lock:
                marks = list(self._host)
        return sorted(marks, key=lambda mark: mark.time_us)
