"""What the tests of the communication layer run on ranks."""

from __future__ import annotations

import gc
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch

import tpoverlap as tpo
from tests.comm import operations as ops
from tpoverlap.comm import watchdog
from tpoverlap.comm.epochs import wrap32
from tpoverlap.memory.base import CpuArena, agree
from tpoverlap.testing import faults
from tpoverlap.tokens import TokenPartition


class Outcome(NamedTuple):
    """How one call ended: ``"ok"`` or the error's class name; its text; how long it took; PeerTimeoutError.peer."""

    error: str
    message: str
    seconds: float
    peer: int | None = None


def attempt(call: Callable[[], Any]) -> Outcome:
    start = time.monotonic()
    try:
        call()
    except Exception as error:
        return Outcome(type(error).__name__, str(error), time.monotonic() - start, getattr(error, "peer", None))
    return Outcome("ok", "", time.monotonic() - start)


def attempt_kind(mgr: tpo.UserBufferManager, kind: str, partition: TokenPartition, seed: int = 1) -> Outcome:
    return attempt(lambda: ops.run_checked(mgr, kind, partition, seed))


# -- results stay right ------------------------------------------------------------------------------------------


def mixed(rank: int, world_size: int, backend: str, count: int) -> int:
    """All kinds of operations, one after the other, over partitions that grow and shrink."""
    with ops.make_manager(backend) as mgr:
        for seed, partition in enumerate(ops.partitions(world_size, count)):
            for kind in ops.KINDS:
                ops.run_checked(mgr, kind, partition, seed)
    return count * len(ops.KINDS)


def timing_attack(rank: int, world_size: int, backend: str, victim: int, seed: int) -> dict[str, int]:
    """Random delays on one rank: each stream in turn, then its transfers, then its GEMMs; operations by place."""
    done: dict[str, int] = {}
    generator = random.Random(1000 * seed + rank)

    def up_to(seconds: float) -> Callable[[], float]:
        return lambda: generator.random() ** 2 * seconds  # mostly short, sometimes long

    with ops.make_manager(backend) as mgr:
        places: dict[str, Callable[[], Any]] = {
            label: (lambda name=label: faults.delay_stream(mgr, name, up_to(0.004), only_rank=victim))
            for label in faults.stream_labels(mgr)
        }
        places["transfers"] = lambda: faults.delay_transfers(mgr, up_to(0.012), only_source=victim)
        places["gemms"] = lambda: faults.delay_gemms(mgr, up_to(0.008), only_rank=victim)
        for number, (place, delayed) in enumerate(places.items()):
            with delayed():
                partitions = ops.partitions(world_size, 4, seed=number)
                for turn, partition in enumerate(partitions):
                    kinds = random.Random(f"{seed} {number} {turn}").sample(ops.KINDS, len(ops.KINDS))
                    for kind in kinds:
                        ops.run_checked(mgr, kind, partition, 100 * number + turn)
                    done[place] = done.get(place, 0) + len(kinds)
    return done


def start_at(mgr: tpo.UserBufferManager, first_use: int) -> None:
    """The state that this rank's control words have after ``first_use`` uses of each region: every flag and credit of a
    slot is at the last use of that slot, however often its number has wrapped. All ranks have to, and then `agree`.
    """
    assert mgr.channel is not None, "several ranks"
    for region in mgr.channel.regions.values():
        region.uses = first_use
        arena = region.arena
        if isinstance(arena, CpuArena):
            words = arena.words32(mgr.rank)
            for slot in range(region.depth):
                last = first_use - (first_use - slot) % region.depth
                for source in range(mgr.tp_size):
                    start = region.layout.arrival_offset(region.index, slot, source, 0) // 4
                    words[start : start + 64] = np.uint32(wrap32(last))
                    credit = region.layout.credit_offset(region.index, slot, source) // 4
                    words[credit] = np.uint32(wrap32(last))


def across_the_wrap(rank: int, world_size: int, backend: str, first_use: int, sequence: int) -> dict[str, Any]:
    """Ten rounds of operations that start at use ``first_use`` + 1 of each region, as if that many had been done."""
    with ops.make_manager(backend) as mgr:
        channel = mgr.channel
        assert channel is not None
        start_at(mgr, first_use)
        channel._sequence = sequence
        agree(mgr.group, "set up")
        for seed, partition in enumerate(ops.partitions(world_size, 10)):
            for kind in ("ring_ag", "pipeline_rs", "sequential_ag"):
                with faults.delay_transfers(mgr, 0.002, only_source=seed % world_size):
                    ops.run_checked(mgr, kind, partition, seed)
        return {"uses": [region.uses for region in channel.regions.values()], "sequence": channel._sequence}


