"""Time of one operation: interleaved rounds, several calls a round, medians, slowest rank, eager and queued.

Eager is what a caller sees: back-to-back calls, host time included where the device waits for it. Queued is the
device alone: the calls are enqueued while a delay kernel holds the stream, so no launch is waited for. A queued round
whose delay ended before its last call was enqueued would count host time; it is repeated with fewer calls or dropped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Final

import torch
import torch.distributed as dist

from tpoverlap.tools.bench.baselines import Run
from tpoverlap.tools.bench.session import Session

_WARM_UP_CALLS: Final = 2
_TARGET_ROUND_US: Final = 6000.0
_MIN_CALLS, _MAX_CALLS = 6, 40
_LEAD_CALLS: Final = 2
"""Of an eager round, before its clock starts: a step has operations before this one, too."""
_MIN_DELAY_MS, _MAX_DELAY_MS = 1.0, 80.0
_FIRST_DELAY_MS: Final = 10.0
_MIN_QUEUED: Final = 4
_CYCLES_A_MS: Final = 2_000_000
"""Of a GPU at 2 GHz; at a lower clock the delay is longer, which does no harm."""


@dataclass(frozen=True)
class Times:
    """Of one operation, on the slowest rank. ``queued_us`` is None on the CPU, and where no round was covered."""

    eager_us: float
    queued_us: float | None
    queued_operations: int

    def of(self, mode: str) -> float | None:
        """``eager_us`` or ``queued_us`` by name ("eager", "queued")."""
        return self.eager_us if mode == "eager" else self.queued_us


def measure(
    session: Session,
    runs: Mapping[str, Run],
    *,
    queued: bool = True,
    calls: int | None = None,
    queued_operations: int | None = None,
    leads: Mapping[str, Run] | None = None,
    twice: Collection[str] = (),
    after_round: Callable[[str, str, int], object] = lambda label, mode, calls: None,
) -> dict[str, Times]:
    """Times of each of ``runs``, which are the same on every rank and were checked before. Collective.

    Args:
        calls: of an eager round; None: as many as fill the clock. A long run warms up with its first such round.
        queued_operations: of a queued round, at most; None: what the job says.
        twice: of these labels, which are compared most closely, a round more behind each round of all.
        leads: label -> what runs before the clock of an eager round starts; else two calls of the run itself.
        after_round: called with label, "eager" or "queued", and the number of calls of a round that counts, as soon as
            the device has finished it.
    """
    stopwatch = _Stopwatch(session)
    for run in runs.values():
        for _ in range(_WARM_UP_CALLS if calls is None else 1):
            run()
    counts = {label: calls or stopwatch.eager_calls(run) for label, run in runs.items()}
    plans: dict[str, _Queue] = {}
    if queued and session.is_cuda:
        plans = {label: stopwatch.plan_queue(run, queued_operations) for label, run in runs.items()}
    eager: dict[str, list[float]] = {label: [] for label in runs}
    delayed: dict[str, list[float]] = {label: [] for label in runs}
    labels = list(runs)
    for turn in range(session.job.rounds):
        shift = turn % len(labels)
        in_turn = labels[shift:] + labels[:shift]  # nobody is always the one behind the longest kernel
        for label in in_turn + [label for label in in_turn if label in twice]:
            lead = None if leads is None else leads.get(label)
            eager[label].append(stopwatch.eager_round(runs[label], counts[label], lead))
            after_round(label, "eager", counts[label])
            if label in plans:
                time_us, covered = stopwatch.queued_round(runs[label], plans[label])
                if covered:
                    delayed[label].append(time_us)
                    after_round(label, "queued", plans[label].operations)
    mine = [(median(eager[label]), delayed[label]) for label in labels]
    everyone: list[list[tuple[float, list[float]]]] = session.agree(mine)
    times: dict[str, Times] = {}
    for number, label in enumerate(labels):
        rounds = [rank[number][1] for rank in everyone]
        queued_us = max(median(values) for values in rounds) if rounds[0] else None
        num_queued = plans[label].operations if label in plans else 0
        times[label] = Times(max(rank[number][0] for rank in everyone), queued_us, num_queued)
    return times


@dataclass
class _Queue:
    operations: int
    delay_ms: float


class _Stopwatch:
    """Rounds of one operation on this rank's device."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._flag = torch.zeros(1)
        self._meet = torch.zeros(1, device=session.device)

    def eager_calls(self, run: Run) -> int:
        """Calls of a round: enough for the clock, and for what a call leaves to the next one; alike on all ranks."""
        time_us = self._largest(self.eager_round(run, _MIN_CALLS))
        return int(min(_MAX_CALLS, max(_MIN_CALLS, _TARGET_ROUND_US / max(time_us, 1.0))))

    def eager_round(self, run: Run, calls: int, lead: Run | None = None) -> float:
        """Microseconds a call, back to back, behind ``lead`` or two calls that are not timed."""
        self._session.barrier()
        if not self._session.is_cuda:
            start_s = time.perf_counter()
            for _ in range(calls):
                run()
            return 1e6 * (time.perf_counter() - start_s) / calls
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        for before in (run,) * _LEAD_CALLS if lead is None else (lead,):
            before()  # where nothing runs before, the first call's launches count whole
        begin.record()
        for _ in range(calls):
            run()
        end.record()
        torch.cuda.synchronize()
        return 1e3 * float(begin.elapsed_time(end)) / calls

    def plan_queue(self, run: Run, at_most: int | None = None) -> _Queue:
        """How many calls to queue, and behind how long a delay: the launch queue may hold fewer than asked for."""
        operations = self._session.job.queued_operations
        operations = operations if at_most is None else min(operations, at_most)
        plan = _Queue(operations, _FIRST_DELAY_MS)
        for _ in range(5):
            host_ms = self._queue(run, plan)[2]
            longest_ms = self._largest(host_ms)
            covered = longest_ms < plan.delay_ms
            wanted_ms = 1.4 * longest_ms + _MIN_DELAY_MS
            if covered:
                plan.delay_ms = wanted_ms  # no longer than it has to be: it costs device time in every round
                return plan
            # With a full queue the host waits for the delay however long that is: then only fewer calls help.
            if wanted_ms <= _MAX_DELAY_MS and plan.delay_ms < _MAX_DELAY_MS / 3:
                plan.delay_ms = max(3 * plan.delay_ms, wanted_ms)
            else:
                plan.operations = max(min(_MIN_QUEUED, operations), plan.operations // 2)
        return plan

    def queued_round(self, run: Run, plan: _Queue) -> tuple[float, bool]:
        """(microseconds a call, whether the delay covered all launches on every rank)."""
        time_us, covered, host_ms = self._queue(run, plan)
        covered = self._largest(0.0 if covered else 1.0) == 0.0
        if not covered:
            plan.delay_ms = min(_MAX_DELAY_MS, max(1.5 * plan.delay_ms, 1.5 * self._largest(host_ms)))
            time_us, covered, _ = self._queue(run, plan)
            covered = self._largest(0.0 if covered else 1.0) == 0.0
        return time_us, covered

    def _queue(self, run: Run, plan: _Queue) -> tuple[float, bool, float]:
        """(microseconds a call, delay covered the launches, milliseconds that the launches took)."""
        self._session.barrier()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(int(plan.delay_ms * _CYCLES_A_MS))
        if not self._session.job.shares_gpus:
            dist.all_reduce(self._meet, group=self._session.group)  # on the device: the delays end at different times
        begin.record()
        start_s = time.perf_counter()
        for _ in range(plan.operations):
            run()
        end.record()
        host_ms = 1e3 * (time.perf_counter() - start_s)
        covered = not begin.query()
        torch.cuda.synchronize()
        return 1e3 * float(begin.elapsed_time(end)) / plan.operations, covered, host_ms

    def _largest(self, value: float) -> float:
        """The largest of all ranks' values."""
        self._flag.fill_(value)
        dist.all_reduce(self._flag, op=dist.ReduceOp.MAX, group=self._session.group)
        return float(self._flag)
