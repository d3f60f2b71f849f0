"""A device of paper: a clock and one stream, in place of CUDA's events and delays, for what measures queued work."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tpoverlap.tools.bench import timing
from tpoverlap.tools.bench.session import Session


class Paper:
    """A host clock and a stream that is busy until ``free_s``; the clock, the events and the delay of `timing`."""

    now_s = 0.0
    free_s = 0.0

    @classmethod
    def perf_counter(cls) -> float:
        return cls.now_s

    @classmethod
    def host(cls, time_s: float) -> None:
        cls.now_s += time_s

    @classmethod
    def device(cls, time_s: float) -> None:
        cls.free_s = max(cls.free_s, cls.now_s) + time_s

    @classmethod
    def sleep(cls, cycles: int) -> None:
        cls.device(cycles / 2e9)

    @classmethod
    def synchronize(cls, device: object = None) -> None:
        cls.now_s = max(cls.now_s, cls.free_s)


class PaperEvent:
    def __init__(self, enable_timing: bool) -> None:
        self.at_s = 0.0

    def record(self) -> None:
        self.at_s = max(Paper.free_s, Paper.now_s)

    def query(self) -> bool:
        return Paper.now_s >= self.at_s

    def elapsed_time(self, end: PaperEvent) -> float:
        return 1e3 * (end.at_s - self.at_s)


class CudaSession(Session):
    @property
    def is_cuda(self) -> bool:
        return True


@contextmanager
def on_paper() -> Iterator[None]:
    fakes = {"Event": PaperEvent, "_sleep": Paper.sleep, "synchronize": Paper.synchronize}
    before = {name: getattr(torch.cuda, name) for name in fakes}
    for name, fake in fakes.items():
        setattr(torch.cuda, name, fake)
    timing.time = Paper  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(torch.cuda, name, value)
        timing.time = time  # type: ignore[attr-defined]
