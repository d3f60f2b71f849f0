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
def _pools() -> Iterator[Callable[[int, str | None], RankPool]]:
    """All pools of the session, by R and by what TRITON_INTERPRET is; None: as it is here."""
    pools: dict[tuple[int, str | None], RankPool] = {}

    def pool(world_size: int, interpret: str | None) -> RankPool:
        if (world_size, interpret) not in pools:
            env = {} if interpret is None else {"TRITON_INTERPRET": interpret or None}
            pools[world_size, interpret] = RankPool(world_size, env=env)
        return pools[world_size, interpret]

    yield pool
    with ThreadPoolExecutor(len(pools) or 1) as closers:  # ranks take their time to leave; let them do so side by side
        list(closers.map(RankPool.close, pools.values()))


@pytest.fixture(scope="session")
def rank_pool(_pools: Callable[[int, str | None], RankPool]) -> Callable[[int], RankPool]:
    """``rank_pool(R)``: the session's pool of R CPU ranks. Starting one costs seconds, so all modules share it."""
    return lambda world_size: _pools(world_size, None)


@pytest.fixture(scope="session")
def interpreted_pool(_pools: Callable[[int, str | None], RankPool]) -> Callable[[int], RankPool]:
    """``interpreted_pool(R)``: as ``rank_pool(R)``, with ``TRITON_INTERPRET=1``, which Triton reads when imported."""
    return lambda world_size: _pools(world_size, "1")


@pytest.fixture(scope="session")
def run_module(_pools: Callable[[int, str | None], RankPool]) -> Callable[..., str]:
    """``run_module(name, *arguments, interpret=...)``: what ``python -m name ...`` prints.

    Whether Triton interprets is decided when it is imported, so either has a process of its own, shared by all
    modules: importing torch and Triton takes longer than most of what they do.
    """

    def run(name: str, *arguments: str, interpret: bool, timeout_s: float = 110.0) -> str:
        pool = _pools(2, "1") if interpret else _pools(1, "")
        return str(pool.run(modules.run_on_first, name, arguments, timeout_s=timeout_s)[0])

    return run


@pytest.fixture(scope="session")
def run_cases(interpreted_pool: Callable[[int], RankPool]) -> Callable[..., str]:
    """``run_cases(name, calls, call)``: what ``python -m name *call`` prints where Triton interprets.

    The first of ``calls`` that is asked for runs all of them, on two processes that share them.
    """
    printed: dict[tuple[str, tuple[str, ...]], str] = {}

    def run(name: str, calls: tuple[tuple[str, ...], ...], call: tuple[str, ...]) -> str:
        if (name, call) not in printed:
            for share in interpreted_pool(2).run(modules.run_share, name, calls, timeout_s=110.0):
                printed.update({(name, arguments): text for arguments, text in share.items()})
        return printed[name, call]

    return run
