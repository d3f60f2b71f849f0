"""Operations that have started and are not known to have finished: what the watchdog looks at."""

from __future__ import annotations

import time
from collections import deque

from tpoverlap.comm.descriptor import Descriptor
from tpoverlap.comm.streams import Event


class Flight:
    """One operation. ``finished``: on a device, an event after all of its work; ``over``: it needs no more watching."""

    __slots__ = ("descriptor", "finished", "over", "started_s")

    def __init__(self, descriptor: Descriptor) -> None:
        self.descriptor = descriptor
        self.started_s = time.monotonic()
        self.finished: Event | None = None
        self.over = False

    def is_over(self) -> bool:
        """Whether its work is done. Never blocks."""
        return self.over or (self.finished is not None and self.finished.done())


class InFlight:
    """In the order in which they started. One thread starts and lands them; the watchdog's may look at any time."""

    def __init__(self) -> None:
        self._flights: deque[Flight] = deque()

    def start(self, descriptor: Descriptor) -> Flight:
        """An operation begins."""
        flight = Flight(descriptor)
        self._flights.append(flight)
        return flight

    def land(self, flight: Flight, finished: Event | None) -> None:
        """The work of ``flight`` is done (``finished`` None), or enqueued, and done when ``finished`` is."""
        if finished is None:
            flight.over = True
        flight.finished = finished
        flights = self._flights
        while flights:
            first = flights[0]
            if not (first.over or (first.finished is not None and first.finished.done())):  # `is_over`, fewer calls
                break
            flights.popleft()

    def oldest(self) -> Flight | None:
        """The operation that has been running longest; None: nothing runs."""
        for flight in list(self._flights):
            if not flight.is_over():
                return flight
        return None

    def descriptors(self) -> list[Descriptor]:
        """Of all that may be running, the oldest first."""
        return [flight.descriptor for flight in list(self._flights)]

    def clear(self) -> None:
        """Nothing is watched any more."""
        self._flights.clear()
