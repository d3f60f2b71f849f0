"""An optional record of what happened when, in stream order. For tests, `profile` and debugging; off by default."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import torch

from tpoverlap.comm.streams import Stream


@dataclass(frozen=True)
class Mark:
    """One point of a stream. ``time_us`` counts from the trace's start."""

    time_us: float
    stream: str
    what: str
    step: int


class Trace:
    """Marks on host or CUDA streams. `marks` waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._lock = threading.Lock()
        self._host: list[Mark] = []
        self._events: list[tuple[torch.cuda.Event, str, str, int]] = []
        self._start_s = time.perf_counter()
        if self._cuda:
            self._start_event = torch.cuda.Event(enable_timing=True)
            self._start_event.record()

    def mark(self, stream: Stream, what: str, step: int = -1) -> None:
        """Note that ``stream`` has got here. Call it inside ``stream.run``."""
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            with self._lock:
                self._events.append((event, stream.label, what, step))
        else:
            now_us = (time.perf_counter() - self._start_s) * 1e6
            with self._lock:
                self._host.append(Mark(now_us, stream.label, what, step))

    def marks(self) -> list[Mark]:
        """All marks so far, by time."""
        if self._cuda:
            torch.cuda.synchronize()
            marks = [
                Mark(1e3 * self._start_event.elapsed_time(event), label, what, step)
                for event, label, what, step in self._events
            ]
        else:
            with self._lock:
                marks = list(self._host)
        return sorted(marks, key=lambda mark: mark.time_us)
