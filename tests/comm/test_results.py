"""Results are bit for bit right whatever the timing: delays, wrapped epochs, slots held by users."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.comm import operations as ops
from tests.comm import rank_functions as functions
from tpoverlap.testing import RankPool
from tpoverlap.testing.simulated import SimulatedBackend

Pools = Callable[[int], RankPool]
BACKENDS = ["shared", "process_group", SimulatedBackend]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("backend", BACKENDS)
def test_mixed_operations(rank_pool: Pools, backend: str, world_size: int) -> None:
    assert rank_pool(world_size).run(functions.mixed, backend, 12) == [12 * len(ops.KINDS)] * world_size


@pytest.mark.parametrize(
    ("backend", "world_size", "victim"),
    [
        *(("shared", 3, victim) for victim in range(3)),
        ("shared", 2, 1),
        # Ranks are alike but for the rotation: elsewhere one or two of them.
        *(("process_group", 2, 0), ("process_group", 3, 1)),
        *((SimulatedBackend, 2, 1), (SimulatedBackend, 3, 0), (SimulatedBackend, 3, 2)),
    ],
)
def test_timing_attack(rank_pool: Pools, backend: str, world_size: int, victim: int) -> None:
    """Each rank in turn is slow, in each of its streams in turn; 32 operations of all methods a place."""
    for done in rank_pool(world_size).run(functions.timing_attack, backend, victim, 7, timeout_s=100):
        assert {"comm", "compute0", "compute1", "caller", "transfers", "gemms"} <= set(done)
        assert ("receive" in done) == (backend == "process_group")
        assert min(done.values()) >= 30


@pytest.mark.parametrize(
    ("first_use", "sequence"),
    [
        ((1 << 32) - 4, (1 << 16) - 5),  # the epoch wraps, and the 16 bits of a descriptor's sequence number
        ((1 << 31) - 4, (1 << 13) - 5),  # the sign of a 32-bit comparison, and the tags of messages
        ((1 << 33) - 3, (1 << 32) - 7),
    ],
)
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("backend", BACKENDS)
def test_across_the_wrap(rank_pool: Pools, backend: str, world_size: int, first_use: int, sequence: int) -> None:
    for result in rank_pool(world_size).run(functions.across_the_wrap, backend, first_use, sequence):
        gathers = 10 if backend == "process_group" else 20  # sequential takes a slot where memory is mapped
        assert result["uses"] == [first_use + gathers, first_use + 10] and result["sequence"] == sequence + 30


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_slot_from_get_buffer_stays(rank_pool: Pools, backend: str, world_size: int) -> None:
    """The view is valid until the next-but-one operation, although the peers are there already."""
    for rank, same in enumerate(rank_pool(world_size).run(functions.held_slot, backend)):
        assert all(same), same
        assert len(same) == (3 if rank == world_size - 1 else 2)
