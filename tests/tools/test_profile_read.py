"""``profile read``: another library's trace, ours, and files that are damaged in every way one can think of."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tools.te_trace import COMPUTE, GEMM, PATH, Writer, te_layer
from tests.tools.test_profile_figures import ring
from tpoverlap.tools.cli import main
from tpoverlap.tools.profile.chrome import chrome_events
from tpoverlap.tools.profile.kernels import gemm_of, is_layer_function, kind_of
from tpoverlap.tools.profile.read import report_of
from tpoverlap.tools.profile.trace_file import TraceError, read_trace


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["profile", "read", *map(str, arguments)], catch_exceptions=False)


def written(path: Path, data: Any) -> Path:
    path.write_text(json.dumps(data))
    return path


# -- Transformer Engine ------------------------------------------------------------------------------------------------


def test_the_file_is_what_its_script_writes() -> None:
    assert json.loads(PATH.read_text()) == te_layer(), "run python -m tests.tools.te_trace"


def test_a_te_layer_by_name() -> None:
    report, spans = report_of([PATH])
    rows = {row.name: row for row in report.figures}
    assert list(rows) == ["qkv_fprop", "proj_fprop", "_LayerNormMLPBackward"]
    qkv, proj, mlp = rows.values()
    assert (qkv.wall_us, qkv.compute_us, qkv.exposed_us) == (220, 200, 20)
    assert qkv.comm_us == 130 and qkv.overlapped_us == 110  # copy, flag, and the stray reduce-scatter; 100 + 10 hidden
    assert (proj.wall_us, proj.compute_us, proj.comm_us, proj.exposed_us) == (290, 200, 240, 90)
    assert proj.overlapped_us == 150 and proj.tail_us == 90
    assert (mlp.compute_us, mlp.comm_us) == (200, 0)
    assert {span.rank for span in spans} == {1}, "the file says which rank it is"


def test_what_was_not_attributed_is_said() -> None:
    notes = "\n".join(report_of([PATH])[0].notes)
    assert "1 GEMM kernel(s) not attributed to a name, 70 us, most often sm90_xmma_gemm" in notes
    assert "1 communication kernel(s) without a launch or range of their own, placed by time" in notes
    assert "1 communication kernel(s) not attributed to a name, 40 us, most often ncclDevKernel_AllReduce" in notes


def test_options_make_more_advice_possible(tmp_path: Path) -> None:
    cfg = tmp_path / "ub.yaml"
    cfg.write_text("proj_fprop: {method: pipeline, num_splits: 4, num_sm: 8, set_sm_margin: 1}\n")
    without = json.loads(invoke(PATH, "--json").output)["advice"]
    advice = json.loads(invoke(PATH, "--ub-cfg", cfg, "--tp", 2, "--json").output)["advice"]
    assert [one["rule"] for one in without] == ["link-bound"]
    assert [(one["name"], one["rule"], one["change"]) for one in advice] == [
        ("proj_fprop", "more-sm", ["proj_fprop: {num_sm: 16}"])
    ]


def test_it_writes_a_picture_and_a_table(tmp_path: Path) -> None:
    result = invoke(PATH, "-o", tmp_path / "out")
    assert result.exit_code == 0 and "proj_fprop" in result.output and "placed by time" in result.output
    assert (tmp_path / "out" / "timeline.png").read_bytes()[:4] == b"\x89PNG"
    assert json.loads((tmp_path / "out" / "report.json").read_text())["library"] == ["te"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_hsh_256x128_64x4_2x1_v_bz_coopA_TNN", "gemm"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_64x256_32x4_nn_align8>", "gemm"),
        ("void userbuffers_fp16_sum_inplace_gpu_rw_ag<4>(int, int)", "comm"),
        ("kuserbuffers_pushrecv(int, int, int*)", "comm"),
        ("ncclDevKernel_SendRecv(ncclDevComm*)", "comm"),
        ("Memcpy PtoP (Device -> Device)", "comm"),
        ("Memcpy DtoD (Device -> Device)", "other"),
        ("void reduce_bf16_cuda<1>(void*, void*, int)", "reduce"),
        ("void at::native::reduce_kernel<512, 1>", "other"),
        ("triton_poi_fused_mul_silu_0", "other"),
    ],
)
def test_kernels_by_name(name: str, kind: str) -> None:
    assert kind_of(name) == kind


@pytest.mark.parametrize(
    ("name", "gemm"),
    [
        ("fc1_fprop all-gather ring_exchange T=4096", "fc1_fprop"),
        ("transformer_engine._LayerNormLinear.forward.qkv.gemm", "qkv_fprop"),
        ("transformer_engine._Linear.backward.proj.dgrad_gemm", "proj_dgrad"),
        ("transformer_engine._LayerNormLinear.backward.qkv.wgrad.gemm", "qkv_wgrad"),
        ("transformer_engine._LayerNormMLP.backward.fc2_dgrad", "fc2_dgrad"),
        ("Optimizer.step#Adam.step", None),
        ("aten::linear", None),
        ("myfc1_fproperty", None),
    ],
)
def test_ranges_by_name(name: str, gemm: str | None) -> None:
    assert gemm_of(name) == gemm


def test_ranges_inside_a_range_of_the_same_gemm_are_one_call(tmp_path: Path) -> None:
    w = Writer()
    w.range("training", 0, 2000)
    for call in range(2):
        w.range("fc1_fprop all-gather ring_exchange T=8", 1000 * call + 10, 1000 * call + 800)
        for chunk in range(2):
            begin = 1000 * call + 100 * chunk
            w.range("transformer_engine._Linear.forward.fc1.gemm", begin + 20, begin + 60)
            w.kernel(GEMM, COMPUTE, begin + 50, begin + 90, begin + 30)
    (row,) = report_of([written(tmp_path / "trace.json", w.events)])[0].figures
    assert (row.name, row.calls, row.wall_us, row.compute_us) == ("fc1_fprop", 2, 140, 80)


@pytest.mark.parametrize(
    ("name", "is_one"),
    [("_LayerNormMLPBackward", True), ("_Linear", True), ("RowLinearBackward", True), ("LinearFunction", False)],
)
def test_layer_functions_by_name(name: str, is_one: bool) -> None:
    assert is_layer_function(name) == is_one


def test_a_gpu_side_range_beats_the_launch() -> None:
    data = te_layer()
    for event in data["traceEvents"]:
        event["ts"] = float(event["ts"])
    annotation = {
        "ph": "X",
        "cat": "gpu_user_annotation",
        "name": "fc2_dgrad",
        "pid": 0,
        "tid": 7,
        "ts": 5990,
        "dur": 90,
    }
    data["traceEvents"].append(annotation)
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        report, _ = report_of([written(Path(directory) / "trace.json", data)])
    assert [row.compute_us for row in report.figures if row.name == "fc2_dgrad"] == [70]


# -- ours ----------------------------------------------------------------------------------------------------------


def test_our_own_trace_comes_back_as_it_was(tmp_path: Path) -> None:
    spans = sorted([*ring(0, 0), *ring(0, 1, 400.0)], key=lambda span: (span.begin_us, -span.end_us))
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": chrome_events(spans)}).encode()))
    assert read_trace(path).spans == spans


def test_one_file_a_rank(tmp_path: Path) -> None:
    files = [
        written(tmp_path / f"{rank}.json", {"traceEvents": chrome_events(ring(rank, 0, 0.0, 20.0 + 30 * rank))})
        for rank in range(2)
    ]
    report, spans = report_of(files)
    assert {span.rank for span in spans} == {0, 1}
    assert report.figures[0].wall_us == pytest.approx(260) and report.figures[0].waited_for_rank == 0
    twice, spans = report_of([files[0], files[0]])  # the same rank again: taken as another one
    assert {span.rank for span in spans} == {0, 1} and twice.figures


# -- damaged ---------------------------------------------------------------------------------------------------------


def damaged() -> dict[str, bytes]:
    whole = PATH.read_bytes()
    return {
        "empty": b"",
        "cut off": whole[: len(whole) // 2],
        "not json": b"\x89PNG\r\n\x1a\n" + bytes(50),
        "a number": b"17",
        "an object without events": b'{"spans": []}',
        "events that are no list": b'{"traceEvents": {"a": 1}}',
        "gzip cut off": gzip.compress(whole)[:300],
        "gzip of nothing": b"\x1f\x8b",
        "gzip with a wrong byte": gzip.compress(whole)[:100] + b"\x00\x01\x02" + gzip.compress(whole)[103:],
        "latin-1": '{"traceEvents": [{"name": "é"}]}'.encode("latin-1"),
        "too deep": b"[" * 100_000,
    }


@pytest.mark.parametrize("what", damaged())
def test_a_broken_file_is_an_error_and_not_a_traceback(what: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(damaged()[what])
    result = invoke(path)
    assert result.exit_code == 2 and result.stderr.startswith("Error: ") and str(path) in result.stderr, result.output


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert invoke(tmp_path / "none.json").exit_code == 2
    assert invoke(tmp_path).exit_code == 2  # a directory


@pytest.mark.parametrize("events", [[], [{}], [None, 3, "x"], [{"ph": "X", "cat": "cpu_op", "name": "a", "ts": 1}]])
def test_a_trace_with_nothing_in_it(events: list[Any], tmp_path: Path) -> None:
    result = invoke(written(tmp_path / "trace.json", events))
    assert result.exit_code == 0 and "no GPU kernel in this trace" in result.output


def test_kernels_without_any_named_range(tmp_path: Path) -> None:
    events = [event for event in te_layer()["traceEvents"] if event.get("cat") == "kernel"]
    result = invoke(written(tmp_path / "trace.json", {"traceEvents": events}))
    assert result.exit_code == 0 and "no range names a GEMM" in result.output and "8 GEMM kernel(s)" in result.output


JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.lists(st.integers(), max_size=2)
)


@settings(max_examples=150)
@given(st.data())
def test_damaged_events_never_end_in_a_traceback(data: st.DataObject) -> None:
    import tempfile

    ours = {"traceEvents": chrome_events(ring())}
    trace = data.draw(st.sampled_from([te_layer(), ours]))
    events = trace["traceEvents"]
    for _ in range(data.draw(st.integers(1, 6))):
        index = data.draw(st.integers(0, len(events) - 1))
        if not isinstance(events[index], dict) or data.draw(st.booleans()):
            events[index] = data.draw(JUNK)
            continue
        event = dict(events[index])
        key = data.draw(st.sampled_from([*event, "args"]))
        event[key] = data.draw(JUNK)
        events[index] = event
    with tempfile.TemporaryDirectory() as directory:
        path = written(Path(directory) / "trace.json", trace)
        try:
            report_of([path])
        except TraceError as error:
            assert str(path) in str(error)
