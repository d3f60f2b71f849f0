"""The always-on meter: sums on points made by hand, and on ranks of which one is late."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tpoverlap as tpo
from tpoverlap.comm import Transfer
from tpoverlap.comm.descriptor import Descriptor
from tpoverlap.comm.meter import Meter
from tpoverlap.overlap.fp8 import _SCALES as SCALES
from tpoverlap.testing.faults import before_transfers, tracing
from tpoverlap.testing.simulated import SimulatedBackend

CPU = torch.device("cpu")
GATHER = Descriptor(1, "fc1_fprop all-gather ring_exchange", 100, 0)


def test_waits_are_summed_by_name_and_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(us * 1e-6 for us in (0, 10, 40, 50, 55, 100, 1000, 1010, 1030, 1100))
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    meter = Meter(CPU)
    for marks in (
        [("begin", -1), ("wait", 1), ("arrived", 1), ("wait", -1), ("arrived", -1), ("sent", 1), ("end", -1)],
        [("begin", -1), ("wait", 2), ("arrived", 2), ("end", -1)],
    ):
        operation = meter.of(GATHER)
        assert operation is not None
        for what, peer in marks:
            operation.mark(what, peer)
    (row,) = [meter.stats()["fc1_fprop"]]
    assert row["metered_calls"] == 2 and row["waited_for_rank"] == 1
    assert row["exposed_us"] == pytest.approx((30 + 5 + 20) / 2) and row["exposed_percent"] == pytest.approx(27.5)


def test_what_belongs_to_another_ones_call_is_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(us * 1e-6 for us in (0, 10, 20, 50, 100, 110, 150, 200))
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    meter = Meter(CPU)
    for label in (f"fc1_fprop all-gather sequential{SCALES}", "fc1_fprop all-gather ring_exchange/e4m3"):
        operation = meter.of(Descriptor(1, label, 100, 0))
        assert operation is not None
        for what, peer in (("begin", -1), ("wait", 1), ("arrived", 1), ("end", -1)):
            operation.mark(what, peer)
    (row,) = [meter.stats()["fc1_fprop"]]
    assert row["metered_calls"] == 1 and row["exposed_us"] == pytest.approx(10 + 40)


def test_one_in_so_many_and_failed_ones_do_not_count() -> None:
    meter = Meter(CPU, every=4)
    operations = [meter.of(GATHER) for _ in range(12)]
    measured = [operation for operation in operations if operation is not None]
    assert len(measured) == 3 and all(operation is None for operation in operations[:3])
    for operation in measured[1:]:
        operation.mark("begin", -1)
        operation.mark("end", -1)
    assert meter.stats() == {}, "the first one is not over: they are collected in order"
    measured[0].failed = True
    assert meter.stats()["fc1_fprop"]["metered_calls"] == 2


@pytest.mark.parametrize("names", [1, 6, 12, 16])
def test_no_name_is_left_out_however_many_a_step_has(names: int) -> None:
    """One in so many of all operations would never meet most names of a step of 16."""
    meter = Meter(CPU, every=16)
    step = [Descriptor(1, f"name{index}_fprop all-gather ring_exchange", 100, 0) for index in range(names)]
    seen: dict[str, int] = {}
    most = 0
    for _ in range(32):
        measured = [operation for one in step if (operation := meter.of(one)) is not None]
        most = max(most, len(measured))
        for operation in measured:
            seen[operation.name] = seen.get(operation.name, 0) + 1
            operation.failed = True
    assert seen == {f"name{index}_fprop": 2 for index in range(names)}
    assert most == 1, "and no step is slowed down by all of them"


class FakeEvent:
    """A timing event that the device passes at once; counts how many were made."""

    made = 0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        type(self).made += 1
        self.at_ms = -1.0

    def record(self) -> None:
        self.at_ms = 1e3 * time.perf_counter()

    def query(self) -> bool:
        return self.at_ms >= 0

    def elapsed_time(self, end: FakeEvent) -> float:
        return end.at_ms - self.at_ms


def test_events_are_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(FakeEvent, "made", 0)
    meter = Meter(torch.device("cuda"), every=1)
    for number in range(50):
        operation = meter.of(GATHER)
        assert operation is not None
        for what in ("begin", "wait", "arrived", "end"):
            operation.mark(what, 1)
        if number == 25:
            operation.failed = True
    row = meter.stats()["fc1_fprop"]
    assert row["metered_calls"] == 49 and 0 < row["exposed_percent"] < 100
    assert FakeEvent.made == 8, "four, and four again after the failed one kept its own"


def test_a_host_that_runs_ahead_is_not_measured_without_bound() -> None:
    meter = Meter(CPU)
    assert sum(meter.of(GATHER) is not None for _ in range(1000)) == 64


# -- on ranks ----------------------------------------------------------------------------------------------------------


def metered(rank: int, world_size: int, backend: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    mgr = tpo.UserBufferManager(dist.group.WORLD, (64, 32), torch.float32, "cpu", backend=backend, meter=True)
    with mgr:
        layer = tpo.nn.Linear(32, 64, False, parallel_mode="column", manager=mgr, ub_name="fc1")
        row = tpo.nn.Linear(64, 32, False, parallel_mode="row", manager=mgr, ub_name="fc2")

        def step() -> None:
            x = torch.ones(64 // world_size, 32, requires_grad=True)
            row(layer(x)).sum().backward()

        step()
        before = mgr.stats()

        def late(transfer: Transfer) -> None:
            time.sleep(0.02)

        with before_transfers(mgr, late, only_source=world_size - 1):
            for _ in range(3):
                step()
        during = mgr.stats()
        with tracing(mgr):  # pauses the meter
            step()
        return before, during, mgr.stats()


@pytest.mark.parametrize("backend", ["shared", "process_group", SimulatedBackend], ids=str)
def test_the_late_rank_is_named(backend: Any, rank_pool: Any) -> None:
    results = rank_pool(2).run(metered, backend, timeout_s=60)
    before, during, after = results[0]
    for name in ("fc1_fprop", "fc2_fprop", "fc2_dgrad", "fc1_wgrad"):
        assert before[name]["metered_calls"] == 1 and during[name]["metered_calls"] == 4
        assert during[name]["waited_for_rank"] == 1, name
        assert 5_000 < during[name]["exposed_us"] < 200_000
        assert 30 < during[name]["exposed_percent"] <= 100
        assert after[name]["calls"] == 5 and after[name]["metered_calls"] == 4
    assert results[1][1]["fc1_fprop"]["waited_for_rank"] in (0, -1)


def without_meter(rank: int, world_size: int) -> dict[str, Any]:
    with tpo.UserBufferManager(dist.group.WORLD, (64, 32), torch.float32, "cpu") as mgr:
        layer = tpo.nn.Linear(32, 64, False, parallel_mode="column", manager=mgr, ub_name="fc1")
        layer(torch.ones(64 // world_size, 32))
        return mgr.stats()["fc1_fprop"]


def test_it_is_off_unless_asked_for(rank_pool: Any) -> None:
    assert "exposed_us" not in rank_pool(2).run(without_meter, timeout_s=60)[0]


def test_what_it_costs_an_operation() -> None:
    """Under 1 % of an operation of two milliseconds; the median of many, since other processes run too."""
    meter = Meter(CPU)
    costs = []
    for _ in range(300):
        started = time.perf_counter()
        operation = meter.of(GATHER)
        assert operation is not None
        for what in ("begin", "wait", "arrived", "end"):
            operation.mark(what, 1)
        costs.append(time.perf_counter() - started)
    assert sorted(costs)[150] < 20e-6