def held_slot(rank: int, world_size: int, backend: str) -> list[bool]:
    """Whether the view from ``get_buffer`` is right: after its operation, after the next one, and a while later."""
    partition = TokenPartition.balanced(30, world_size)
    with ops.make_manager(backend) as mgr:
        mgr.set_active_shape(partition=partition)
        ops.run_checked(mgr, "ring_ag", partition, 0)
        view = mgr.get("qkv_fprop").get_buffer()
        ops.run_checked(mgr, "ring_ag", partition, 1)
        wanted = ops.integers(1, 30, ops.WIDTH)  # what operation 1 gathered
        same = [torch.equal(view, wanted)]
        ops.run_checked(mgr, "ring_ag", partition, 2)
        same.append(torch.equal(view, wanted))
        if rank == world_size - 1:
            time.sleep(0.4)  # the others are in operation 3 by now and would like to write into this slot
            same.append(torch.equal(view, wanted))
        ops.run_checked(mgr, "ring_ag", partition, 3)
        for seed in range(4, 8):
            ops.run_checked(mgr, "ring_ag", partition, seed)
    return same


# -- methods are different ---------------------------------------------------------------------------------------


def traced(
    rank: int, world_size: int, backend: str, kind: str, transfer_delay_s: float, gemm_delay_s: float
) -> list[tuple[float, str, str, int]]:
    """(time_us, stream, what, step) of one operation; the last rank's transfers and this rank's GEMMs are slowed."""
    partition = TokenPartition.balanced(30, world_size)
    with ops.make_manager(backend) as mgr:
        ops.run_checked(mgr, kind, partition, 0)
        agree(mgr.group, "warm")
        with (
            faults.delay_transfers(mgr, transfer_delay_s, only_source=world_size - 1),
            faults.delay_gemms(mgr, gemm_delay_s),
            faults.tracing(mgr) as trace,
        ):
            ops.run_checked(mgr, kind, partition, 1)
        return [(m.time_us, m.stream, m.what, m.step) for m in trace.marks()]


def gemm_against_gather(rank: int, world_size: int, backend: str, kind: str) -> list[str]:
    """Order of the GEMM's parts and the plain collective; the last rank comes 0.3 s late."""
    from tpoverlap.gemm import RowGemm
    from tpoverlap.overlap import sequential

    events: list[str] = []
    rows, gather = RowGemm.rows, sequential.all_gather_rows

    def seen_rows(self: RowGemm, x: torch.Tensor, start: int) -> None:
        events.append(f"gemm {start}")
        rows(self, x, start)

    def seen_gather(*args: Any) -> torch.Tensor:
        result = gather(*args)
        events.append("gathered")
        return result

    partition = TokenPartition.balanced(30, world_size)
    with ops.make_manager(backend) as mgr:
        agree(mgr.group, "ready")
        with (
            mock.patch.object(RowGemm, "rows", seen_rows),
            mock.patch.object(sequential, "all_gather_rows", seen_gather),
        ):
            if rank == world_size - 1:
                time.sleep(0.3)
            ops.run_checked(mgr, kind, partition, 0)
    return events


# -- ranks that fail ---------------------------------------------------------------------------------------------


class Failure(NamedTuple):
    """What a rank saw of a failure: the call in which it happened, the next call, close, and a call after that."""

    first: Outcome
    again: Outcome
    check: Outcome
    close: Outcome
    after: Outcome


def fail_inside(rank: int, world_size: int, backend: str, kind: str, where: str, who: int, timeout_s: float) -> Failure:
    """One rank fails inside an operation: ``where`` is "gemm", "transfer", "stall", or "exit" / "kill" (in a transfer),
    "exit_in_gemm", or "exit_before" / "kill_between" / "abort_between" (before this operation)."""
    partition = TokenPartition.balanced(30, world_size)
    mgr = ops.make_manager(backend, timeout_s)
    if "before" not in where:
        for seed in range(3):
            ops.run_checked(mgr, "ring_ag", partition, seed)
            ops.run_checked(mgr, "ring_rs", partition, seed)
    disturbance: Any = nullcontext()
    if rank == who:
        if where.endswith(("_before", "_between")):
            if where.startswith("abort"):
                mgr.abort()
                return _see_failure(mgr, kind, partition)
            faults.die(where.split("_")[0])
        disturbance = _disturbance(mgr, where)
    with disturbance:
        return _see_failure(mgr, kind, partition)


