"""A device whose driver does nothing, at once: what is left is the host's own work, which can be counted."""

from __future__ import annotations

import torch

from tpoverlap.memory.driver import HostWords, MemoryOperations
from tpoverlap.memory.shared import SharedMemoryBackend
from tpoverlap.testing.simulated import SimulatedDriver

_EVERYTHING_DONE = 0x7FFFFFFF


class NullDriver(SimulatedDriver):
    """Counts its calls. No wait waits, nothing is copied, and every operation counts as finished."""

    simulated = False

    def submit(self, stream: int, operations: MemoryOperations) -> None:
        self.calls["submit"] = self.calls.get("submit", 0) + 1

    def copy(self, stream: int, target: int, source: int, size_bytes: int) -> None:
        self.calls["copy"] = self.calls.get("copy", 0) + 1

    def follow(self, stream: int, leader: int) -> None:
        self.calls["follow"] = self.calls.get("follow", 0) + 1

    def host_words(self, count: int) -> HostWords:
        words = torch.full((count,), _EVERYTHING_DONE, dtype=torch.int32)
        return HostWords(words.numpy().view("uint8").data.cast("I"), words.data_ptr(), words)


class NullBackend(SharedMemoryBackend):
    """Its driver is a `NullDriver`. Pass the class as ``backend=``; results are garbage."""

    name = "null"

    def driver(self) -> NullDriver:
        return NullDriver()
