"""Streams of `benchmarks.tails`: a caller's, one of high priority beside it, and one whose copies stand for a link.

On the CPU all of it happens in the order of the calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from statistics import median
from typing import Any

import torch

from tpoverlap.gemm.cublaslt import LtProducts, lt_products
from tpoverlap.gemm.cublaslt.library import CublasLt

Event = torch.cuda.Event | None
LINK_FIXED_US, LINK_BYTES_A_US = 2.3, 380e3
"""Of a push over NVLink between two H200s: the lines through ``transfer alone, push`` of bench_gemm."""
_SM_COUNT_TARGET = 15  # cublasLtMatmulDescAttributes_t
_STAND_IN_BYTES, _DELAY_CYCLES = 16 << 20, 20_000_000
_CPU_PROCESSORS = 3  # so that tiny results have several waves


class FewProcessors(CublasLt):
    """The library, which chooses and launches for ``count`` multiprocessors: others are to have the rest."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = count

    def new_product(self) -> int:
        product = super().new_product()
        self.set_number(product, _SM_COUNT_TARGET, self._count, 4)
        return product


class Lanes:
    """Where things are queued.

    Attributes:
        side: of high priority; None on the CPU, as `caller`.
        processors: multiprocessors of the device.
        link: what `travel` was fitted to, for the record.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.is_cuda = device, device.type == "cuda"
        self.side: torch.cuda.Stream | None = None
        self._link: torch.cuda.Stream | None = None
        self._events: list[torch.cuda.Event] = []
        self._next = 0
        self.processors, self.link = _CPU_PROCESSORS, {}
        self.lt: LtProducts | None = None
        self.lt_half: LtProducts | None = None
        if self.is_cuda:
            self.side, self._link = (torch.cuda.Stream(device, priority=-1) for _ in range(2))
            self.processors = torch.cuda.get_device_properties(device).multi_processor_count
            self.lt = lt_products(device.index)
            assert self.lt is not None, "the log says why there is no cublasLt"
            self.lt_half = LtProducts(FewProcessors(self.processors // 2), device.index)
            self._from = torch.empty(_STAND_IN_BYTES, dtype=torch.uint8, pin_memory=True)
            self._to = torch.empty(_STAND_IN_BYTES, dtype=torch.uint8, device=device)
            self._fixed_us, self._bytes_a_us = self._fit()
            self.link = {"stand_in_fixed_us": self._fixed_us, "stand_in_bytes_a_us": self._bytes_a_us}
            self.link |= {"link_fixed_us": LINK_FIXED_US, "link_bytes_a_us": LINK_BYTES_A_US}

    @property
    def caller(self) -> torch.cuda.Stream | None:
        return torch.cuda.current_stream(self.device) if self.is_cuda else None

    @contextmanager
    def on(self, stream: torch.cuda.Stream | None) -> Iterator[None]:
        """What is called inside is queued there."""
        if stream is None:
            yield
            return
        with torch.cuda.stream(stream):
            yield

    def mark(self, stream: torch.cuda.Stream | None) -> Event:
        """An event behind everything that ``stream`` has. Events take turns: the 64th call has the first one again."""
        if stream is None:
            return None
        if len(self._events) < 64:
            self._events.append(torch.cuda.Event())
        event = self._events[self._next % 64]
        self._next += 1
        event.record(stream)
        return event

    def wait(self, stream: torch.cuda.Stream | None, event: Event) -> None:
        """What ``stream`` gets from now on waits for ``event``."""
        if stream is not None and event is not None:
            stream.wait_event(event)

    def travel(self, event: Event, size_bytes: int) -> Event:
        """What is recorded when ``size_bytes``, sent after ``event``, would be at a peer.

        A copy engine moves as many bytes from the host as take that long: no multiprocessor has a part in it.
        """
        if self._link is None:
            return None
        self.wait(self._link, event)
        wanted_us = LINK_FIXED_US + size_bytes / LINK_BYTES_A_US
        count = max(4096, int((wanted_us - self._fixed_us) * self._bytes_a_us))
        with torch.cuda.stream(self._link):
            self._to[:count].copy_(self._from[:count], non_blocking=True)
        return self.mark(self._link)

    def _fit(self) -> tuple[float, float]:
        """(us, bytes a us) of a copy from the host."""
        sizes = (_STAND_IN_BYTES // 16, _STAND_IN_BYTES // 2)
        times = [median(self._copy_us(size) for _ in range(3)) for size in sizes]
        rate = (sizes[1] - sizes[0]) / (times[1] - times[0])
        return max(0.0, times[0] - sizes[0] / rate), rate

    def _copy_us(self, size: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(_DELAY_CYCLES // 4)
        begin.record()
        for _ in range(10):
            self._to[:size].copy_(self._from[:size], non_blocking=True)
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) * 100

    def delayed(self, run: Callable[[], Any]) -> None:
        """``run`` queued behind a delay, so that what may run side by side does; returns when it is through."""
        if self.is_cuda:
            torch.cuda._sleep(_DELAY_CYCLES // 4)
        run()
        if self.is_cuda:
            torch.cuda.synchronize()


def kernels(run: Callable[[], Any], calls: int = 6) -> dict[str, Any]:
    """What the device runs in a call of ``run``, queued: names in order, us each, and what is between two of them.

    Returns:
        ``kernels``: of the last call, [name, us]; ``gap_us``: median from the end of a kernel to the start of the next
        one, negative where they overlap.
    """
    run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        torch.cuda._sleep(_DELAY_CYCLES)
        for _ in range(calls):
            run()
        torch.cuda.synchronize()
    spans = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in seen.events()
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.name.startswith(("Memcpy", "Memset"))
    )
    spans = [span for span in spans if "spin_kernel" not in span[2]]
    if not spans or len(spans) % calls:
        return {"kernels": [], "gap_us": None, "problem": f"the profiler saw {len(spans)} kernels of {calls} calls"}
    gaps = [after[0] - before[1] for before, after in pairwise(spans)]
    last = spans[-(len(spans) // calls) :]
    found = [[name[:120], round(end - start, 2)] for start, end, name in last]
    return {"kernels": found, "gap_us": round(median(gaps), 2) if gaps else None}
