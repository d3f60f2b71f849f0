"""The named token counts and partitions really hold the edges that their names promise."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpoverlap.testing import CPU_SHAPES, GEMM_SHAPES, TP8_SHAPES, random_walk, token_counts, uneven_partitions

CAPACITIES = st.integers(1, 20_000)
TP_SIZES = st.integers(1, 16)


@given(CAPACITIES, TP_SIZES)
def test_token_counts_are_legal_and_unique(capacity: int, tp_size: int) -> None:
    counts = list(token_counts(capacity, tp_size).values())
    assert counts == sorted(set(counts))
    assert counts[-1] == capacity and 1 in counts
    assert all(1 <= num_tokens <= capacity for num_tokens in counts)


@pytest.mark.parametrize(("capacity", "tp_size"), [(2048, 2), (8192, 8), (1000, 3)])
def test_token_counts_hold_the_edges(capacity: int, tp_size: int) -> None:
    counts = token_counts(capacity, tp_size)
    values = set(counts.values())
    assert {1, tp_size - 1, tp_size + 1, capacity // 8, capacity - 1, capacity} <= values | {0}
    assert any(num_tokens % 128 == 1 and num_tokens > 1 for num_tokens in values)
    prime = counts["prime"]
    assert prime > capacity // 2 and all(prime % divisor for divisor in range(2, math.isqrt(prime) + 1))
    assert any(num_tokens % tp_size for num_tokens in values)


def test_token_counts_of_a_known_case() -> None:
    assert token_counts(2048, 3) == {
        "one": 1,
        "ranks_minus_one": 2,
        "ranks_plus_one": 4,
        "eighth": 256,
        "tile_plus_one": 1025,
        "prime": 1279,
        "capacity_minus_one": 2047,
        "capacity": 2048,
    }


@given(CAPACITIES, TP_SIZES, st.one_of(st.none(), st.integers(1, 5000)))
def test_uneven_partitions_are_legal(capacity: int, tp_size: int, most: int | None) -> None:
    partitions = uneven_partitions(capacity, tp_size, most)
    limit = math.ceil(capacity / tp_size) if most is None else most
    assert partitions
    for partition in partitions.values():
        assert partition.tp_size == tp_size
        assert partition.max_count <= limit and 1 <= partition.total <= capacity
    assert len({partition.counts for partition in partitions.values()}) == len(partitions)


def test_uneven_partitions_hold_the_edges() -> None:
    counts = {name: partition.counts for name, partition in uneven_partitions(100, 4).items()}
    assert counts["first_only"] == (25, 0, 0, 0)
    assert counts["last_only"] == (0, 0, 0, 25)
    assert counts["one_row_on_last"] == (0, 0, 0, 1)
    assert counts["first_empty"] == (0, 25, 25, 25)
    assert counts["every_other_empty"] == (0, 25, 0, 25)
    assert counts["ascending"] == (6, 12, 18, 25)
    assert uneven_partitions(100, 4, max_rows_per_rank=100)["first_only"].counts == (100, 0, 0, 0)


@given(CAPACITIES, st.integers(0, 5))
def test_random_walk_stays_inside(capacity: int, seed: int) -> None:
    walk = random_walk(capacity, seed=seed)
    assert len(walk) == 200 and min(walk) >= 1 and max(walk) == capacity
    assert walk == random_walk(capacity, seed=seed), "the same on every rank"


def test_random_walk_grows_and_shrinks() -> None:
    walk = random_walk(2048, steps=200, seed=3)
    steps = [after - before for before, after in pairwise(walk)]
    assert sum(step > 0 for step in steps) > 50 and sum(step < 0 for step in steps) > 50
    assert min(walk) < 200 and len(set(walk)) > 100
    assert walk != random_walk(2048, steps=200, seed=4)


def test_shapes() -> None:
    assert len(GEMM_SHAPES) == 9
    names = [shape.name for shape in (*GEMM_SHAPES, *TP8_SHAPES, *CPU_SHAPES)]
    assert names[0] == "4096x8192x4096"
    assert {1280, 3584} <= {n for shape in TP8_SHAPES for n in (shape.in_features, shape.out_features)}
    assert CPU_SHAPES[0].flops == 2 * 96 * 32 * 48
    for shapes in (GEMM_SHAPES, TP8_SHAPES, CPU_SHAPES):
        assert len({shape.name for shape in shapes}) == len(shapes)
