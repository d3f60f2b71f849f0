"""Rank functions of `test_simulated`: a call may return garbage there; ``mgr.check()`` says so, as on a GPU."""

from __future__ import annotations

import time
from contextlib import nullcontext, suppress
from typing import Any

import torch

from tests.comm import operations as ops
from tests.comm.rank_functions import Outcome, attempt
from tpoverlap.testing import faults
from tpoverlap.testing.simulated import SimulatedBackend
from tpoverlap.tokens import TokenPartition


def _run_then_check(mgr: Any, kind: str, partition: TokenPartition) -> Outcome:
    """The outcome of ``mgr.check()`` after one operation, whatever that gave."""
    start = time.monotonic()
    with suppress(Exception):
        ops.run(mgr, kind, partition, 1)
    deadline = time.monotonic() + 6.0
    while True:  # a rank that was through already learns it from the abort word, when that comes
        outcome = attempt(mgr.check)
        if outcome.error != "ok" or time.monotonic() > deadline:
            return outcome._replace(seconds=time.monotonic() - start)
        time.sleep(0.02)


def disagree(rank: int, world_size: int, what: str) -> tuple[Outcome, Outcome, Outcome]:
    """The last rank does something else in operation 3."""
    rest = [10] * (world_size - 2)
    partition = TokenPartition.from_counts([10, *rest, 10])
    kind = "sequential_ag" if what.startswith("sequential") else "ring_ag"
    mgr = ops.make_manager(SimulatedBackend, timeout_s=20)
    ops.run_checked(mgr, "ring_rs", partition, 0)
    ops.run_checked(mgr, "sequential_ag", partition, 0)
    if rank == world_size - 1:
        if what.endswith("tokens"):
            partition = TokenPartition.from_counts([10, *rest, 11])
        elif what == "counts":
            partition = TokenPartition.from_counts([9, *rest, 11])
        else:
            kind = "ring_rs"
    check = _run_then_check(mgr, kind, partition)
    return check, attempt(lambda: ops.run(mgr, "ring_rs", partition, 1)), attempt(mgr.close)


def fail_inside(
    rank: int, world_size: int, kind: str, where: str, who: int, timeout_s: float
) -> tuple[Outcome, Outcome]:
    """Rank ``who`` fails in its fourth pair of operations: "gemm", "transfer" (raises), "kill" or "stall"."""
    partition = TokenPartition.balanced(30, world_size)
    mgr = ops.make_manager(SimulatedBackend, timeout_s)
    for seed in range(3):
        ops.run_checked(mgr, "ring_ag", partition, seed)
        ops.run_checked(mgr, "ring_rs", partition, seed)

    def boom(*args: Any) -> None:
        raise ValueError("something in the model")

    disturbance: Any = nullcontext()
    if rank == who and where == "gemm":
        disturbance = faults.before_gemms(mgr, boom)
    elif rank == who and where == "transfer":
        disturbance = faults.before_transfers(mgr, boom)
    elif rank == who and where == "kill":
        disturbance = faults.die_in_transfer(mgr, how="kill")
    elif rank == who:
        disturbance = faults.stall_in_transfer(mgr, 3.5)
    with disturbance:
        check = _run_then_check(mgr, kind, partition)
    return check, attempt(mgr.close)


def poisoned(rank: int, world_size: int) -> list[bool]:
    """Whether any, and whether all, of what the survivor gathered is NaN. Rank 1 does not come."""
    partition = TokenPartition.balanced(30, world_size)
    mgr = ops.make_manager(SimulatedBackend, 1.0)
    ops.run_checked(mgr, "ring_ag", partition, 0)
    result = [True, False]
    if rank == 0:
        result = ops.run(mgr, "ring_ag", partition, 1)
        result = [bool(torch.isnan(result).any()), bool(torch.isnan(result).all())]
    else:
        time.sleep(2.0)
    attempt(mgr.check)
    mgr.abort()
    return result
