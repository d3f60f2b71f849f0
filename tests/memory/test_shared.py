"""The shared backend: real shared pages, and nothing left behind whatever happens."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable

import pytest

from tests.memory import rank_functions as functions
from tpoverlap.memory.shared import SHM_DIRECTORY
from tpoverlap.testing import RankPool

Pools = Callable[[int], RankPool]


def test_a_value_written_in_one_process_is_read_in_another(rank_pool: Pools) -> None:
    for result in rank_pool(3).run(functions.write_and_read):
        assert result["seen"] == [1.5, -2.0, 3.25, 1e300]
        assert {"all_gather", "all_reduce", "barrier", "isend", "irecv", "send", "recv", "all_gather_object"} <= set(
            result["patched"]
        )


def test_whole_operations_need_no_collective(rank_pool: Pools) -> None:
    for y_and_z in rank_pool(3).run(functions.exchange_without_collectives):
        y, z = y_and_z[:6], y_and_z[6:]
        assert y == [1.0, 1.0, 2.0, 2.0, 3.0, 3.0]
        assert z[0] == z[1] and z[0] in (3.0, 6.0, 9.0), "three ranks' equal partial sums"


def test_nothing_is_left_in_dev_shm(rank_pool: Pools) -> None:
    for result in rank_pool(2).run(functions.hold, False):
        assert len(result["mapped"]) == 2, "each rank maps each rank's file"
        assert result["named"] == [], "the files are unlinked as soon as every rank has mapped them"
        assert result["after_close"] == []


def test_nothing_is_left_after_sigkill(rank_pool: Pools) -> None:
    survivor, _ = rank_pool(2).run(functions.hold, True, expect_dead={1})
    assert len(survivor["mapped"]) == 2 and not any(os.path.exists(path) for path in survivor["mapped"])


def test_a_full_dev_shm(rank_pool: Pools) -> None:
    """Refused when it is asked for: a sparse file would be a SIGBUS at some later store."""
    too_much = shutil.disk_usage(SHM_DIRECTORY).total * 2
    for error, message, left in rank_pool(2).run(functions.allocate_too_much, too_much, None):
        assert error == "BackendUnavailableError"
        assert str(too_much) in message.replace(",", "") and "No space left" in message
        assert "--shm-size" in message and "process_group" in message, "says what to do"
        assert left == []


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_dev_shm_that_is_full_on_one_rank(rank_pool: Pools, world_size: int) -> None:
    results = rank_pool(world_size).run(functions.allocate_too_much, 4096, world_size - 1)
    for error, message, left in results:
        assert error == "BackendUnavailableError", "on every rank, not only where it happened"
        assert f"rank {world_size - 1}: cannot reserve 4096 bytes" in message
        assert left == []
