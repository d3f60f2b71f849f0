"""The search: measure, decide, confirm, file; bucket by bucket, until all is done or the time is up."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from tpoverlap.tools.tune.decide import Result, Times, beats, slowest, winner
from tpoverlap.tools.tune.job import Ask, Bucket, TuneJob
from tpoverlap.tools.tune.state import State

LARGEST_SHARE: Final = 3.0
"""Of an even share of the time that is left, what one bucket may take: the largest T come first and take longest."""

Measure = Callable[[Ask], Sequence[Times] | None]
"""Runs one `Ask` on all ranks; each rank's times, in rank order. None: its ``limit_s`` was over first."""

Listener = Callable[[int, int, str], None]
"""``(done, total, what comes next)``."""


@dataclass(frozen=True)
class Outcome:
    """All buckets with their results; None where the budget ended first."""

    buckets: tuple[Bucket, ...]
    results: dict[str, Result]

    def result(self, bucket: Bucket) -> Result | None:
        """What was measured of ``bucket``."""
        return self.results.get(bucket.key)

    @property
    def num_measured(self) -> int:
        """Buckets that have a result."""
        return sum(bucket.key in self.results for bucket in self.buckets)

    @property
    def is_complete(self) -> bool:
        """Whether every bucket has one."""
        return self.num_measured == len(self.buckets)


def tune(
    job: TuneJob,
    buckets: Sequence[Bucket],
    measure: Measure,
    state: State,
    *,
    budget_s: float,
    listen: Listener,
    clock: Callable[[], float] = time.monotonic,
    begin_s: float | None = None,
) -> Outcome:
    """Measure what ``state`` lacks. One process decides, so all ranks get the same choice.

    Args:
        budget_s: seconds. No bucket is begun that the latest ones would not have finished in what is left, and the
            ranks give up a bucket when it is over: half of one is worth nothing.
        clock: seconds; for tests.
        begin_s: when the budget began, by ``clock``; None: now.
    """
    end = (clock() if begin_s is None else begin_s) + budget_s
    done = sum(bucket.key in state.results for bucket in buckets)
    took: list[float] = []
    for bucket in buckets:
        if bucket.key in state.results:
            continue
        begun = clock()
        # The median: the first bucket of a method compiles its kernels, and the next one does not.
        if end - begun <= (median(took[-3:]) if took else 0.0):
            break
        listen(done, len(buckets), f"{', '.join(bucket.names)} T {bucket.low + 1}..{bucket.high}")
        left = sum(one.key not in state.results for one in buckets)
        share_s = LARGEST_SHARE * (end - begun) / left
        result = measure_bucket(job, bucket, measure, share_s, lambda: end - clock())
        if result is None:
            break
        state.add(bucket.key, result)
        took.append(clock() - begun)
        done += 1
    listen(done, len(buckets), "")
    known = {bucket.key for bucket in buckets}
    return Outcome(tuple(buckets), {key: one for key, one in state.results.items() if key in known})


def measure_bucket(
    job: TuneJob, bucket: Bucket, measure: Measure, share_s: float, left_s: Callable[[], float]
) -> Result | None:
    """All candidates in one interleaved run; then the winner and the default alone in another. None: no time.

    Each of the two makes fewer rounds where it would take longer than ``share_s``.
    """
    by_rank = measure(bucket.ask(job, range(len(bucket.candidates)), share_s, left_s()))
    if by_rank is None:
        return None
    times = slowest(by_rank)
    won = winner(times, bucket.default)
    frozen = tuple(tuple(row) for row in times)
    if won == bucket.default:
        return Result(frozen, won, won, None)
    by_rank = measure(bucket.ask(job, (bucket.default, won), share_s, left_s()))
    if by_rank is None:  # unconfirmed is unmeasured: the next run begins this bucket anew
        return None
    default, again = slowest(by_rank)
    chosen = won if beats(again, default) else bucket.default
    return Result(frozen, won, chosen, (tuple(default), tuple(again)))
