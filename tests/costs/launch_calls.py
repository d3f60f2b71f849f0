"""One launch of each kind of `GemmLauncher`, on a GPU that does nothing: how many Python calls, how long."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from types import FrameType
from typing import Any, NamedTuple

import torch

from tests.costs.null_kernels import NullKernelDriver, no_compiler
from tpoverlap.gemm import PartialGemm, RowGemm
from tpoverlap.gemm.fp8 import QuantizedTensor, ScaledPartialGemm, ScaledRowGemm
from tpoverlap.gemm.triton.gates import Slot
from tpoverlap.gemm.triton.launcher import GemmLauncher
from tpoverlap.memory.layout import MAX_PIECES
from tpoverlap.overlap.fused_blocks import gather_rows, scatter_rows

T, K, N = 256, 64, 768
E4M3 = torch.float8_e4m3fn


class Launches(NamedTuple):
    """Each prepares and launches once, as an operation does; the tensors' addresses differ from call to call."""

    driver: NullKernelDriver
    launcher: GemmLauncher
    by_name: dict[str, Callable[[], None]]


@contextmanager
def launches() -> Iterator[Launches]:
    """At R = 2 with half of T rows each."""
    driver = NullKernelDriver()
    launcher = GemmLauncher(torch.device("cpu"), 10.0, 16, driver=driver)
    half = torch.float16
    words, peers = torch.zeros(512, dtype=torch.int32), torch.zeros(2, 2, dtype=torch.int64)
    whole = torch.empty(T, K, dtype=half)
    slots = [Slot(whole.data_ptr(), words.data_ptr(), 0, 2, MAX_PIECES, peers) for _ in range(2)]
    shards, weight = [torch.empty(T // 2, K, dtype=half) for _ in range(3)], torch.empty(N, K, dtype=half)
    outs = [torch.empty(T, N, dtype=half) for _ in range(3)]
    tasks = [
        PartialGemm(
            [torch.empty(T, N, dtype=half)], [torch.empty(K, N, dtype=half).t()], None, torch.empty(K, dtype=half)
        )
        for _ in range(2)
    ]
    staging, summed, counters = whole.clone(), torch.empty(T // 2, K, dtype=half), torch.zeros(256, dtype=torch.int32)
    gathered, scattered = gather_rows((T // 2,) * 2, K, 0, 128), scatter_rows((T // 2,) * 2, K, 0, 128)
    epoch = 0

    def turn() -> int:
        nonlocal epoch
        epoch += 1
        return epoch

    by_name: dict[str, Callable[[], None]] = {}

    def add(prefix: str, tasks: Sequence[PartialGemm], rows: RowGemm, shards: Sequence[torch.Tensor]) -> None:
        (scaling,) = rows.scalings or (None,)
        gathers = whole.view(shards[0].dtype)

        def gather() -> None:
            e = turn()
            slot, own, out = slots[e % 2], shards[e % 3], outs[e % 3]
            launcher.gathered_rows(
                gathered, own, slot, lambda *_: gathers, rows.matrices[0], None, out, e, pushes=True, scaling=scaling
            )()

        def partial_rows() -> None:
            gemm = tasks[turn() % 2]
            launcher.tiles_per_word(scattered, gemm)
            launcher.partial_rows(scattered, gemm, staging, counters)()

        def own_rows() -> None:
            e = turn()
            launcher.own_rows(scattered, tasks[e % 2], summed, slots[e % 2], e)()

        def scatter() -> None:
            e = turn()
            launcher.scatter_rows(scattered, tasks[e % 2], summed, slots[e % 2], e)()

        by_name.update({f"{prefix}{f.__name__}": f for f in (gather, partial_rows, own_rows, scatter)})

    add("", tasks, RowGemm([weight.t()], [None], outs[:1]), shards)
    tasks8 = [
        ScaledPartialGemm(terms=[(_quantised(T, N), _quantised(K, N))], bias=torch.empty(K, dtype=half))
        for _ in range(2)
    ]
    rows8 = ScaledRowGemm(
        weights=[_quantised(N, K)], biases=[None], outs=outs[:1], x_scale=torch.ones(1, 1), x_format=E4M3
    )
    add("fp8 ", tasks8, rows8, [torch.empty(T // 2, K, dtype=torch.uint8) for _ in range(3)])
    with no_compiler():
        yield Launches(driver, launcher, by_name)


def _quantised(rows: int, columns: int) -> QuantizedTensor:
    return QuantizedTensor(torch.empty(rows, columns, dtype=E4M3), torch.ones(1, 1), torch.float16)


def count(work: Callable[[], object]) -> tuple[int, int]:
    """Python functions and C functions that ``work`` calls, itself left out; the least of several."""
    counted = []
    for _ in range(7):
        events = {"call": 0, "c_call": 0}

        def profile(frame: FrameType, event: str, argument: Any, events: dict[str, int] = events) -> None:
            if event in events:
                events[event] += 1

        sys.setprofile(profile)
        try:
            work()
        finally:
            sys.setprofile(None)
        counted.append((events["call"] - 1, events["c_call"] - 1))
    return min(counted)


def time_us(work: Callable[[], object], repeats: int = 2000) -> float:
    """Median of one call."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        times.append(1e6 * (time.perf_counter() - started))
    return median(times)


if __name__ == "__main__":
    with launches() as made:
        for name, work in made.by_name.items():
            for _ in range(20):
                work()
            python, c = count(work)
            print(f"{name}: {python} Python calls, {c} C calls, {time_us(work):.1f} us")
