"""Buckets of T and tables by T: every T has exactly one row, and only its bucket counts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tuning.strategies import METHODS, devices, idle_host, problems
from tpoverlap.tuning import (
    ByTokens,
    Candidate,
    DeviceModel,
    Problem,
    Row,
    break_even,
    bucket_bounds,
    candidates_within,
    columns_of,
    estimate,
    estimated_table,
    load_device,
    merged,
    samples,
)
from tpoverlap.tuning.buckets import EDGES

SEQUENTIAL, RING = Candidate("sequential"), Candidate("ring_exchange")


@given(st.integers(1, 100_000), st.integers(1, 300), st.integers(1, 100_000))
def test_bounds_cover_every_t_once(columns: int, multiprocessors: int, capacity: int) -> None:
    bounds = bucket_bounds(columns, multiprocessors, capacity)
    assert bounds[-1] == capacity and bounds[0] >= 1
    assert list(bounds) == sorted(set(bounds)) and len(bounds) <= len(EDGES) + 1


@given(st.integers(1, 30_000), st.integers(1, 300), st.integers(1, 50_000), st.integers(1, 50_000))
def test_bounds_do_not_depend_on_the_capacity(columns: int, sms: int, one: int, other: int) -> None:
    """So that two managers with different capacities agree on every T that both can run."""
    low, high = sorted((one, other))
    assert bucket_bounds(columns, sms, low)[:-1] == tuple(end for end in bucket_bounds(columns, sms, high) if end < low)


def test_bounds_by_hand() -> None:
    # 8192 columns are 32 tiles wide: 132 multiprocessors hold 4.125 rows of tiles a wave
    assert bucket_bounds(8192, 132, 8192) == (128, 256, 384, 512, 1024, 2048, 4224, 8192)
    assert bucket_bounds(64, 1, 24) == (24,), "small CPU runs have one bucket"
    assert columns_of(Problem("gather", 1, 10, 20, 2)) == 20 and columns_of(Problem("scatter", 1, 10, 20, 2)) == 10
    assert columns_of(Problem("beside-scatter", 1, 10, 20, 2)) == 10


@given(st.integers(0, 10_000), st.integers(1, 10_000))
def test_samples_lie_in_the_bucket(low: int, width: int) -> None:
    points = samples(low, low + width)
    assert points[-1] == low + width and all(low < point <= low + width for point in points)


def test_a_table_is_looked_up() -> None:
    table = ByTokens((Row(8, SEQUENTIAL), Row(24, RING)), "cost model")
    assert [table.at(tokens).candidate.method for tokens in (1, 8, 9, 24, 99)] == [
        "sequential",
        "sequential",
        "ring_exchange",
        "ring_exchange",
        "ring_exchange",
    ]
    for ends in ((), (0,), (8, 8), (9, 8)):
        with pytest.raises(ValueError, match="ascending"):
            ByTokens(tuple(Row(end, RING) for end in ends), "cost model")


@given(st.lists(st.sampled_from((SEQUENTIAL, RING, Candidate("pipeline", num_splits=2))), min_size=1, max_size=9))
def test_merging_changes_no_look_up(found: list[Candidate]) -> None:
    rows = [Row(10 * (index + 1), one, 1.0 * index) for index, one in enumerate(found)]
    before, after = ByTokens(tuple(rows), "x"), ByTokens(merged(rows), "x")
    for tokens in range(1, 10 * len(rows) + 20):
        assert before.at(tokens).candidate == after.at(tokens).candidate
    assert all(one.candidate != two.candidate for one, two in zip(after.rows, after.rows[1:], strict=False))
    assert [Row.from_dict(row) for row in after.to_list()] == list(after.rows)


@settings(max_examples=60)
@given(devices(), problems(), st.integers(1, 9000))
def test_estimated_tables_are_pure_and_never_worse_than_sequential(
    device: DeviceModel, problem: Problem, capacity: int
) -> None:
    table = estimated_table(device, problem, capacity, METHODS, {})
    assert table == estimated_table(device, problem.at(capacity), capacity, METHODS, {}), "T of the problem is no input"
    assert table.rows[-1].up_to == capacity
    low = 0
    for row in table.rows:
        at = [problem.at(tokens) for tokens in samples(low, row.up_to)]
        if row.candidate.method != "sequential":
            ratios = [
                estimate(device, p, row.candidate).time_in_layer_us / estimate(device, p, SEQUENTIAL).time_in_layer_us
                for p in at
            ]
            assert min(ratios) < 1.0, "it was chosen although it is slower everywhere"
        low = row.up_to


def test_what_somebody_wrote_limits_the_candidates() -> None:
    problem = Problem("scatter", 4096, 8192, 4096, 4)
    splits = [one for one in candidates_within(problem, METHODS, {"num_splits": 7}) if one.method == "pipeline"]
    assert splits == [Candidate("pipeline", num_splits=7)]
    gather = replace(problem, kind="gather")
    assert Candidate("ring_exchange", aggregate=True) in candidates_within(gather, METHODS, {})
    assert Candidate("ring_exchange", aggregate=True) not in candidates_within(gather, METHODS, {"aggregate": False})
    beside = replace(problem, kind="beside-gather")
    assert {one.method for one in candidates_within(beside, METHODS, {})} == {"sequential", "bulk"}


def test_reasons_have_figures() -> None:
    device = idle_host(load_device("h200"))
    table = estimated_table(device, Problem("gather", 1, 8192, 4096, 2), 8192, ("ring_exchange",), {})
    small, large = table.rows[0], table.rows[-1]
    assert small.candidate == SEQUENTIAL and large.candidate == RING
    assert "overlap does not pay: sequential" in table.reason(small) and "the best overlap" in table.reason(small)
    assert f"ring_exchange takes {large.time_us:.1f} us" in table.reason(large)
    assert "median error" in table.reason(large)
    estimate_only = estimated_table(load_device("b200"), Problem("gather", 1, 8192, 4096, 2), 8192, (), {})
    assert "nothing was measured on it" in estimate_only.reason(estimate_only.rows[0])


def test_break_even() -> None:
    device = idle_host(load_device("h200"))
    problem = Problem("gather", 1, 8192, 4096, 2)
    tokens = break_even(device, problem, ("ring_exchange",))
    assert tokens is not None and 64 <= tokens <= 2048
    at, below = problem.at(tokens), problem.at(tokens - 64)
    assert estimate(device, at, RING).time_us < estimate(device, at, SEQUENTIAL).time_us
    assert estimate(device, below, RING).time_us > 0.99 * estimate(device, below, SEQUENTIAL).time_us
    assert break_even(device, problem, ()) is None
