"""The search: measure, decide, confirm, file; bucket by bucket, until all is done or the time is up."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tpoverlap.tools.tune.decide import Result, Times, beats, slowest, winner
from tpoverlap.tools.tune.job import Ask, Bucket, TuneJob
from tpoverlap.tools.tune.state import State

Measure = Callable[[Ask], Sequence[Times]]
"""Runs one `Ask` on all ranks; each rank's times, in rank order."""

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
) -> Outcome:
    """Measure what ``state`` lacks. One process decides, so all ranks get the same choice.

    Args:
        budget_s: no bucket is begun after so many seconds.
        clock: seconds; for tests.
    """
    begin = clock()
    done = sum(bucket.key in state.results for bucket in buckets)
    for bucket in buckets:
        if bucket.key in state.results:
            continue
        if clock() - begin >= budget_s:
            break
        listen(done, len(buckets), f"{', '.join(bucket.names)} T {bucket.low + 1}..{bucket.high}")
        state.add(bucket.key, measure_bucket(job, bucket, measure))
        done += 1
    listen(done, len(buckets), "")
    known = {bucket.key for bucket in buckets}
    return Outcome(tuple(buckets), {key: one for key, one in state.results.items() if key in known})


def measure_bucket(job: TuneJob, bucket: Bucket, measure: Measure) -> Result:
    """All candidates in one interleaved run; then the winner and the default alone in another."""
    times = slowest(measure(bucket.ask(job, range(len(bucket.candidates)))))
    won = winner(times, bucket.default)
    frozen = tuple(tuple(row) for row in times)
    if won == bucket.default:
        return Result(frozen, won, won, None)
    default, again = slowest(measure(bucket.ask(job, (bucket.default, won))))
    chosen = won if beats(again, default) else bucket.default
    return Result(frozen, won, chosen, (tuple(default), tuple(again)))
