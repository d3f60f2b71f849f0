"""ring_exchange with chunks in pieces: how many, and the same results."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.overlap import piece_ranks as functions
from tpoverlap.comm import all_gather_schedule, in_pieces, reduce_scatter_schedule
from tpoverlap.pieces import (
    BYTES_OF_FOUR,
    MIN_PIECE_ROWS,
    NARROW_OPERAND_BYTES,
    gather_piece_rows,
    scatter_piece_rows,
)
from tpoverlap.testing import RankPool
from tpoverlap.testing.simulated import SimulatedBackend
from tpoverlap.tokens import TokenPartition

Pools = Callable[[int], RankPool]


@pytest.mark.parametrize(
    ("counts", "width", "operand_row_bytes", "pieces"),
    [
        ([1023, 1023], 8192, 8192, 1),
        ([1024, 1024], 8192, 8192, 2),
        ([1023, 4096], 8192, 8192, 1),
        ([1025, 1024], 8192, 8192, 2),
        ([2047, 2047], 4096, 8192, 1),
        ([2048, 2048], 4096, 8192, 2),
        ([4096, 4096], 1280, 16384, 1),  # half of it would leave two fifths of the GPU idle
        ([4096, 4096], 8192, NARROW_OPERAND_BYTES, 2),
        ([4096, 4096], 8192, NARROW_OPERAND_BYTES - 2, 4),  # the link is the limit: it starts early
        ([1536, 1536], 8192, NARROW_OPERAND_BYTES - 2, 3),
        ([BYTES_OF_FOUR // 16384, BYTES_OF_FOUR // 16384], 8192, 8192, 4),
        ([4096, 4096, 4096], 8192, 8192, 1),
    ],
)
def test_pieces_of_a_reduce_scatter(counts: list[int], width: int, operand_row_bytes: int, pieces: int) -> None:
    partition = TokenPartition.from_counts(counts)
    steps = reduce_scatter_schedule(partition, width, 0, scatter_piece_rows(partition, width, 2, operand_row_bytes))
    assert {len(step.sends) for step in steps} == {pieces}


@given(st.lists(st.integers(0, 5000), min_size=2, max_size=4).filter(any), st.integers(1, 9000), st.integers(2, 9000))
def test_ranks_cut_alike(counts: list[int], width: int, operand_row_bytes: int) -> None:
    """Pieces cover their chunk, none is tiny, and what one rank sends is what the other receives."""
    partition = TokenPartition.from_counts(counts)
    for schedule, piece_rows in (
        (all_gather_schedule, gather_piece_rows(partition, width, 2)),
        (reduce_scatter_schedule, scatter_piece_rows(partition, width, 2, operand_row_bytes)),
    ):
        plans = [schedule(partition, width, rank, piece_rows) for rank in range(len(counts))]
        sent = {transfer for plan in plans for step in plan for transfer in step.sends}
        assert sent == {transfer for plan in plans for step in plan for transfer in step.receives}
        assert piece_rows is None or all(transfer.num_rows >= MIN_PIECE_ROWS for transfer in sent)
        for step in (step for plan in plans for step in plan):
            parts = in_pieces(step)
            assert all(len(part.sends) <= 1 and len(part.receives) <= 1 for part in parts)
            assert tuple(t for part in parts for t in part.sends) == step.sends
            assert tuple(t for part in parts for t in part.receives) == step.receives


@pytest.mark.parametrize("backend", ["shared", SimulatedBackend])
@pytest.mark.parametrize("delay", ["none", "transfers", "gemms"])
def test_results(rank_pool: Pools, backend: str, delay: str) -> None:
    """Integers in float32, compared bit by bit; growing and shrinking T on both sides of the cut."""
    pieces = rank_pool(2).run(functions.compared, backend, delay, timeout_s=100)
    for seen in pieces:
        assert {1, 2, 4} <= seen["scatter"] and seen["gather"] == {1, 2}, "all ways were taken"


def test_own_sum_is_rounded_once(rank_pool: Pools) -> None:
    """bfloat16: own partial + what arrived, in float32, rounded once; the twin rounds the own partial, too."""
    for error_in_pieces, error_of_twin in rank_pool(2).run(functions.rounding, timeout_s=60):
        assert error_in_pieces <= error_of_twin


def test_two_weights_share_a_scatter_in_pieces(rank_pool: Pools) -> None:
    """A task of several terms is not computed on top of what arrived; its rows travel in pieces all the same."""
    assert rank_pool(2).run(functions.two_weights, timeout_s=60) == [True, True]


def test_ranks_that_cut_differently(rank_pool: Pools) -> None:
    """Their inner sizes differ, and nothing else: an error instead of a wait for a piece that never comes."""
    assert rank_pool(2).run(functions.cut_differently, timeout_s=60) == ["RankMismatchError", "RankMismatchError"]
