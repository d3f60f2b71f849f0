"""`tpoverlap config explain` and `config presets`: sizes, ideal timelines, pictures, look-up."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from tpoverlap.config import SUPPORTED, check_file, default_config, resolve
from tpoverlap.config.defaults import method_defaults
from tpoverlap.tools.cli import main
from tpoverlap.tools.config.explain import MEANING, explained
from tpoverlap.tools.config.picture import lanes
from tpoverlap.tools.config.presets import find_preset, ranked, shipped
from tpoverlap.tools.config.sizes import Layer, work_of
from tpoverlap.tools.config.timeline import timeline

DATA = Path(__file__).parents[1] / "data" / "ub_configs"
LAYER = Layer(hidden=8192, ffn=28672, tp_size=2, tokens=4096, gated=True, qkv_width=10240)
SIZES = ["--hidden", "8192", "--ffn", "28672", "--tp", "2", "--tokens", "4096", "--gated", "--qkv-width", "10240"]


def run(*arguments: object) -> Result:
    result = CliRunner().invoke(main, ["config", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


# (rows, inner, columns) of Llama 3 70B at TP 2, T 4096, by hand
SHAPES = {
    "qkv_fprop": (4096, 8192, 5120), "qkv_dgrad": (4096, 5120, 8192), "qkv_wgrad": (5120, 4096, 8192),
    "proj_fprop": (4096, 4096, 8192), "proj_dgrad": (4096, 8192, 4096),
    "fc1_fprop": (4096, 8192, 28672), "fc1_dgrad": (4096, 28672, 8192), "fc1_wgrad": (28672, 4096, 8192),
    "fc2_fprop": (4096, 14336, 8192), "fc2_dgrad": (4096, 8192, 14336),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_and_bytes(name: str) -> None:
    work = work_of(name, resolve(None, 2).names[name], LAYER)
    assert work is not None and (work.rows, work.inner, work.columns) == SHAPES[name]
    assert work.tensor_bytes == 4096 * 8192 * 2  # always [T, H], never the expanded output
    assert work.bytes_sent == 2048 * 8192 * 2


def test_uneven_rows_and_fp8() -> None:
    odd = Layer(hidden=64, ffn=128, tp_size=4, tokens=10, dtype="fp8")
    gather, scatter = (default_config(name, rs, 4) for name, rs in (("fc1_fprop", False), ("fc2_fprop", True)))
    one, two = work_of("fc1_fprop", gather, odd), work_of("fc2_fprop", scatter, odd)
    assert one is not None and two is not None
    assert (one.bytes_sent, two.bytes_sent) == (3 * 3 * 64, 3 * 3 * 64 * 2)  # an FP8 buffer; a bf16 one
    assert work_of("mtp", gather, odd) is None


@pytest.mark.parametrize(
    ("method", "is_reduce_scatter", "total"),
    [
        ("sequential", False, 11.0),  # 8 of computing, 3 of moving, R = 4
        ("sequential", True, 11.0),
        ("bulk", False, 8.0),
        ("ring_exchange", False, 8.0),
        ("ring_exchange", True, 8.0),
        ("pipeline", True, 8.75),  # the last of four pieces travels when nothing computes any more
    ],
)
def test_ideal_timelines(method: str, is_reduce_scatter: bool, total: float) -> None:
    drawn = timeline(method_defaults(method, is_reduce_scatter, 4), 4, 8.0, 3.0)
    assert drawn.total == pytest.approx(total) and drawn.exposed == pytest.approx(total - 8.0)


def test_a_slow_link_is_exposed_and_aggregate_at_two_hides_nothing() -> None:
    gather, scatter = method_defaults("ring_exchange", False, 2), method_defaults("ring_exchange", True, 2)
    assert timeline(gather, 2, 2.0, 5.0).total == pytest.approx(6.0)  # 5 until the rows are here, then their half
    assert timeline(scatter, 2, 2.0, 5.0).total == pytest.approx(6.0)
    joined = method_defaults("ring_exchange", False, 2).to_dict() | {"aggregate": True}
    assert timeline(type(gather)(**joined), 2, 2.0, 5.0).exposed == pytest.approx(5.0)  # type: ignore[arg-type]
    assert timeline(gather, 1, 2.0, 5.0).total == 2.0


@given(
    st.sampled_from(["ring_exchange", "pipeline", "bulk", "sequential"]),
    st.booleans(),
    st.integers(1, 9),
    st.floats(0.01, 1e4),
    st.floats(0.01, 1e4),
)
def test_no_timeline_beats_its_bounds(method: str, scatter: bool, tp_size: int, gemm: float, copy: float) -> None:
    drawn = timeline(method_defaults(method, scatter or method == "pipeline", tp_size), tp_size, gemm, copy)
    moving = copy if tp_size > 1 else 0.0
    assert max(gemm, moving) * (1 - 1e-9) <= drawn.total <= (gemm + moving) * (1 + 1e-9)
    for lane in ("GEMM", "copy"):
        spans = sorted((s for s in drawn.spans if s.lane == lane), key=lambda span: span.start)
        assert all(one.end <= two.start + 1e-6 for one, two in pairwise(spans)), "one thing at a time"
    assert len({len(line) for line in lanes(drawn, 40)}) == 1


def test_a_picture() -> None:
    drawn = timeline(method_defaults("ring_exchange", True, 4), 4, 8.0, 3.0)
    assert lanes(drawn, 16) == ["GEMM |0000111122223333|", "copy |....00..11..22..|"]


def test_words_about_a_published_preset() -> None:
    (path,) = DATA.glob("*v4.0__h100tp2mbs1__v2.yaml")
    result = run("explain", path, *SIZES)
    assert result.exit_code == 0
    assert "moves    its own output y, partial sums [T 4096, H 8192], 64.0 MiB" in result.output
    assert "each of the 2 ranks sends and receives 32.0 MiB" in result.output
    assert "in Transformer Engine 32 multiprocessors, which the GEMM leaves free" in result.output
    assert "line 23   num_sm: 32 -- multiprocessors that copy; ignored here" in result.output
    assert "refused" not in result.output and "atomic_gemm" in result.output
    assert " us" not in result.output and "not to scale" in result.output  # nothing about time without rates
    written = sum(
        len(one.written) for one in explained(resolve(path, 2, supported=SUPPORTED | {"atomic_gemm"}), LAYER, None)
    )
    assert result.output.count(" -- ") == written  # every line of the file is explained


@pytest.mark.parametrize(
    ("options", "tp_size", "says"),
    [
        ("method: bulk", 2, "what the transfer (32.0 MiB a rank) takes longer than the GEMM"),
        ("method: sequential", 2, "all of it (32.0 MiB a rank)"),
        ("method: ring_exchange", 2, "what a chunk, 32.0 MiB, takes longer to travel than to compute"),
        ("method: ring_exchange", 4, "what a chunk, 16.0 MiB, takes longer to travel than to compute, 3 times"),
        ("{method: ring_exchange, aggregate: 1}", 4, "the first chunk, 16.0 MiB, and what two chunks take longer"),
        (
            "{method: pipeline, num_splits: 4, is_reduce_scatter: 1}",
            2,
            "the last of 4 pieces, 8.0 MiB, and what a piece",
        ),
        ("method: ring_exchange", 1, "nothing"),
    ],
)
def test_what_is_exposed_in_words(tmp_path: Path, options: str, tp_size: int, says: str) -> None:
    """Without rates, too, it says what sticks out."""
    name = "qkv_fprop" if "aggregate" in options else "qkv_dgrad"  # the only kind that may have any method
    options = options if options.startswith("{") else f"{{{options}}}"
    (tmp_path / "ub.yaml").write_text(f"{name}: {options}\n")
    sizes = [*SIZES[:5], str(tp_size), *SIZES[6:]]
    result = run("explain", tmp_path / "ub.yaml", *sizes, "--gemm", name)
    assert f"  exposed  {says}" in result.output, result.output


def test_a_tuned_file_says_what_runs_at_this_t(tmp_path: Path) -> None:
    """And `atomic_gemm` is drawn as the method that it selects."""
    (tmp_path / "ub.yaml").write_text(
        "fc2_fprop: {method: pipeline, atomic_gemm: 1}\n"
        "fc1_fprop: {method: ring_exchange}\n"
        "tpoverlap: {by_tokens: {fc1_fprop: {features: 8, width: 4, instead_of: ring_exchange, rows: "
        "[{up_to: 512, method: sequential}, {up_to: 9999, method: ring_exchange}]}}}\n"
    )
    for tokens, method in (("512", "sequential"), ("513", "ring_exchange"), ("20000", "ring_exchange")):
        sizes = [tokens if before == "--tokens" else one for before, one in zip(["", *SIZES], SIZES, strict=False)]
        output = run("explain", tmp_path / "ub.yaml", *sizes).output
        assert f"tpoverlap runs {method} at T {tokens}, where the GEMM has 8 features" in output, output
        assert output.count("by_tokens") == 1, "other names have no rows"
        assert (
            "fc2_fprop: reduce-scatter, pipeline; fused here, as atomic_gemm asks" in output
            and "one kernel computes and moves" in output
        )


def test_time_only_from_stated_rates(tmp_path: Path) -> None:
    rates = tmp_path / "rates.json"
    rates.write_text(json.dumps({"gemm_tflops": 700, "link_gb_s": 300, "source": "two H200s, a bench run"}))
    result = run("explain", "default", *SIZES, "--gemm", "fc2_fprop", "--rates", rates)
    assert "computed from 700 TFLOP/s and 300 GB/s (two H200s, a bench run)" in result.output
    assert "exposed  0 us of 112 us communication (GEMM 1374 us)" in result.output
    assert "(assumed, given as options)" in run("explain", "default", *SIZES, "--tflops", 1, "--link-gb-s", 2).output


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["default", "--tflops", "700"], 1, "link_gb_s must be a positive number"),
        (["default", "--tflops", "nan", "--link-gb-s", "1"], 1, "gemm_tflops must be a positive number"),
        (["default", "--rates", "/none.json"], 1, "cannot read the rates"),
        (["default", "--gemm", "fc2_wgrad"], 1, "no GEMM fc2_wgrad communicates"),
        (["default", "--plot", "/none/x.png"], 1, "--plot /none/x.png"),
        (["/none.yaml"], 2, "cannot read"),
        (["userbuffers_none"], 2, "nor is it a preset: tpoverlap config presets lists them"),
        (["default", "--tokens", "0"], 2, "not in the range"),
    ],
)
def test_bad_input(arguments: list[str], code: int, says: str) -> None:
    result = run("explain", *SIZES, *arguments)
    assert result.exit_code == code and says in result.output + result.stderr


def test_a_plot(tmp_path: Path) -> None:
    assert run("explain", "default", *SIZES, "--plot", tmp_path / "x.png").exit_code == 0
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_every_key_has_a_meaning() -> None:
    from tpoverlap.config import OPTION_KEYS

    assert tuple(MEANING) == OPTION_KEYS


def test_shipped_presets_are_clean_honest_and_mean_the_same_everywhere() -> None:
    presets = shipped()
    assert len(presets) >= 8
    for preset in presets:
        report = check_file(preset.path)
        assert {note.level for note in report.notes} <= {"note"}, preset.path
        assert report.tp_source == "the comment" and report.tp_size == preset.said.tp_size
        assert preset.measured.startswith(("no (", "as a layer: ", "yes: ")) and preset.basis
        assert report.surroundings.number("hidden") == preset.said.hidden
        assert not list(report.surroundings.contradictions())


def test_the_measured_preset_is_what_tune_wrote() -> None:
    """But for its first comments: the package ships a copy of the results file."""
    root = Path(__file__).parents[2]
    tuned = (root / "benchmarks/results/2026-11-30_h200x2_tune_ub.yaml").read_text(encoding="utf-8")
    (preset,) = [one for one in shipped() if one.measured.startswith("yes")]
    assert preset.path.read_text(encoding="utf-8").split("\n\n", 1)[1] == tuned.split("\n\n", 1)[1]


def test_all_that_is_missing_is_named_at_once() -> None:
    last = run("explain").output.splitlines()[-1]
    assert last == "Error: Missing: 'FILE|PRESET|default', '--hidden', '--ffn', '--tp', '--tokens'."
    result = run("explain", "default", "--ffn", 8, "--tp", 2)
    assert result.exit_code == 2 and result.output.splitlines()[-1] == "Error: Missing: '--hidden', '--tokens'."
    assert "Missing option '--tokens'" in run("explain", "default", "--hidden", 8, "--ffn", 8, "--tp", 2).output


def test_look_up() -> None:
    names = [str(preset.said) for preset in ranked(shipped(), hidden=8192, tp_size=2)]
    assert names[0] == "userbuffers_bf16_any_h8192_tp2_mbs1_seqlen8192" and len(names) == 4
    assert names[1] == "userbuffers_bf16_h200_h8192_tp2_mbs1_seqlen8192", "for any GPU first"
    assert ranked(shipped(), 8192, 2, gpu="h200")[0].measured.startswith("yes")
    assert ranked(shipped(), 8192, 2, gpu="b200")[0].said.gpu == "any"
    assert ranked(shipped(), 9000, 4)[0].said.hidden == 8192 and ranked(shipped(), 8192, 3) == []
    assert find_preset(names[0]) == find_preset(names[0] + ".yaml") and find_preset("../../x") is None


def test_presets_command() -> None:
    table = run("presets", "--hidden", 7168, "--tp", 2)
    assert table.exit_code == 0 and "none is made for hidden 7168; the first one's is 8192" in table.output
    assert {entry["tp_size"] for entry in json.loads(run("presets", "--json").output)} == {2, 4, 8}
    shown = run("presets", "--hidden", 8192, "--tp", 8, "--show").output
    assert "# measured: no" in shown and "fc2_fprop:" in shown
    assert run("presets", "--hidden", 8192, "--tp", 3).exit_code == 1 and run("presets", "--tp", 2).exit_code == 2
    name = "userbuffers_bf16_any_h8192_tp2_mbs1_seqlen8192"
    assert "fc2_fprop: reduce-scatter, ring_exchange" in run("explain", name, *SIZES).output
