"""The cost model of FP8 operations: bytes and kernels by hand, what must hold for every shape, and measured layers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tuning.strategies import candidate_for, devices, idle_host, problems
from tests.tuning.test_model import TOY
from tpoverlap.errors import ConfigError
from tpoverlap.gemm.fp8.quantize import ALIGNMENT, SCALE_BYTES
from tpoverlap.tuning import (
    Candidate,
    DeviceModel,
    Problem,
    candidates,
    collective_us,
    entry_key,
    estimate,
    estimated_table,
    gemm_time_us,
    known_devices,
    load_device,
    methods_known,
    plain,
    transfer_us,
)
from tpoverlap.tuning.device import Fp8Rates, GemmRates, OneKernel, Rate
from tpoverlap.tuning.layer import FP8_ALIGNMENT, LayerShape
from tpoverlap.tuning.problem import ROW_SCALE_BYTES, pieces_of
from tpoverlap.tuning.quantising import weight_us

RING, SEQUENTIAL = Candidate("ring_exchange"), Candidate("sequential")
FP8 = Fp8Rates(GemmRates(1.0, 0.005, 0.0, 0.0, 1.0, 0.0), Rate(0.5, 1.0), 10.0, "this test")
TOY8 = replace(TOY, fp8=FP8)
LAYERS = Path(__file__).parents[2] / "benchmarks" / "results" / "2026-11-30_h200x2_bench_layers.json"


def pass_us(size_bytes: int) -> float:
    return 0.5 + size_bytes * 1e-3


def test_what_travels() -> None:
    gather, scatter = (Problem(kind, 1000, 64, 256, 2, fp8=True) for kind in ("gather", "scatter"))
    assert gather.chunk_bytes == 500 * 64, "one byte an element"
    assert scatter.chunk_bytes == 500 * 64 * 2, "sums stay wide"
    packed = replace(scatter, fp8_buf=True)
    assert packed.chunk_bytes == 500 * (64 + ROW_SCALE_BYTES), "each row with its scale behind it"
    assert packed.by("ring_exchange") is packed and packed.by("pipeline") is packed
    assert packed.by("sequential") == scatter and packed.by("plain") == scatter, "they add in the original dtype"
    for kind, size in (("beside-gather", 1), ("beside-scatter", 2)):
        assert Problem(kind, 1000, 64, 256, 2, fp8=True, fp8_buf=True).chunk_bytes == 500 * 64 * size  # type: ignore[arg-type]
    assert (ROW_SCALE_BYTES, FP8_ALIGNMENT) == (SCALE_BYTES, ALIGNMENT), "this layer cannot import them"
    assert len({entry_key(one) for one in (scatter, packed, replace(scatter, fp8=False))}) == 3


def test_a_gather_quantises_its_own_rows_and_exchanges_magnitudes() -> None:
    gather = Problem("gather", 1024, 100, 256, 2, fp8=True)
    own = 512 * 100
    expected = pass_us(2 * own) + TOY8.in_fp8.exchange.latency_us + pass_us(3 * own)
    found = estimate(TOY8, gather, SEQUENTIAL, traded=False)
    assert found.quantise_us == round(expected, 1)
    assert found.gemm_us == 1.0 + 2 * 0.5, "two waves of half a microsecond, not of one"
    assert found.device_us == pytest.approx(expected + 2.0 + transfer_us(TOY, gather) + TOY.step_us, abs=0.11)
    assert transfer_us(TOY, gather) == 3.0 + own, "a byte a microsecond"
    assert found.exposed_us == pytest.approx(found.time_us - found.gemm_us - found.quantise_us)
    float32 = estimate(TOY8, replace(gather, itemsize_bytes=4), SEQUENTIAL).quantise_us
    assert float32 - found.quantise_us == pytest.approx(2 * (pass_us(2 * own) - pass_us(0)), abs=0.11), "twice read"
    alone = estimate(TOY8, replace(gather, tp_size=1), SEQUENTIAL)
    assert alone.device_us == pytest.approx(2.0 + pass_us(4 * own) + pass_us(6 * own), abs=0.11)


def test_other_kinds_quantise_what_their_gemm_reads() -> None:
    size = 1024 * 256
    for kind in ("scatter", "beside-gather"):
        problem = Problem(kind, 1024, 100, 256, 2, fp8=True)  # type: ignore[arg-type]
        assert estimate(TOY8, problem, SEQUENTIAL).quantise_us == round(pass_us(2 * size) + pass_us(4 * size), 1)
    wgrad = Problem("beside-scatter", 1024, 100, 256, 2, fp8=True)
    fast = replace(TOY8, copy=Rate(3.0, 10.0))
    bulk = estimate(fast, wgrad, Candidate("bulk"))
    assert bulk.quantise_us == round(pass_us(2 * 1024 * 100), 1)
    beside = bulk.quantise_us + bulk.gemm_us
    assert transfer_us(fast, wgrad) < beside, "or the next line says nothing"
    after = TOY.step_us + TOY.add.time_us(3 * wgrad.chunk_bytes)
    assert bulk.device_us == pytest.approx(beside + after, abs=0.21), "the rows travel beside both"
    assert weight_us(TOY8, wgrad) == pytest.approx(pass_us(2 * 25600) + pass_us(4 * 25600))


def test_packed_rows_are_not_added_to() -> None:
    """Otherwise a ring in pieces has no sum at its end, in FP8 neither: cublasLt adds to what arrived."""
    wide = Problem("scatter", 8192, 8192, 8192, 2)
    device = idle_host(load_device("h200"))
    assert pieces_of(wide) == pieces_of(replace(wide, fp8=True)) == 2
    slow_sum, packed = replace(device, add=Rate(500.0, device.add.gb_s)), replace(wide, fp8=True, fp8_buf=True)
    for problem, costs in ((wide, 0.0), (replace(wide, fp8=True), 0.0), (packed, 500.0 - device.add.latency_us)):
        with_sum, without = (estimate(one, problem, RING).device_us for one in (slow_sum, device))
        assert with_sum - without == pytest.approx(costs, abs=0.2)


def test_packed_rows_cost_kernels_and_save_bytes() -> None:
    wide = Problem("scatter", 8192, 8192, 1024, 2, fp8=True)
    packed = replace(wide, fp8_buf=True)
    device = idle_host(load_device("h200"))
    assert estimate(device, packed, SEQUENTIAL) == estimate(device, wide, SEQUENTIAL)
    slow = replace(device, copy=Rate(2.5, 20.0))
    for candidate in (RING, Candidate("pipeline", num_splits=2)):
        assert estimate(slow, packed, candidate).time_us < 0.7 * estimate(slow, wide, candidate).time_us
    # A link that takes no time hides no kernel, so that they can be counted: GB/s of 1 is a byte a nanosecond.
    instant = replace(device, copy=Rate(0.0, 1e9), add=Rate(0.0, 1e9))
    assert device.fp8 is not None
    costly, free = (replace(instant, fp8=replace(device.fp8, pass_over=rate)) for rate in (FP8.pass_over, Rate(0, 1e9)))
    one = 4096 * 8192
    for candidate, kernels in (
        (RING, [3 * one // 4] * 4 + [3 * one] + [5 * one] * 2),  # the peer's rows in four pieces, own rows, two blocks
        (Candidate("pipeline", num_splits=2), [3 * one] * 2 + [5 * one] * 2),
    ):
        found = [estimate(each, packed, candidate) for each in (costly, free)]
        cost_us = found[0].device_us - found[0].quantise_us - (found[1].device_us - found[1].quantise_us)
        assert cost_us == pytest.approx(sum(map(pass_us, kernels)), abs=0.5), candidate


def test_pieces_follow_the_bytes_that_travel() -> None:
    wide = Problem("scatter", 16384, 16384, 8192, 2, fp8=True)
    assert pieces_of(wide) == 4 and pieces_of(replace(wide, fp8_buf=True)) == 2
    gather = replace(wide, kind="gather")
    assert pieces_of(gather) == 2 and pieces_of(replace(gather, fp8=False)) == 4


def test_the_baseline_quantises_too() -> None:
    device = idle_host(load_device("h200"))
    for kind in ("gather", "scatter"):
        problem = Problem(kind, 4096, 8192, 4096, 2, fp8=True, fp8_buf=True)  # type: ignore[arg-type]
        found = plain(device, problem)
        wide_sums = replace(problem, fp8_buf=False)
        expected = found.gemm_us + found.quantise_us + collective_us(device, wide_sums)
        assert found.time_us == pytest.approx(expected, abs=0.2) and found.quantise_us > 5.0


def test_the_processor_launches_the_kernels_too() -> None:
    busy = replace(
        TOY8, host_us={"ag sequential": 400.0, "ag ring_exchange": 500.0, "rs sequential": 300.0, "plain": 90.0}
    )
    gather, scatter = (Problem(kind, 16, 16, 16, 2, fp8=True) for kind in ("gather", "scatter"))
    assert estimate(busy, gather, SEQUENTIAL).host_us == 400.0 + 2 * 10.0 + 400.0, "the exchange is an operation"
    assert estimate(busy, gather, RING).host_us == 500.0 + 2 * 10.0 + 400.0
    assert estimate(busy, scatter, SEQUENTIAL).host_us == 300.0 + 2 * 10.0
    assert plain(busy, gather).host_us == 90.0 + 2 * 10.0 + 90.0 and plain(busy, scatter).host_us == 90.0 + 20.0
    assert estimate(TOY8, gather, RING).host_us == 0.0, "launches that do not count, do not"
    in_layer = estimate(busy, gather, RING)
    assert in_layer.time_in_layer_us == pytest.approx(500.0 - in_layer.hidden_host_us), "no method avoids the rest"


def test_fused_is_not_chosen_before_it_was_timed() -> None:
    device = load_device("h200")
    assert device.fp8 is not None and device.fp8.fused is not None, "it is timed there"
    device = replace(device, fp8=replace(device.fp8, fused=None, one_launch=None, error={}))
    problem, legal = Problem("gather", 256, 8192, 4096, 2, fp8=True), ("ring_exchange", "fused")
    assert device.fp8 is not None and methods_known(device, problem, legal) == ("ring_exchange",)
    assert methods_known(device, replace(problem, fp8=False), legal) == legal
    timed = replace(device, fp8=replace(device.fp8, fused=OneKernel(9.0, 1.0), one_launch=OneKernel(5.0, 1.0)))
    assert methods_known(timed, problem, legal) == legal
    table = estimated_table(idle_host(timed), problem, 8192, legal, {})
    assert table.rows[0].candidate.method == "fused" and "not from whole FP8 operations" in table.basis
    untimed = {row.candidate.method for row in estimated_table(device, problem, 8192, legal, {}).rows}
    assert "fused" not in untimed and "ring_exchange" in untimed


def test_a_device_without_fp8() -> None:
    problem = Problem("gather", 256, 8192, 4096, 2, fp8=True)
    for ask in (estimate, plain):
        with pytest.raises(ConfigError, match=r"knows no FP8 tensor cores on toy; ask without FP8, or about .*h200"):
            ask(TOY, problem, SEQUENTIAL) if ask is estimate else ask(TOY, problem)  # type: ignore[call-arg]
    older = {key: value for key, value in load_device("h200").to_dict().items() if key != "fp8"}
    assert DeviceModel.from_dict(json.loads(json.dumps(older))).fp8 is None, "plans from before load"
    data = TOY8.to_dict()
    steep = {"gemm": {**data["fp8"]["gemm"], "sustained_exponent": 1e8}}  # a power that is no number any more
    for broken in (
        steep,
        {"gemm": {}},
        {"host_us": "slow"},
        {"pass_over": {"latency_us": 1.0, "gb_s": 0.0}},
        {"more": 1},
    ):
        with pytest.raises(ConfigError):
            DeviceModel.from_dict({**data, "fp8": {**data["fp8"], **broken}})


def test_every_device_says_where_its_fp8_comes_from() -> None:
    for name in known_devices():
        device = load_device(name)
        assert device.fp8 is not None
        assert ("which was checked by" in device.fp8.source) == device.is_measured
        assert ("in proportion to the peaks" in device.fp8.source) == (not device.is_measured)
        assert bool(device.fp8.error) == device.is_measured
    b200, h200 = (gemm_time_us(load_device(name).in_fp8, 8192, 8192, 8192, 1, 2) for name in ("b200", "h200"))
    assert 1.7 < h200 / b200 < 3.0, "4500 TFLOP/s against 1979"


def in_fp8() -> st.SearchStrategy[Problem]:
    return st.builds(lambda one, packed: replace(one, fp8=True, fp8_buf=packed), problems(), st.booleans())


@given(devices(), in_fp8(), st.data())
def test_more_tokens_never_take_less_time(device: DeviceModel, problem: Problem, data: st.DataObject) -> None:
    more = data.draw(st.integers(problem.num_tokens, 40000))
    for candidate in candidate_for(problem):
        less_us = estimate(device, problem, candidate).time_us
        assert estimate(device, problem.at(more), candidate).time_us >= less_us - 0.1, candidate


@given(devices(), in_fp8())
def test_no_method_is_faster_than_quantising_and_its_gemm(device: DeviceModel, problem: Problem) -> None:
    for candidate in candidate_for(problem):
        found = estimate(device, problem, candidate)
        assert found.time_us >= found.quantise_us + min(found.gemm_us * 0.5, found.gemm_us - 0.1) - 0.2, candidate
        assert 0.0 <= found.exposed_us <= found.time_us


def test_what_overlap_saves_in_measured_layers() -> None:
    """Nothing of these layers was fitted: device time, no overlap less ring and bulk, over the ten operations."""
    device, seen = idle_host(load_device("h200")), 0
    for row in json.loads(LAYERS.read_text())["rows"]:
        if row["kind"] != "transformer" or row["numbers"] != "fp8":
            continue
        sizes = (row["hidden"], row["ffn"], 2, row["heads"], row["groups"])
        saved = 0.0
        for problem in LayerShape(*sizes, gated=True, fp8=True).problems(row["num_tokens"]).values():
            sequential, overlapped = candidates(problem, ("ring_exchange", "bulk"))[:2]
            plain = estimate(device, problem, sequential)
            saved += plain.device_us - estimate(device, problem, overlapped).device_us
        measured = row["methods"]["no overlap"]["queued_us"] - row["methods"]["ring, bulk"]["queued_us"]
        assert saved == pytest.approx(measured, abs=120.0), row["label"]
        seen += 1
    assert seen == 8


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"hidden": 4096, "ffn": 14340}, "fc1 comes to 7170 at TP 2"),
        ({"hidden": 4100, "ffn": 14336}, "hidden comes to 4100"),
        ({"hidden": 4096, "ffn": 14336, "dtype": "fp32"}, "fp8 with dtype fp32"),
        ({"hidden": 4096, "ffn": 14336, "fp8": False, "fp8_buf": True}, "fp8_buf is about reduce-scatters"),
    ],
)
def test_layers_that_are_none_in_fp8(sizes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LayerShape(**({"tp_size": 2, "fp8": True} | sizes))  # type: ignore[arg-type]
