"""Where the time of each named GEMM went: pure arithmetic on spans.

::

    caller  |== gemm ==|.wait.|== gemm ==|.wait.|=reduce=|    wall    = the operation, what is nested in it left out
    comm         |>>>> transfer >>>>|>>>>>>>>|                compute = gemm + read
                                                              exposed = wall - compute
                                                              idle    = none of the five: launches, Python

With ``sequential`` not every GEMM is marked: compute is then the wall less waiting, collective and adding.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

from tpoverlap.tools.profile.intervals import Intervals, intersect, length, subtract, union
from tpoverlap.tools.profile.model import COMPUTING, Span


@dataclass(frozen=True)
class Figures:
    """One GEMM name. Times are microseconds of one call: the call with the median wall time, on its slowest rank.

    Attributes:
        calls: on one rank. ``tokens``: least and most T.
        wall_us, compute_us, comm_us, overlapped_us, exposed_us, reduce_us, idle_us: see the module. ``comm_us`` is how
            long this rank's transfers or collective were busy, ``overlapped_us`` the part during which it computed.
        tail_us: from the end of the last computing to the end of the operation.
        wait_us: how long this name's ranks waited for each rank, summed over those that waited, median of all calls.
        wait_spread_us: of the same, how far apart the calls are (the middle half of them). ``late_calls``: in how many
            calls the rank was the one waited for longest. Both tell a late rank from noise; empty where not known.
        compute_alone_us, comm_alone_us, sequential_us: from a run without overlap, where there was one: its computing,
            its collective, and its wall time, which adds launches and the wait for the other ranks.
    """

    name: str
    method: str
    direction: str
    calls: int
    tokens: tuple[int, int]
    wall_us: float
    compute_us: float
    comm_us: float
    overlapped_us: float
    exposed_us: float
    reduce_us: float
    idle_us: float
    tail_us: float
    wait_us: Mapping[int, float] = field(default_factory=dict)
    wait_spread_us: Mapping[int, float] = field(default_factory=dict)
    late_calls: Mapping[int, int] = field(default_factory=dict)
    compute_alone_us: float | None = None
    comm_alone_us: float | None = None
    sequential_us: float | None = None

    @property
    def exposed_percent(self) -> float:
        """Exposed part of the wall time."""
        return 100.0 * self.exposed_us / self.wall_us if self.wall_us else 0.0

    @property
    def waited_for_rank(self) -> int | None:
        """The rank that the others waited for longest; None when nobody waited for anybody in particular."""
        waits = {rank: wait for rank, wait in self.wait_us.items() if wait > 0}
        return max(waits, key=lambda rank: waits[rank]) if waits else None

    def as_dict(self) -> dict[str, Any]:
        """For the JSON report; times rounded to 0.1 us."""
        alone = {key: getattr(self, key) for key in ("compute_alone_us", "comm_alone_us", "sequential_us")}
        times = {
            key: getattr(self, key)
            for key in ("wall_us", "compute_us", "comm_us", "overlapped_us", "exposed_us", "reduce_us", "idle_us")
        }
        return {
            "name": self.name,
            "method": self.method,
            "direction": self.direction,
            "calls": self.calls,
            "tokens": list(self.tokens),
            **{key: None if value is None else round(value, 1) for key, value in (times | alone).items()},
            "tail_us": round(self.tail_us, 1),
            "exposed_percent": round(self.exposed_percent, 1),
            "waited_for_rank": self.waited_for_rank,
            "wait_us": {str(rank): round(wait, 1) for rank, wait in sorted(self.wait_us.items())},
            "wait_spread_us": {str(rank): round(one, 1) for rank, one in sorted(self.wait_spread_us.items())},
            "late_calls": {str(rank): one for rank, one in sorted(self.late_calls.items())},
        }


def figures_of(spans: Sequence[Span]) -> list[Figures]:
    """One row a name, in the order in which the names were first called. Operations of all ranks together."""
    by_call: dict[tuple[int, int], list[Span]] = defaultdict(list)
    for span in spans:
        by_call[span.rank, span.call].append(span)
    computing = {
        rank: union(span.interval for span in spans if span.rank == rank and span.phase in COMPUTING)
        for rank in {span.rank for span in spans}
    }
    operations: dict[int, list[Span]] = defaultdict(list)
    for span in spans:
        if span.phase == "operation":
            operations[span.rank].append(span)
    rows: dict[str, dict[int, list[Figures]]] = defaultdict(lambda: defaultdict(list))
    for rank, own in operations.items():
        own.sort(key=lambda span: (span.begin_us, -span.end_us))
        for index, operation in enumerate(own):
            nested = union(_nested(operation, own[index + 1 :]))
            call = by_call[rank, operation.call]
            rows[operation.name][rank].append(_of_one_call(operation, nested, call, computing[rank]))
    return [_summary(by_rank) for by_rank in rows.values()]


def _nested(outer: Span, later: Sequence[Span]) -> list[tuple[float, float]]:
    inside = takewhile(lambda one: one.begin_us < outer.end_us, later)
    return [one.interval for one in inside if one.end_us <= outer.end_us]


def _of_one_call(operation: Span, nested: Intervals, spans: Sequence[Span], computing: Intervals) -> Figures:
    own = subtract(union([operation.interval]), nested)
    wall = length(own)

    def of(*phases: str) -> Intervals:
        return union(span.interval for span in spans if span.phase in phases)

    collective, wait, reduce = of("collective"), of("wait"), of("reduce")
    comm = union([*of("transfer"), *collective])
    if operation.method == "sequential":
        compute = subtract(own, union([*collective, *wait, *reduce]))
        hides: Intervals = []
    else:
        compute = intersect(of(*COMPUTING), own)
        hides = computing
    idle = subtract(own, union([*compute, *wait, *reduce, *collective]))
    waits: dict[int, float] = defaultdict(float)
    for span in spans:
        if span.phase == "wait" and span.peer >= 0:
            waits[span.peer] += span.end_us - span.begin_us
    last = compute[-1][1] if compute else operation.begin_us
    return Figures(
        name=operation.name,
        method=operation.method,
        direction=operation.direction,
        calls=1,
        tokens=(operation.num_tokens, operation.num_tokens),
        wall_us=wall,
        compute_us=length(compute),
        comm_us=length(comm),
        overlapped_us=length(intersect(comm, hides)),
        exposed_us=max(0.0, wall - length(compute)),
        reduce_us=length(reduce),
        idle_us=length(idle),
        tail_us=length(subtract(union([(last, operation.end_us)]), nested)),
        wait_us=dict(waits),
    )


def _summary(by_rank: Mapping[int, Sequence[Figures]]) -> Figures:
    """The calls line up: every rank makes the same ones. A trace may have lost the last of one rank."""
    calls = min(len(rows) for rows in by_rank.values())
    slowest = [max((rows[index] for rows in by_rank.values()), key=lambda row: row.wall_us) for index in range(calls)]
    median = statistics.median_low(row.wall_us for row in slowest)
    chosen = next(row for row in slowest if row.wall_us == median)
    peers = {peer for rows in by_rank.values() for row in rows for peer in row.wait_us}
    by_call = {
        peer: [sum(rows[index].wait_us.get(peer, 0.0) for rows in by_rank.values()) for index in range(calls)]
        for peer in peers
    }
    waits = {peer: statistics.median(values) for peer, values in by_call.items()}
    spread = {peer: _middle_half(values) for peer, values in by_call.items()}
    longest = [max(one[index] for one in by_call.values()) for index in range(calls)] if by_call else []
    late = {
        peer: sum(0 < value == most for value, most in zip(one, longest, strict=True)) for peer, one in by_call.items()
    }
    every = [row for rows in by_rank.values() for row in rows]
    tokens = (min(row.tokens[0] for row in every), max(row.tokens[1] for row in every))
    methods = sorted({row.method for row in every})
    return replace(chosen, calls=calls, tokens=tokens, wait_us=waits, wait_spread_us=spread, late_calls=late,
                   method="+".join(methods))  # fmt: skip


def _middle_half(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return high - low


def with_alone(figures: Sequence[Figures], alone: Sequence[Figures]) -> list[Figures]:
    """Add what a run without overlap measured: its compute, and its plain collective as the communication alone."""
    of_name = {row.name: row for row in alone}
    return [_beside(row, of_name[row.name]) if row.name in of_name else row for row in figures]


def _beside(row: Figures, alone: Figures) -> Figures:
    return replace(row, compute_alone_us=alone.compute_us, comm_alone_us=alone.comm_us, sequential_us=alone.wall_us)
