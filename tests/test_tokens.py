"""TokenPartition: properties of the arithmetic that every schedule is derived from."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpoverlap.errors import ActiveShapeError
from tpoverlap.tokens import TokenPartition

NUM_TOKENS = st.integers(1, 1 << 40)  # past 32 bits: offsets are byte arithmetic's input
TP_SIZES = st.integers(1, 72)
COUNTS = st.lists(st.integers(0, 200), min_size=1, max_size=9).filter(any)


@given(NUM_TOKENS, TP_SIZES)
def test_balanced(num_tokens: int, tp_size: int) -> None:
    partition = TokenPartition.balanced(num_tokens, tp_size)
    assert partition.tp_size == len(partition.counts) == tp_size
    assert partition.total == num_tokens
    assert max(partition.counts) - min(partition.counts) <= 1
    assert list(partition.counts) == sorted(partition.counts, reverse=True), "the first ranks own the extra rows"
    assert partition.max_count == -(-num_tokens // tp_size)


@given(NUM_TOKENS, TP_SIZES)
def test_even_is_balanced_or_an_error(num_tokens: int, tp_size: int) -> None:
    if num_tokens % tp_size:
        with pytest.raises(ActiveShapeError, match=f"T={num_tokens} .*tp_size={tp_size}.*balanced"):
            TokenPartition.even(num_tokens, tp_size)
    else:
        assert TokenPartition.even(num_tokens, tp_size) == TokenPartition.balanced(num_tokens, tp_size)
    assert set(TokenPartition.even(num_tokens * tp_size, tp_size).counts) == {num_tokens}


@given(COUNTS)
def test_offsets_rows_and_owner_agree(counts: list[int]) -> None:
    partition = TokenPartition.from_counts(counts)
    assert partition.total == sum(counts)
    assert partition.offsets[0] == 0
    assert [partition.offsets[r] + counts[r] for r in range(len(counts))] == [*partition.offsets[1:], partition.total]
    owners = [rank for rank, count in enumerate(counts) for _ in range(count)]
    assert [partition.owner(row) for row in range(partition.total)] == owners
    rows = list(range(partition.total))
    assert [row for rank in range(len(counts)) for row in rows[partition.rows(rank)]] == rows
    assert [len(rows[partition.rows(rank)]) for rank in range(len(counts))] == counts


@given(COUNTS, COUNTS)
def test_equality_and_hashes_follow_the_counts(a: list[int], b: list[int]) -> None:
    one, other = TokenPartition.from_counts(a), TokenPartition.from_counts(iter(b))
    assert (one == other) == (a == b) == (one.hash64 == other.hash64)
    assert one == TokenPartition(tuple(a)) and hash(one) == hash(TokenPartition(tuple(a)))


def test_hash64_is_the_same_in_every_process() -> None:
    """Pinned: ranks compare it, and a changed digest would make ranks of two versions disagree silently."""
    assert TokenPartition.from_counts([3, 0, 4]).hash64 == 0xFCFFA791A196C77E
    assert TokenPartition.from_counts([30, 4]).hash64 != TokenPartition.from_counts([3, 4]).hash64
    assert TokenPartition.from_counts([1, 11]).hash64 != TokenPartition.from_counts([11, 1]).hash64


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.uint16])
def test_integers_of_other_types(kind: type) -> None:
    for partition in (
        TokenPartition.balanced(kind(7), kind(2)),
        TokenPartition.from_counts([kind(4), kind(3)], total=kind(7)),
        TokenPartition.from_counts(np.array([4, 3], dtype=kind)),
        TokenPartition((kind(4), kind(3))),
    ):
        assert partition == TokenPartition((4, 3)) and partition.hash64 == TokenPartition((4, 3)).hash64
        assert [type(count) for count in partition.counts] == [int, int], "uint16 would overflow in sums"
    assert TokenPartition.even(kind(6), kind(2)).total == 6


@pytest.mark.parametrize("bad", [-1, 1.0, True, np.bool_(True), "3", None, np.float32(2)])
def test_counts_must_be_non_negative_integers(bad: Any) -> None:
    with pytest.raises(ActiveShapeError, match=r"rank 1") as caught:
        TokenPartition.from_counts([4, bad])
    assert repr(bad) in str(caught.value)


@pytest.mark.parametrize("bad", [0, -3, 2.0, False, True, None, "8"])
def test_sizes_must_be_positive_integers(bad: Any) -> None:
    for make in (TokenPartition.even, TokenPartition.balanced):
        with pytest.raises(ActiveShapeError, match="T must be a positive integer"):
            make(bad, 2)
        with pytest.raises(ActiveShapeError, match="tp_size must be a positive integer"):
            make(8, bad)


def test_no_ranks_no_rows_wrong_total() -> None:
    with pytest.raises(ActiveShapeError, match="at least one rank"):
        TokenPartition.from_counts([])
    with pytest.raises(ActiveShapeError, match=r"at least one row.*\[0, 0\]"):
        TokenPartition.from_counts([0, 0])
    with pytest.raises(ActiveShapeError, match=r"\[3, 4\] sum to 7, not to T=8"):
        TokenPartition.from_counts([3, 4], total=8)


@pytest.mark.parametrize("row", [-1, 7, 1 << 40])
def test_owner_outside(row: int) -> None:
    with pytest.raises(ActiveShapeError, match=r"outside 0\.\.6"):
        TokenPartition.from_counts([3, 4]).owner(row)


def test_immutable() -> None:
    with pytest.raises(AttributeError):
        TokenPartition.balanced(7, 2).counts = (1, 1)  # type: ignore[misc]