def _disturbance(mgr: tpo.UserBufferManager, where: str) -> Any:
    def boom(*args: Any) -> None:
        raise ValueError("something in the model")

    if where == "gemm":
        return faults.before_gemms(mgr, boom)
    if where == "exit_in_gemm":
        return faults.before_gemms(mgr, lambda stream: faults.die("exit"))
    if where == "transfer":
        return faults.raise_in_transfer(mgr, ValueError("something in the model"))
    if where == "stall":
        return faults.stall_in_transfer(mgr, 2.8)
    return faults.die_in_transfer(mgr, how=where)


def _see_failure(mgr: tpo.UserBufferManager, kind: str, partition: TokenPartition) -> Failure:
    first = attempt_kind(mgr, kind, partition)
    again = attempt_kind(mgr, "ring_rs", partition)
    check = attempt(mgr.check)
    close = attempt(mgr.close)
    mgr.close()
    return Failure(first, again, check, close, attempt_kind(mgr, "ring_ag", partition))


def idle_then_late(rank: int, world_size: int, backend: str, kind: str, timeout_s: float, idle_s: float) -> Failure:
    """The last rank comes ``idle_s`` later than the others (which give up after ``timeout_s``)."""
    partition = TokenPartition.balanced(30, world_size)
    mgr = ops.make_manager(backend, timeout_s)
    ops.run_checked(mgr, "ring_ag", partition, 0)
    if rank == world_size - 1:
        time.sleep(idle_s)
    return _see_failure(mgr, kind, partition)


def close_while_another_aborts(rank: int, world_size: int, backend: str) -> tuple[Outcome, int]:
    """The last rank aborts when the others close; and how many threads are left."""
    mgr = ops.make_manager(backend, timeout_s=20)
    ops.run_checked(mgr, "ring_ag", TokenPartition.balanced(30, world_size), 0)
    if rank == world_size - 1:
        time.sleep(0.2)
        outcome = attempt(mgr.abort)
    else:
        outcome = attempt(mgr.close)
    mgr.close()
    mgr.abort()
    return outcome, len(_own_threads())


# -- ranks that disagree -----------------------------------------------------------------------------------------


def disagree(rank: int, world_size: int, backend: str, what: str) -> tuple[Outcome, Outcome, Outcome]:
    """The last rank does something else: the operation, the next call, and close."""
    odd = rank == world_size - 1
    rest = [10] * (world_size - 2)
    partition = TokenPartition.from_counts([10, *rest, 10])
    kind = {"method": "ring_rs", "num_splits": "pipeline_rs"}.get(what, "ring_ag")
    mgr = ops.make_manager(backend, timeout_s=20)
    ops.run_checked(mgr, "ring_rs", partition, 0)
    ops.run_checked(mgr, "sequential_ag", partition, 0)
    if what.startswith("sequential"):
        kind = "sequential_ag"
    if odd:
        if what in ("tokens", "sequential_tokens"):
            partition = TokenPartition.from_counts([10, *rest, 11])
        elif what in ("counts", "sequential_counts"):
            partition = TokenPartition.from_counts([9, *rest, 11])
        elif what == "name":
            kind = "aggregate_ag"
        elif what in ("order", "sequential_order"):
            kind = "ring_rs" if what == "order" else "sequential_rs"
        elif what == "method":
            _reconfigure(mgr, "fc2", method="pipeline", num_splits=3)
        elif what == "num_splits":
            _reconfigure(mgr, "proj", num_splits=2)
        elif what == "bulk":
            kind = "bulk_ag"
        elif what == "sequential_method":
            kind = "ring_ag"
    if odd and what == "close":
        first = attempt(mgr.close)
        return first, first, attempt(mgr.close)
    return attempt_kind(mgr, kind, partition), attempt_kind(mgr, "ring_rs", partition), attempt(mgr.close)


def _reconfigure(mgr: tpo.UserBufferManager, layer: str, **options: Any) -> None:
    """Behind the manager's back: it compares configurations when it is made, so users cannot get here."""
    communicator = mgr.layer(layer, row=True).fprop
    communicator.config = replace(communicator.config, **options)


