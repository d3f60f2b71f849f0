"""How long a GEMM takes inside an operation, by events on its own stream (on the CPU by the host's clock)."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch

from tpoverlap.tools.bench.baselines import Run


class GemmClock:
    """Put `around` where the GEMM is called; `take` gives the time of the last calls once the device is done.

    An event pair costs a few microseconds of device time around a GEMM, so a GEMM alone is timed by the same means.
    """

    def __init__(self, is_cuda: bool) -> None:
        self._is_cuda = is_cuda
        self._pairs: list[tuple[Any, Any]] = []

    def around(self, gemm: Run) -> Run:
        """``gemm`` with a mark before and after it, on whatever stream is current when it is called."""

        def marked() -> torch.Tensor:
            begin = self._mark()
            product = gemm()
            self._pairs.append((begin, self._mark()))
            return product

        return marked

    def take(self, calls: int) -> float:
        """Median microseconds of the last ``calls`` GEMMs, which have finished; forgets all of them."""
        pairs, self._pairs = self._pairs[-calls:], []
        if self._is_cuda:
            return median(1e3 * float(begin.elapsed_time(end)) for begin, end in pairs)
        return median(1e6 * (end - begin) for begin, end in pairs)

    def _mark(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
