"""Spans to figures, on traces made by hand whose answer is known."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpoverlap.comm import Call, Mark
from tpoverlap.tools.profile.figures import figures_of, with_alone
from tpoverlap.tools.profile.intervals import intersect, length, subtract, union
from tpoverlap.tools.profile.model import Phase, Span, parse_label, spans_of


def span(phase: Phase, begin_us: float, end_us: float, stream: str = "caller", **rest: object) -> Span:
    values: dict[str, object] = {"name": "fc1_fprop", "rank": 0, "method": "ring_exchange", "direction": "all-gather"}
    values |= {"num_tokens": 4096} | rest
    return Span(phase=phase, stream=stream, begin_us=begin_us, end_us=end_us, **values)  # type: ignore[arg-type]


def ring(rank: int = 0, call: int = 0, at_us: float = 0.0, wait_us: float = 20.0) -> list[Span]:
    """GEMM 100, wait, GEMM 100, 10 of launches; a transfer of 90 from 5 on."""
    peer = 1 - rank
    whole = 210.0 + wait_us
    parts: list[tuple[Phase, float, float, str]] = [
        ("operation", 0, whole, "caller"),
        ("gemm", 5, 105, "caller"),
        ("wait", 105, 105 + wait_us, "caller"),
        ("gemm", 105 + wait_us, 205 + wait_us, "caller"),
        ("transfer", 5, 95, "comm"),
    ]
    return [
        span(phase, at_us + begin, at_us + end, stream, rank=rank, call=call, peer=peer if phase == "wait" else -1)
        for phase, begin, end, stream in parts
    ]


def test_one_overlapped_all_gather() -> None:
    (row,) = figures_of(ring())
    assert (row.name, row.method, row.direction, row.calls, row.tokens) == (
        "fc1_fprop",
        "ring_exchange",
        "all-gather",
        1,
        (4096, 4096),
    )
    assert row.wall_us == pytest.approx(230) and row.compute_us == pytest.approx(200)
    assert row.comm_us == pytest.approx(90) and row.overlapped_us == pytest.approx(90)
    assert row.exposed_us == pytest.approx(30) and row.exposed_percent == pytest.approx(100 * 30 / 230)
    assert row.idle_us == pytest.approx(10) and row.tail_us == pytest.approx(5)
    assert row.waited_for_rank == 1 and row.wait_us == {1: pytest.approx(20)}


def test_the_median_call_of_the_slowest_rank_stands_for_all() -> None:
    walls = {0: (20.0, 30.0, 900.0), 1: (25.0, 10.0, 40.0)}  # slowest: 25 (rank 1), 30 (rank 0), 900 (rank 0)
    spans = [
        one
        for rank, waits in walls.items()
        for call, wait in enumerate(waits)
        for one in ring(rank, call, call * 2000.0, wait)
    ]
    (row,) = figures_of(spans)
    assert row.calls == 3 and row.wall_us == pytest.approx(240)
    assert row.wait_us == {1: pytest.approx(30), 0: pytest.approx(25)} and row.waited_for_rank == 1
    # For rank 1 was waited 20, 30, 900 and for rank 0 25, 10, 40: the middle halves, and who was the later one.
    assert row.wait_spread_us == {1: pytest.approx(465 - 25), 0: pytest.approx(32.5 - 17.5)}
    assert row.late_calls == {1: 2, 0: 1} and row.as_dict()["late_calls"] == {"0": 1, "1": 2}


def test_an_operation_inside_another_is_not_counted_twice() -> None:
    outer = {"name": "qkv_dgrad", "method": "bulk"}
    inner = {"name": "qkv_wgrad", "method": "bulk", "call": 1}
    spans = [
        span("operation", 0, 300, **outer),
        span("gemm", 0, 100, **outer),
        span("transfer", 0, 120, "comm", **outer),
        span("operation", 110, 290, **inner),
        span("gemm", 110, 280, **inner),
    ]
    first, second = figures_of(spans)
    assert first.wall_us == pytest.approx(120) and first.compute_us == pytest.approx(100)
    assert first.overlapped_us == pytest.approx(110)  # 100 behind its own GEMM, 10 behind the other's
    assert second.wall_us == pytest.approx(180) and second.compute_us == pytest.approx(170)


def test_the_plain_collective_is_exposed_and_the_rest_is_computing() -> None:
    plain = {"method": "sequential"}
    spans = [span("operation", 0, 500, **plain), span("wait", 0, 10, **plain), span("collective", 10, 160, **plain)]
    (row,) = figures_of(spans)
    assert (row.compute_us, row.comm_us, row.exposed_us, row.overlapped_us) == (340, 150, 160, 0)
    assert row.waited_for_rank is None and row.idle_us == 0


def test_what_was_measured_alone_is_added_by_name() -> None:
    plain = [span("operation", 0, 300, method="sequential"), span("collective", 0, 80, method="sequential")]
    rows = with_alone(figures_of(ring()), figures_of(plain))
    assert (rows[0].compute_alone_us, rows[0].comm_alone_us, rows[0].sequential_us) == (220, 80, 300)
    assert with_alone(figures_of(ring()), [])[0].sequential_us is None


def test_nothing_gives_nothing() -> None:
    assert figures_of([]) == []
    assert figures_of([span("gemm", 0, 1)]) == []  # no operation round it


# -- marks to spans ------------------------------------------------------------------------------------------------


def test_marks_are_paired_by_operation_and_stream() -> None:
    one, two = (
        Call(0, "fc1_fprop all-gather ring_exchange/aggregate", 7),
        Call(1, "fc2_fprop reduce-scatter pipeline/4", 7),
    )
    marks = [
        Mark(0, "caller", "begin", -1, one),
        Mark(1, "comm", "send", 1, one, 1),
        Mark(2, "caller", "end", -1, one),
        Mark(3, "caller", "begin", -1, two),
        Mark(4, "comm", "sent", 1, one, 1),
        Mark(5, "compute0", "gemm_begin", 0, two),
        Mark(6, "compute0", "gemm_begin", 9, None),  # of no operation
        Mark(8, "caller", "end", -1, two),  # its GEMM was never seen to end
    ]
    spans = spans_of(marks, 1, 100.0)
    assert [(one.name, one.phase, one.begin_us, one.end_us, one.peer) for one in spans] == [
        ("fc1_fprop", "operation", 100, 102, -1),
        ("fc1_fprop", "transfer", 101, 104, 1),
        ("fc2_fprop", "operation", 103, 108, -1),
    ]
    assert {one.rank for one in spans} == {1} and spans[2].method == "pipeline" and spans[0].num_tokens == 7


def test_labels() -> None:
    assert parse_label("qkv_dgrad reduce-scatter pipeline/4") == ("qkv_dgrad", "reduce-scatter", "pipeline")
    assert parse_label("mine") == ("mine", "", "")


# -- intervals against sets of integers ----------------------------------------------------------------------------

PIECES = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=6)


def cells(pieces: list[tuple[float, float]]) -> set[int]:
    return {cell for begin, end in pieces for cell in range(int(begin), int(end))}


@given(PIECES, PIECES)
def test_intervals_are_sets(a: list[tuple[float, float]], b: list[tuple[float, float]]) -> None:
    left, right = union(a), union(b)
    assert cells(left) == cells(a) and length(left) == len(cells(a))
    assert cells(intersect(left, right)) == cells(a) & cells(b)
    assert cells(subtract(left, right)) == cells(a) - cells(b)
    assert all(end < begin for (_, end), (begin, _) in pairwise(left))
