"""Schedules: both sides derive the same transfers, and the bytes in a slot never overlap and never leave it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpoverlap.comm.schedule import (
    Step,
    Transfer,
    all_gather_schedule,
    column_splits,
    pipeline_schedule,
    reduce_scatter_schedule,
    scatter_block,
)
from tpoverlap.memory.layout import MAX_PIECES, gather_slot_bytes, scatter_slot_bytes
from tpoverlap.tokens import TokenPartition

counts = st.lists(st.integers(0, 200), min_size=1, max_size=8).filter(any)
partitions = counts.map(TokenPartition.from_counts)
widths = st.integers(1, 40)
piece_rows = st.one_of(st.none(), st.integers(1, 50))
Schedule = Callable[[int], tuple[Step, ...]]


def _sends(steps: Iterable[Step]) -> list[Transfer]:
    return [transfer for step in steps for transfer in step.sends]


def _receives(steps: Iterable[Step]) -> list[Transfer]:
    return [transfer for step in steps for transfer in step.receives]


def _check_both_sides(schedule: Schedule, size: int) -> list[list[Transfer]]:
    """Sends equal receives, flags are unique; returns what each rank receives."""
    sent = sorted((t for rank in range(size) for t in _sends(schedule(rank))), key=repr)
    received = [_receives(schedule(rank)) for rank in range(size)]
    assert sent == sorted((t for transfers in received for t in transfers), key=repr)
    for rank in range(size):
        for step in schedule(rank):
            assert all(t.source == rank and t.destination != rank and t.step == step.number for t in step.sends)
            assert all(t.destination == rank and t.source != rank and t.step == step.number for t in step.receives)
            assert step.peer in (-1, *{t.source for t in step.receives}) or not step.receives
        flags = [(t.source, t.piece) for t in received[rank]]
        assert len(set(flags)) == len(flags), "two transfers of one source share a flag"
        assert all(0 <= piece < MAX_PIECES for _, piece in flags)
        assert all(t.num_rows > 0 and t.num_elements == t.num_rows * (t.col_stop - t.col_start) for t in received[rank])
    return received


def _check_disjoint(transfers: Iterable[Transfer], end: int) -> None:
    """No two transfers write the same element, and none ends after element ``end``."""
    spans = sorted((t.slot_element, t.slot_element + t.num_elements) for t in transfers)
    assert all(start >= 0 for start, _ in spans)
    assert all(before[1] <= after[0] for before, after in pairwise(spans)), spans
    assert not spans or spans[-1][1] <= end, f"{spans[-1]} leaves a slot of {end} elements"


@given(partitions, widths, piece_rows)
def test_all_gather(partition: TokenPartition, width: int, max_piece_rows: int | None) -> None:
    received = _check_both_sides(
        lambda rank: all_gather_schedule(partition, width, rank, max_piece_rows), partition.tp_size
    )
    for rank, transfers in enumerate(received):
        _check_disjoint(transfers, gather_slot_bytes(partition.total, width, 2) // 2)
        own = partition.rows(rank)
        rows = sorted(row for t in transfers for row in range(t.row_start, t.row_stop))
        assert sorted([*rows, *range(own.start, own.stop)]) == list(range(partition.total)), "every row exactly once"
        assert all(t.slot_element == t.row_start * width for t in transfers), "rows lie at their final place"
        assert all(t.num_rows <= (max_piece_rows or t.num_rows) or _at_limit(transfers, t.source) for t in transfers)


@given(partitions, widths, piece_rows)
def test_reduce_scatter(partition: TokenPartition, width: int, max_piece_rows: int | None) -> None:
    received = _check_both_sides(
        lambda rank: reduce_scatter_schedule(partition, width, rank, max_piece_rows), partition.tp_size
    )
    slot = scatter_slot_bytes(partition.max_count, width, 4, partition.tp_size) // 4
    for rank, transfers in enumerate(received):
        _check_disjoint(transfers, slot)
        own = partition.rows(rank)
        for source in set(range(partition.tp_size)) - {rank}:
            rows = sorted(r for t in transfers if t.source == source for r in range(t.row_start, t.row_stop))
            assert rows == list(range(own.start, own.stop)), f"rows of rank {rank} from rank {source}"


@given(partitions, widths, st.integers(1, MAX_PIECES))
def test_pipeline(partition: TokenPartition, width: int, num_splits: int) -> None:
    received = _check_both_sides(lambda rank: pipeline_schedule(partition, width, rank, num_splits), partition.tp_size)
    slot = scatter_slot_bytes(partition.max_count, width, 4, partition.tp_size) // 4
    for rank, transfers in enumerate(received):
        _check_disjoint(transfers, slot)
        own = partition.rows(rank)
        for source in set(range(partition.tp_size)) - {rank}:
            mine = [t for t in transfers if t.source == source]
            assert all((t.row_start, t.row_stop) == (own.start, own.stop) for t in mine)
            columns = [(t.col_start, t.col_stop) for t in mine]
            assert columns == ([] if own.start == own.stop else list(column_splits(width, num_splits)))


@given(partitions, widths)
def test_every_schedule_has_as_many_steps_on_every_rank(partition: TokenPartition, width: int) -> None:
    size = partition.tp_size
    for schedule in (all_gather_schedule, reduce_scatter_schedule):
        for rank in range(size):
            steps = schedule(partition, width, rank)
            assert [step.number for step in steps] == list(range(1, size))
            assert sorted(step.peer for step in steps) == [peer for peer in range(size) if peer != rank]


@given(st.integers(1, 300), st.integers(1, 300))
def test_column_splits_tile_the_width(width: int, num_splits: int) -> None:
    splits = column_splits(width, num_splits)
    assert len(splits) == min(width, num_splits)
    assert splits[0][0] == 0 and splits[-1][1] == width
    assert all(a[1] == b[0] for a, b in pairwise(splits))
    sizes = [stop - start for start, stop in splits]
    assert min(sizes) >= 1 and max(sizes) - min(sizes) <= 1


@given(st.integers(2, 9))
def test_blocks_of_sources_are_in_rank_order(size: int) -> None:
    for owner in range(size):
        blocks = [scatter_block(source, owner) for source in range(size) if source != owner]
        assert blocks == list(range(size - 1))


def test_pieces_stay_below_the_number_of_flags() -> None:
    partition = TokenPartition.from_counts([100_000, 3])
    (step,) = all_gather_schedule(partition, 8, 1, max_piece_rows=1)
    assert len(step.receives) == MAX_PIECES and max(t.piece for t in step.receives) == MAX_PIECES - 1
    assert step.receives[0].row_start == 0 and step.receives[-1].row_stop == 100_000


@pytest.mark.parametrize("size", [2, 8])
def test_offsets_beyond_32_bits(size: int) -> None:
    """Issue item 14: T x H above 2**31 elements. Arithmetic only, nothing is allocated."""
    width = 16384
    partition = TokenPartition.balanced(400_001, size)
    assert partition.total * width > 1 << 32
    last = [t for t in _receives(all_gather_schedule(partition, width, 0)) if t.source == size - 1][-1]
    assert last.slot_element == partition.rows(size - 1).start * width > 1 << 31
    assert last.slot_element + last.num_elements == partition.total * width
    for schedule in (reduce_scatter_schedule(partition, width, 0), pipeline_schedule(partition, width, 0, 7)):
        _check_disjoint(_receives(schedule), scatter_slot_bytes(partition.max_count, width, 1, size))
        assert sum(t.num_elements for t in _receives(schedule)) == (size - 1) * partition.counts[0] * width


def _at_limit(transfers: Iterable[Transfer], source: int) -> bool:
    return sum(t.source == source for t in transfers) == MAX_PIECES