def late_to_a_mismatch(rank: int, world_size: int, backend: str) -> Outcome:
    """Ranks 0 and 1 disagree, raise and close; rank 2 comes to that operation only then."""
    partition = TokenPartition.balanced(30, world_size)
    mgr = ops.make_manager(backend, timeout_s=20)
    ops.run_checked(mgr, "ring_ag", partition, 0)
    if rank == 2:
        time.sleep(1.5)
    if rank == 1:
        partition = TokenPartition.balanced(31, world_size)
    outcome = attempt_kind(mgr, "ring_ag", partition)
    mgr.close()
    return outcome


# -- life time ---------------------------------------------------------------------------------------------------


class _Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@contextmanager
def log_messages() -> Iterator[list[str]]:
    handler, logger = _Messages(), logging.getLogger("tpoverlap")
    logger.addHandler(handler)
    try:
        yield handler.texts
    finally:
        logger.removeHandler(handler)


def slow_rank(rank: int, world_size: int, backend: str, kind: str) -> list[str]:
    """Warnings of this rank while the last one comes late but not too late."""
    partition = TokenPartition.balanced(30, world_size)
    with (
        mock.patch.object(watchdog, "WARN_AFTER_S", 0.5),
        log_messages() as texts,
        ops.make_manager(backend, timeout_s=20) as mgr,
    ):
        ops.run_checked(mgr, "ring_ag", partition, 0)
        if rank == world_size - 1:
            time.sleep(1.2)
        ops.run_checked(mgr, kind, partition, 1)
        ops.run_checked(mgr, "ring_ag", partition, 2)
    return [text for text in texts if "has been in" in text]


def _own_threads() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("tpoverlap-"))


def forgotten_manager(rank: int, world_size: int, backend: str) -> dict[str, Any]:
    """Threads while a manager lives, and a moment after it was dropped without close."""
    before = _own_threads()
    mgr = ops.make_manager(backend)
    for kind in ops.KINDS:
        ops.run_checked(mgr, kind, TokenPartition.balanced(30, world_size), 0)
    during = _own_threads()
    agree(mgr.group, "done")
    del mgr
    gc.collect()
    deadline = time.monotonic() + 5.0
    while _own_threads() != before and time.monotonic() < deadline:
        time.sleep(0.02)
    return {"before": before, "during": during, "after": _own_threads()}


def closed_manager(rank: int, world_size: int, backend: str) -> list[Outcome]:
    """Every way to use a manager after close."""
    partition = TokenPartition.balanced(30, world_size)
    mgr = ops.make_manager(backend)
    layer, comm, ring = mgr.layer("qkv"), mgr.get("qkv_fprop"), mgr.layer("fc2", row=True)
    ops.run_checked(mgr, "ring_ag", partition, 0)
    mgr.close()
    mgr.close()
    mgr.abort()
    x, w = torch.zeros(10, ops.WIDTH), torch.zeros(ops.OUT, ops.WIDTH)
    own = x[: partition.counts[rank]]
    return [
        attempt(lambda: tpo.all_gather_gemm(own, w, layer, partition=partition)),
        attempt(lambda: tpo.all_gather_gemm(own, w, comm, partition=partition)),
        attempt(lambda: tpo.gemm_reduce_scatter(torch.zeros(30, ops.OUT), w.t(), ring, partition=partition)),
        attempt(lambda: mgr.set_active_shape(30)),
        attempt(lambda: mgr.get("qkv_fprop")),
        attempt(lambda: mgr.register("late", 8)),
        attempt(mgr.check),
        attempt(comm.get_buffer),
    ]


def managers_in_turn(rank: int, world_size: int, backend: str, count: int) -> int:
    """Managers one after the other and two at once: each has connections, threads and memory of its own."""
    partition = TokenPartition.balanced(30, world_size)
    for seed in range(count):
        with ops.make_manager(backend) as one, ops.make_manager(backend) as two:
            ops.run_checked(one, "ring_ag", partition, seed)
            ops.run_checked(two, "pipeline_rs", partition, seed)
            ops.run_checked(one, "ring_rs", partition, seed)
    return len(_own_threads())


def error_and_close(rank: int, world_size: int, backend: str) -> str:
    """An error while the peers wait, then close; the process ends soon afterwards."""
    mgr = ops.make_manager(backend, timeout_s=20)
    with faults.raise_in_transfer(mgr, ValueError("x"), only_source=1):
        outcome = attempt_kind(mgr, "ring_ag", TokenPartition.balanced(30, world_size))
    mgr.close()
    return outcome.error
