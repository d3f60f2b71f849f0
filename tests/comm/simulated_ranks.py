"""Rank functions of `test_simulated`: a call may return garbage there; ``mgr.check()`` says so, as on a GPU."""

from __future__ import annotations

import ctypes
import threading
import time
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import torch

from tests.comm import operations as ops
from tests.comm.rank_functions import Outcome, _own_threads, attempt
from tpoverlap.comm.device_exchange import DeviceExchange
from tpoverlap.comm.epochs import reached
from tpoverlap.overlap.fused_blocks import Slots
from tpoverlap.overlap.fused_launch import InKernel, _credits_on_the_callers_stream
from tpoverlap.testing import faults
from tpoverlap.testing.simulated import SimulatedBackend, SimulatedDriver
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
        disturbance = faults.stall_in_transfer(mgr, 2.8)
    with disturbance:
        check = _run_then_check(mgr, kind, partition)
    return check, attempt(mgr.close)


def abort_inside(rank: int, world_size: int, where: str, backend: str) -> tuple[Outcome, Outcome, Outcome, int]:
    """The last rank aborts inside its own operation, as a signal handler may: its abort, the operation, `check`, and
    how many threads are left. Of the others: close, the operation, `check`.

    ``where``: "gemm", in the thread of the operation, or "thread": in another one, while the operation goes on.
    """
    before, who = len(_own_threads()), world_size - 1
    partition = TokenPartition.balanced(30, world_size)
    mgr = ops.make_manager(SimulatedBackend if backend == "simulated" else backend, 20.0)
    ops.run_checked(mgr, "ring_ag", partition, 0)
    aborted: list[Outcome] = []

    def abort(stream: Any = None) -> None:
        aborted.append(attempt(mgr.abort))

    timer = threading.Timer(0.1, abort)
    disturbance: Any = nullcontext()
    if rank == who and where == "gemm":
        disturbance = faults.before_gemms(mgr, abort)
    elif rank == who:
        timer.start()
        disturbance = faults.before_gemms(mgr, lambda stream: time.sleep(0.3))
    with disturbance:
        ran = attempt(lambda: ops.run(mgr, "ring_ag", partition, 4))
    if rank != who:
        outcome = _run_then_check(mgr, "ring_ag", partition)
        return attempt(mgr.close), ran, outcome, 0
    if where == "thread":
        timer.join()
    return aborted[0], ran, attempt(mgr.check), len(_own_threads()) - before


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


class _LateCallerDriver(SimulatedDriver):
    """Its caller's stream is a stream like any other: what was launched there runs some time later."""

    def __init__(self) -> None:
        super().__init__()
        self.callers_stream = self.create_stream("caller", high_priority=False)

    def caller_stream(self) -> int:
        return self.callers_stream


class _LateCallerBackend(SimulatedBackend):
    def driver(self) -> SimulatedDriver:
        return _LateCallerDriver()


def rows_from_the_callers_stream(rank: int, world_size: int, uses: int, by_comm: bool) -> list[bool]:
    """All-gathers of two ranks whose rows and flags are written by work of the caller's stream: which were right.

    ``by_comm``: the comm stream waits for the credits, else the caller's.
    """
    mgr = ops.make_manager(_LateCallerBackend, 20.0)
    partition = TokenPartition.balanced(30, world_size)
    assert mgr.channel is not None
    right, slots = [], Slots(mgr.channel)
    for use in range(uses):
        own, got = torch.full((15, ops.WIDTH), 1.0 + 10 * use + rank), torch.zeros(15, ops.WIDTH)
        with mgr.operation(mgr.get("qkv_fprop"), partition, scatter=False).open_gather() as exchange:
            assert isinstance(exchange, DeviceExchange)
            caller, slot, peer, bytes_ = exchange.caller, exchange._slot, 1 - rank, own.nbytes
            made, epoch = slots.at("ag")
            assert epoch == exchange.arrivals.epoch and made.words == exchange.arrivals.address
            assert made.data == slot.data[rank] and made.peers is not None
            assert made.peers.tolist() == [list(pair) for pair in zip(slot.data, slot.arrival_out, strict=True)]
            if by_comm:
                exchange.copier = InKernel()
                for step in exchange.steps:
                    exchange.send(step, own, partition.rows(rank).start)
                caller.wait(exchange.sent())
            else:
                assert _credits_on_the_callers_stream(exchange, mgr.channel)

            def kernel(own: Any = own, got: Any = got, slot: Any = slot, epoch: int = exchange.arrivals.epoch) -> None:
                time.sleep(0.3 * rank)  # the host and the comm stream are far ahead
                ctypes.memmove(slot.data[peer] + rank * bytes_, own.data_ptr(), bytes_)  # noqa: B023
                ctypes.c_uint32.from_address(slot.arrival_out[peer]).value = epoch  # noqa: B023
                arrived = ctypes.c_uint32.from_address(slot.arrival_in[peer])  # noqa: B023
                while not reached(arrived.value, epoch):
                    time.sleep(1e-3)
                ctypes.memmove(got.data_ptr(), slot.data[rank] + peer * bytes_, bytes_)  # noqa: B023

            launch = partial(caller.driver.launch, caller.handle, kernel)
            exchange.run(caller, launch, "gemm")
        assert exchange.finished is not None
        caller.driver.synchronize()
        right.append(bool((got == 1.0 + 10 * use + peer).all()))
    mgr.check()
    mgr.close()
    return right
