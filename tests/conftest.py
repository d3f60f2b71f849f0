"""Shared by all tests: one pool of spawned ranks a world size, processes for Triton, markers, hypothesis profiles."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests import modules
from tpoverlap.testing import RankPool

# No deadline: two cores are shared with the ranks, so the time of one example says nothing.
settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("default"), derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests marked slow as well (minutes)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--slow"):
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="takes minutes: pytest --slow"))
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="torch sees no CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[Callable[[int], RankPool]]:
    """``rank_pool(R)``: the session's pool of R CPU ranks. Starting one costs seconds, so all modules share it."""
    pools: dict[int, RankPool] = {}

    def pool(world_size: int) -> RankPool:
        if world_size not in pools:
            pools[world_size] = RankPool(world_size)
        return pools[world_size]

    yield pool
    with ThreadPoolExecutor() as closers:  # idle ranks take their time to leave; let them do so side by side
        list(closers.map(RankPool.close, pools.values()))


@pytest.fixture(scope="session")
def run_module() -> Iterator[Callable[..., str]]:
    """``run_module(name, *arguments, interpret=...)``: what ``python -m name ...`` prints.

    Whether Triton interprets is decided when it is imported, so there is one process for either, shared by all
    modules: importing torch and Triton takes longer than most of what they do.
    """
    pools: dict[bool, RankPool] = {}

    def run(name: str, *arguments: str, interpret: bool, timeout_s: float = 110.0) -> str:
        if interpret not in pools:
            pools[interpret] = RankPool(1, env={"TRITON_INTERPRET": "1" if interpret else None})
        (printed,) = pools[interpret].run(modules.run, name, arguments, timeout_s=timeout_s)
        return str(printed)

    yield run
    for started in pools.values():
        started.close()
