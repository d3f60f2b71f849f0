"""One contract for every backend, and how one of them is picked."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import pytest

from tests.memory import rank_functions as functions
from tpoverlap import memory_estimate
from tpoverlap.testing import RankPool, run_ranks

Pools = Callable[[int], RankPool]
ON_GPU = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("name", ["shared", "process_group", ON_GPU])
def test_contract(rank_pool: Pools, name: str, world_size: int) -> None:
    if name == "cuda":
        results: list[Any] = run_ranks(functions.contract, world_size, name, device="cuda", timeout_s=90)
    else:
        results = rank_pool(world_size).run(functions.contract, name)
    assert len({result["size_bytes"] for result in results}) == 1


@pytest.mark.parametrize("world_size", [1, 2])
def test_auto_on_the_cpu(rank_pool: Pools, world_size: int) -> None:
    answers = rank_pool(world_size).run(functions.select, "auto", "cpu")
    assert answers == [("shared", "first for cpu whose probe passed")] * world_size


@pytest.mark.gpu
def test_auto_on_the_gpu() -> None:
    name, reason = run_ranks(functions.select, 2, "auto", "cuda", device="cuda", timeout_s=90)[0]
    assert name in ("cuda", "process_group") and "probe passed" in reason


def test_auto_goes_on_when_one_rank_cannot_share(rank_pool: Pools) -> None:
    """The reason is the failing rank's, and every rank picks the same backend."""
    answers = rank_pool(3).run(functions.select_without, {"shared": 1})
    assert {name for name, _ in answers} == {"process_group"}
    assert len({reason for _, reason in answers}) == 1
    assert "not 'shared'" in answers[0][1] and "rank 1: a mount without shared memory" in answers[0][1]


def test_auto_when_nothing_works(rank_pool: Pools) -> None:
    answers = rank_pool(2).run(functions.select_without, {"shared": 0, "process_group": 0})
    for name, message in answers:
        assert name == "BackendUnavailableError"
        assert "no backend works" in message and "without shared memory" in message and "no route to host" in message


@pytest.mark.parametrize("name", ["shared", "process_group"])
def test_explicit(rank_pool: Pools, name: str) -> None:
    answers = rank_pool(2).run(functions.select, name, "cpu")
    assert answers == [(name, f"backend={name!r} was asked for; its probe passed")] * 2


@pytest.mark.parametrize(("name", "device"), [("cuda", "cpu"), ("shared", "cuda")])
def test_explicit_but_unavailable(rank_pool: Pools, name: str, device: str) -> None:
    for error, message in rank_pool(2).run(functions.select, name, device):
        assert error == "BackendUnavailableError"
        assert f"backend={name!r} was asked for but does not work here" in message
        assert f"device is {device}" in message, "says why"


def test_unknown(rank_pool: Pools) -> None:
    for error, message in rank_pool(2).run(functions.select, "mpi", "cpu"):
        assert error == "ConfigError" and "'mpi' is unknown" in message and "'shared'" in message


def test_probe_says_none_or_why(rank_pool: Pools) -> None:
    pool = rank_pool(2)
    assert pool.run(functions.probe, "shared", "cpu") == [None, None]
    assert pool.run(functions.probe, "process_group", "cpu") == [None, None]
    for reason in pool.run(functions.probe, "cuda", "cpu"):
        assert reason is not None and "symmetric memory is for cuda" in reason
    for reason in pool.run(functions.probe, "shared", "meta"):
        assert reason is not None and "device is meta" in reason


@pytest.mark.parametrize("backend", ["shared", "process_group"])
@pytest.mark.parametrize(("world_size", "capacity", "width"), [(2, 512, 256), (3, 1000, 24)])
def test_the_estimate_is_what_a_manager_takes(
    rank_pool: Pools, backend: str, world_size: int, capacity: int, width: int
) -> None:
    estimate = memory_estimate((capacity, width), world_size)
    for report in rank_pool(world_size).run(functions.memory_report, backend, capacity, width):
        assert report["backend"] == backend and report["allocations"] == 1
        assert report["regions"] == estimate["regions"] and report["control_bytes"] == estimate["control_bytes"]
        assert report["symmetric_bytes"] == sum(report["arena_bytes"])
        rounded = -(-estimate["symmetric_bytes"] // mmap.PAGESIZE) * mmap.PAGESIZE
        assert report["symmetric_bytes"] == (rounded if backend == "shared" else estimate["symmetric_bytes"])
        assert report["symmetric_bytes"] <= 8 * capacity * width + (1 << 20)
        assert report["transient_staging_bytes"] == estimate["staging_bytes"]
