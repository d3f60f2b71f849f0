"""The cost model: arithmetic by hand, and what must hold for every shape."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tuning.strategies import candidate_for, devices, idle_host, problems
from tpoverlap.errors import ConfigError
from tpoverlap.fused_form import MOST_TRADED_BYTES
from tpoverlap.tuning import (
    Candidate,
    DeviceModel,
    Problem,
    candidates,
    collective_us,
    estimate,
    gemm_time_us,
    known_devices,
    load_device,
    recognise,
    transfer_us,
)
from tpoverlap.tuning.device import GemmRates, OneKernel, Rate
from tpoverlap.tuning.problem import pieces_of, scatter_parts

# Numbers that can be checked by hand: 4 multiprocessors, 1 us a tile of K = 100, whole waves, 1 GB/s is 1 byte/ns.
TOY = DeviceModel(
    name="toy",
    basis="estimate",
    source="this test",
    multiprocessors=4,
    memory_gb_s=1e9,
    nvlink_domain=8,
    gemm=GemmRates(2.0, 0.01, 0.0, 0.0, 1.0, 0.0),
    copy=Rate(3.0, 0.001),
    gather=Rate(7.0, 0.001),
    scatter=Rate(9.0, 0.001),
    add=Rate(0.5, 1e9),
    fused=OneKernel(4.0, 1.5),
    one_launch=OneKernel(10.0, 1.5),
    step_us=0.25,
    hop_us=1.0,
    host_us={},
)


def test_gemm_counts_waves() -> None:
    assert gemm_time_us(TOY, 512, 256, 100) == 2.0 + 1.0, "4 tiles on 4 multiprocessors: one wave"
    assert gemm_time_us(TOY, 513, 256, 100) == 2.0 + 1.125, "nine waves of 64 x 64, an eighth each"
    assert gemm_time_us(TOY, 512, 256, 200) == 2.0 + 2.0, "twice the inner size"
    assert gemm_time_us(TOY, 0, 256, 100) == 0.0
    slow_memory = replace(TOY, memory_gb_s=1e-3)
    moved = (512 * 100 + 100 * 256 + 512 * 256) * 2
    assert math.isclose(gemm_time_us(slow_memory, 512, 256, 100), 2.0 + moved * 1.0), "the memory is the limit"


def test_methods_follow_their_schedules() -> None:
    """T = 512 in two chunks of one quarter wave each: by hand, from the drawings in overlap/ring_exchange.py."""
    gather = Problem("gather", 1024, 1, 256, 2)
    chunk_us = 512 * 1 * 2 * 1.0  # bytes at 1 byte a nanosecond... in us: 1024 bytes / 0.001 GB/s
    assert gather.chunk_bytes == 1024 and transfer_us(TOY, gather) == 3.0 + chunk_us
    part = gemm_time_us(TOY, 512, 256, 1)
    assert estimate(TOY, gather, Candidate("ring_exchange")).time_us == round(3.0 + chunk_us + part + 0.25, 1)
    whole = gemm_time_us(TOY, 1024, 256, 1)
    by_engine = estimate(TOY, gather, Candidate("sequential"), traded=False)
    assert by_engine.time_us == round(whole + 3.0 + chunk_us + 0.25, 1)
    kernel_us = 2 * 2.0 + 2 * 1.0 + chunk_us  # two launches, two ways; an estimate as long as nobody measured it
    assert estimate(TOY, gather, Candidate("sequential")).time_us == round(whole + kernel_us, 1)
    measured = replace(TOY, trade=Rate(9.0, 2e-3))
    assert estimate(measured, gather, Candidate("sequential")).time_us == round(whole + 9.0 + chunk_us / 2, 1)
    assert estimate(TOY, gather, Candidate("sequential"), current=False).time_us == round(whole + 7.0 + chunk_us, 1)
    assert estimate(TOY, gather, Candidate("fused")).time_us == round(3.0 + chunk_us + 10.0, 1), "one launch"
    longer = gather.at(4096)
    assert estimate(TOY, longer, Candidate("fused")).time_us == round(transfer_us(TOY, longer) + 4.0, 1), "copy engine"
    scatter = Problem("scatter", 1024, 1, 256, 2)
    gemm = gemm_time_us(TOY, 512, 1, 256)
    expected = gemm + chunk_us + 3.0 + 0.25  # the launch of the sum is in the step
    assert estimate(TOY, scatter, Candidate("ring_exchange")).time_us == round(expected, 1)
    two = estimate(TOY, scatter, Candidate("pipeline", num_splits=2))
    assert two.time_us > expected - gemm, "both pieces travel, and the second one after its GEMM"
    beside = Problem("beside-gather", 1024, 1, 256, 2)
    assert estimate(TOY, beside, Candidate("bulk")).time_us == round(3.0 + chunk_us + 0.25, 1)
    assert collective_us(TOY, replace(scatter, tp_size=4)) == 9.0 + 3 * 512 + 2.0, "two hops more"


def test_one_rank_communicates_nothing() -> None:
    alone = Problem("gather", 512, 100, 256, 1)
    assert candidates(alone, ("ring_exchange", "sequential")) == (Candidate("sequential"),)
    found = estimate(TOY, alone, Candidate("sequential"))
    assert found.time_us == found.gemm_us and found.exposed_us == 0.0


def test_the_launches_can_be_the_limit() -> None:
    gather = Problem("gather", 8, 16, 16, 2)
    busy = replace(TOY, host_us={"ag ring_exchange": 1000.0, "ag sequential": 400.0})
    ring = estimate(busy, gather, Candidate("ring_exchange"))
    assert (ring.time_us, ring.host_bound) == (1000.0, True)
    assert estimate(busy, gather, Candidate("sequential")).time_us == 400.0
    few_calls = replace(busy, host_us={**busy.host_us, "ag one_launch": 200.0})
    assert estimate(few_calls, gather, Candidate("sequential")).time_us == 200.0, "one kernel exchanges the rows"
    assert estimate(few_calls, gather, Candidate("sequential"), traded=False).time_us == 400.0
    counted = replace(few_calls, host_us={**few_calls.host_us, "ag traded": 150.0})
    assert estimate(counted, gather, Candidate("sequential")).time_us == 150.0
    assert not estimate(TOY, gather, Candidate("ring_exchange")).host_bound


@given(devices(), problems(), st.data())
def test_more_tokens_never_take_less_time(device: DeviceModel, problem: Problem, data: st.DataObject) -> None:
    more = data.draw(st.integers(problem.num_tokens, 40000))
    for candidate in candidate_for(problem):
        less_us = estimate(device, problem, candidate).time_us
        assert estimate(device, problem.at(more), candidate).time_us >= less_us - 0.1, candidate


@given(problems(), st.floats(1.0, 10.0))
def test_a_faster_link_never_takes_longer(problem: Problem, factor: float) -> None:
    device = idle_host(load_device("h200"))
    faster = replace(device, copy=Rate(device.copy.latency_us, device.copy.gb_s * factor))
    for candidate in candidate_for(problem):
        assert estimate(faster, problem, candidate).time_us <= estimate(device, problem, candidate).time_us


@given(devices(), problems())
def test_no_method_is_faster_than_its_gemm_or_its_transfer(device: DeviceModel, problem: Problem) -> None:
    """Parts of a GEMM can be a little cheaper than the whole one (other tiles), never by half."""
    for candidate in candidate_for(problem):
        found = estimate(device, problem, candidate)
        assert found.time_us >= min(found.gemm_us * 0.5, found.gemm_us - 0.1)
        if candidate.method in ("ring_exchange", "bulk", "pipeline"):
            assert found.time_us >= problem.bytes_sent / device.copy.gb_s * 1e-3 - 0.1, candidate
        assert 0.0 <= found.exposed_us <= found.time_us


@given(devices(), problems())
def test_sequential_is_the_sum(device: DeviceModel, problem: Problem) -> None:
    device = idle_host(device)
    both = gemm_time_us(device, *problem.gemm_shape, problem.itemsize_bytes)
    both += transfer_us(device, problem) + device.step_us
    if problem.is_scatter:  # the float32 sum
        both += device.add.time_us((problem.tp_size + 1) * problem.chunk_bytes)
    assert estimate(device, problem, Candidate("sequential"), traded=False).time_us == round(both, 1)


def test_a_kernel_exchanges_few_rows_only() -> None:
    device = idle_host(load_device("h200"))
    few, many = Problem("gather", 1024, 8192, 4096, 2), Problem("gather", 1026, 8192, 4096, 2)
    assert few.chunk_bytes == MOST_TRADED_BYTES < many.chunk_bytes
    for problem, by_kernel in ((few, True), (many, False), (replace(few, tp_size=16).at(512), False)):
        by_engine = estimate(device, problem, Candidate("sequential"), traded=False).time_us
        assert (estimate(device, problem, Candidate("sequential")).time_us != by_engine) == by_kernel, problem


def test_devices_say_what_they_are() -> None:
    assert known_devices()[0] == "h200" and {"h100", "gh200", "b200", "gb200-nvl72"} < set(known_devices())
    for name in known_devices():
        device = load_device(name)
        assert device.is_measured == (name == "h200"), "only one was measured"
        assert device.source and (device.is_measured or "data sheet" in device.source)
        assert DeviceModel.from_dict(json.loads(json.dumps(device.to_dict()))) == device
    assert load_device("gb200-nvl72").nvlink_domain == 72 and load_device("H200").name == "h200"


def test_recognised_by_properties() -> None:
    gib = 2**30
    assert recognise((9, 0), 132, 140 * gib) == load_device("h200")
    assert recognise((9, 0), 132, 80 * gib) == load_device("h100")
    assert recognise((10, 0), 148, 180 * gib) == load_device("b200")
    assert recognise((9, 0), 114, 80 * gib) is None, "another number of multiprocessors is another device"
    assert recognise((8, 0), 108, 80 * gib) is None


def test_bad_parameters() -> None:
    with pytest.raises(ConfigError, match="no device is called 'a100'; known: h200"):
        load_device("a100")
    good = TOY.to_dict()
    for broken in (
        {**good, "gemm": {}},
        {**good, "extra": 1},
        {key: value for key, value in good.items() if key != "copy"},
        {**good, "copy": {"latency_us": "fast", "gb_s": 1}},
        {**good, "multiprocessors": 0},
    ):
        with pytest.raises(ConfigError):
            DeviceModel.from_dict(broken)


def test_pieces_hide_the_sum_of_a_ring() -> None:
    device = idle_host(load_device("h200"))
    problem = Problem("scatter", 8192, 8192, 8192, 2)
    whole = estimate(device, problem, Candidate("ring_exchange"), current=False)
    cut = estimate(device, problem, Candidate("ring_exchange"))
    assert pieces_of(problem) == 2 and cut.time_us < whole.time_us


def test_pieces_of_a_ring_that_differ() -> None:
    """A slow link has all rows from the first GEMM on, and the last one waits for it; in FP8 pieces are equal."""
    problem, candidate = Problem("scatter", 8192, 3584, 8192, 2), Candidate("ring_exchange")
    assert scatter_parts(problem, 132) == [2688, 1408] and scatter_parts(problem, 0) == [2048, 2048]
    assert scatter_parts(replace(problem, fp8=True), 132) == [2048, 2048]
    slow = replace(TOY, multiprocessors=132, copy=Rate(0.0, 0.001))
    first, last = (gemm_time_us(slow, rows, 3584, 8192) for rows in (2688, 1408))
    link_us = problem.chunk_bytes  # at 1 byte a nanosecond, in us: bytes / 0.001 GB/s
    assert math.isclose(estimate(slow, problem, candidate).device_us, first + link_us + last + 0.25, abs_tol=0.1)
