"""run_ranks: one function on R freshly spawned ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from tpoverlap.testing.pool import RankPool


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    backend: str | None = None,
    device: str = "cpu",
    timeout_s: float = 60.0,
    expect_dead: Collection[int] = (),
    env: Mapping[str, str | None] | None = None,
    num_threads: int = 1,
    group_timeout_s: float | None = None,
    grace_s: float = 15.0,
) -> list[Any]:
    """Spawn ``world_size`` ranks, call ``fn(rank, world_size, *args)`` on each, return the results in rank order.

    Arguments and errors are those of ``RankPool``. ``timeout_s`` bounds the call, not the start of the processes;
    ``group_timeout_s``, the process group's own time-out, is the same unless given. Tests that can share ranks use
    the ``rank_pool`` fixture instead: a start costs seconds a rank.
    """
    pool = RankPool(
        world_size,
        backend=backend,
        device=device,
        env=env,
        num_threads=num_threads,
        group_timeout_s=timeout_s if group_timeout_s is None else group_timeout_s,
        grace_s=grace_s,
    )
    with pool:
        return pool.run(fn, *args, timeout_s=timeout_s, expect_dead=expect_dead)
