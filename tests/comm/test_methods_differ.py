"""The methods are really different: a trace with delays on purpose shows what runs beside what."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.comm import rank_functions as functions
from tpoverlap.testing import RankPool

Pools = Callable[[int], RankPool]
Marks = list[tuple[float, str, str, int]]
PEER_DELAY_S, GEMM_DELAY_S = 0.3, 0.06
pytestmark = pytest.mark.parametrize("backend", ["shared", "process_group"])


def _time_us(marks: Marks, what: str, step: int) -> float:
    times = [time_us for time_us, _, mark, number in marks if (mark, number) == (what, step)]
    assert len(times) == 1, f"{what} {step} is there {len(times)} times in {marks}"
    return times[0]


def _run(pool: RankPool, backend: str, kind: str, peer_delay_s: float = PEER_DELAY_S) -> list[Marks]:
    results: list[Marks] = pool.run(functions.traced, backend, kind, peer_delay_s, GEMM_DELAY_S)
    return results


@pytest.mark.parametrize("world_size", [2, 3])
def test_ring_all_gather_multiplies_before_the_peers_rows_are_there(
    rank_pool: Pools, backend: str, world_size: int
) -> None:
    results = _run(rank_pool(world_size), backend, "ring_ag")
    late_rank = world_size - 1
    for rank, marks in enumerate(results[:late_rank]):
        step = late_rank - rank  # in which it receives from the late rank
        assert _time_us(marks, "gemm_end", 0) < _time_us(marks, "arrived", step), marks
        assert _time_us(marks, "arrived", step) <= _time_us(marks, "gemm_begin", step), "rows before they are there"


def test_ring_all_gather_multiplies_a_chunk_while_the_next_one_travels(rank_pool: Pools, backend: str) -> None:
    """Rank 1 receives from rank 2, which is late, first; rank 0 from rank 1 first: it works on that meanwhile."""
    marks = _run(rank_pool(3), backend, "ring_ag")[0]
    assert _time_us(marks, "gemm_end", 1) < _time_us(marks, "arrived", 2), marks


def test_ring_reduce_scatter_sends_before_its_own_rows(rank_pool: Pools, backend: str) -> None:
    for rank, marks in enumerate(_run(rank_pool(3), backend, "ring_rs", 0.0)):
        assert _time_us(marks, "sent", 1) < _time_us(marks, "gemm_begin", 0), f"rank {rank}: {marks}"
        assert _time_us(marks, "gemm_begin", 1) < _time_us(marks, "gemm_begin", 2) < _time_us(marks, "gemm_begin", 0)
        assert _time_us(marks, "gemm_end", 1) < _time_us(marks, "sent", 1), "sent before it was computed"


def test_ring_reduce_scatter_computes_own_rows_before_the_peers_sums_are_there(rank_pool: Pools, backend: str) -> None:
    marks = _run(rank_pool(2), backend, "ring_rs")[0]
    assert _time_us(marks, "gemm_end", 0) < _time_us(marks, "arrived", 1), marks
    assert _time_us(marks, "sent", 1) < _time_us(marks, "gemm_end", 0), marks


def test_pipeline_sends_while_it_computes(rank_pool: Pools, backend: str) -> None:
    for marks in _run(rank_pool(2), backend, "pipeline_rs", 0.0):
        assert _time_us(marks, "sent", 0) < _time_us(marks, "gemm_end", 2), marks
        for split in range(3):
            assert _time_us(marks, "gemm_end", split) < _time_us(marks, "sent", split), "sent before it was computed"
        streams = {stream for _, stream, what, _ in marks if what == "gemm_begin"}
        assert streams == {"compute0", "compute1"}, "num_max_streams=2"


@pytest.mark.parametrize("kind", ["bulk_ag", "bulk_rs"])
def test_bulk_multiplies_between_send_and_arrival(rank_pool: Pools, backend: str, kind: str) -> None:
    marks = _run(rank_pool(2), backend, kind)[0]
    assert _time_us(marks, "sent", 1) < _time_us(marks, "gemm_end", 0) < _time_us(marks, "arrived", 1), marks


@pytest.mark.parametrize("world_size", [2, 3])
def test_sequential_gathers_before_it_multiplies(rank_pool: Pools, backend: str, world_size: int) -> None:
    if backend == "shared":  # through the buffers
        for marks in _run(rank_pool(world_size), backend, "sequential_ag"):
            for step in range(1, world_size):
                assert _time_us(marks, "arrived", step) <= _time_us(marks, "gemm_begin", 0), marks
    else:
        for events in rank_pool(world_size).run(functions.gemm_against_gather, backend, "sequential_ag"):
            assert events == ["gathered", "gemm 0"], "one GEMM, and only after the gather"
    for rank, events in enumerate(rank_pool(world_size).run(functions.gemm_against_gather, backend, "ring_ag")):
        assert len(events) == world_size and "gathered" not in events
        assert events[0] == f"gemm {30 // world_size * rank}", "the twin starts with own rows"


def test_aggregate_multiplies_pairs(rank_pool: Pools, backend: str) -> None:
    for events in rank_pool(3).run(functions.gemm_against_gather, backend, "aggregate_ag"):
        assert sorted(events) == ["gemm 0", "gemm 20"], "ranks 0 and 1 together, rank 2 alone"
