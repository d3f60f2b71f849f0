"""``tpoverlap predict``: numbers that fit together, labels that say what was not measured, errors for wrong input."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from click.testing import CliRunner, Result

from tpoverlap.errors import ConfigError
from tpoverlap.tools.cli import SUBCOMMANDS, main
from tpoverlap.tools.predict import prediction
from tpoverlap.tools.predict.tokens import parse_tokens
from tpoverlap.tools.predict.topology import PRESETS, on_topology, topology_of
from tpoverlap.tuning import Problem, collective_us, load_device

LAYER = ("--hidden", "8192", "--ffn", "28672", "--gated", "--heads", "64", "--kv-heads", "8")


def run(*arguments: str, whole: bool = False) -> Result:
    """Unless ``whole``, the break-even is searched up to 4,096 tokens only: the search is nearly all of the time."""
    short = partial(prediction.break_even, max_tokens=1 << 12)
    with mock.patch.object(prediction, "break_even", prediction.break_even if whole else short):
        return CliRunner().invoke(main, ["predict", *arguments])


def answer(*arguments: str, whole: bool = False) -> dict[str, Any]:
    result = run(*LAYER, *arguments, "--json", "-", whole=whole)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.output)
    return found


def test_is_a_subcommand() -> None:
    assert SUBCOMMANDS["predict"] == "tpoverlap.tools.predict.command:predict"


def test_every_gemm_has_a_choice_that_is_no_worse_than_sequential() -> None:
    found = answer("--tp", "2", "--tokens", "512:8192", "--gpu", "h200")
    assert found["label"] == "measured model" and found["why"] == []
    assert len(found["gemms"]) == 10 and all(gemm["rows"] for gemm in found["gemms"])
    for gemm in found["gemms"]:
        ends = [row["tokens"] for row in gemm["rows"]]
        assert ends == sorted(ends) and ends[-1] == 8192 and gemm["rows"][0]["above"] == 511
        for row in gemm["rows"]:
            assert row["time_us"] <= row["sequential_us"] * 1.02 or row["method"] != "sequential", (gemm["name"], row)
            assert row["exposed_us"] == pytest.approx(max(0.0, row["time_us"] - row["gemm_us"]), abs=0.11)
            assert row["gain_over_sequential"] == pytest.approx(row["sequential_us"] / row["time_us"], abs=1e-3)
        assert gemm["rows"][-1]["gain_over_padding"] == 1.0, "at the capacity nothing is padded"
        assert gemm["rows"][0]["gain_over_padding"] > 1.0
    features = {gemm["name"]: gemm["features"] for gemm in found["gemms"]}
    assert features["qkv_fprop"] == (64 + 16) * 128 // 2 and features["fc1_dgrad"] == 28672
    assert features["proj_fprop"] == 4096 and features["fc2_fprop"] == 14336
    assert found["memory_bytes_a_rank"]["symmetric_bytes"] > 0
    assert found["error_of_the_model"]["left_out"] == "whole shapes"


def test_plain_nccl_and_cublas_is_a_baseline_too() -> None:
    found = answer("--tp", "2", "--tokens", "128,8192", "--gpu", "h200")
    device = load_device("h200")
    for gemm in found["gemms"]:
        small, large = gemm["rows"]
        problem = Problem(gemm["kind"], 8192, 8192, gemm["features"], 2)
        alone, collective = large["gemm_us"], collective_us(device, problem)
        assert large["plain_us"] == pytest.approx(alone + collective, abs=0.2), "one after the other, nothing hidden"
        assert large["gain_over_plain"] == pytest.approx(large["plain_us"] / large["time_us"], abs=1e-3)
        assert device.host_us["plain"] <= small["plain_us"], "its launches count"
    by_kind = found["error_of_the_model"]["median_percent_by_kind"]
    shown = " ".join(run(*LAYER, "--tp", "2", "--tokens", "128", "--gpu", "h200").output.split())
    for direction in ("ag", "rs"):
        assert f"{direction} {by_kind[f'{direction} GEMM, then NCCL']} %" in shown
    assert "a gain over NCCL below 1" in shown and "NCCL ┃ gain" in shown, "not cut off in a pipe"


def test_fp8() -> None:
    arguments = ("--tp", "2", "--tokens", "256,8192", "--gpu", "h200", "--launches", "hidden")
    wide, fp8, packed = answer(*arguments), answer(*arguments, "--fp8"), answer(*arguments, "--fp8", "--fp8-buf")
    assert fp8["label"] == "estimate" and "which was checked by" in " ".join(fp8["why"])
    assert fp8["error_of_fp8"]["gemm_median_percent"] < 10.0 and wide["error_of_fp8"] == {}
    scales = fp8["memory_bytes_a_rank"]["regions"].keys() - wide["memory_bytes_a_rank"]["regions"].keys()
    assert scales == {"scales"} and fp8["memory_bytes_a_rank"]["symmetric_bytes"] > 0
    for one, other in zip(wide["gemms"], fp8["gemms"], strict=True):
        assert (other["weight_us"] > 10.0) == other["name"].endswith("_fprop"), "backward reads what forward made"
        for without, row in zip(one["rows"], other["rows"], strict=True):
            assert row["wide_us"] == without["time_us"] and without["wide_us"] is None
            assert row["gain_over_wide"] == pytest.approx(row["wide_us"] / row["time_us"], abs=1e-3)
            assert row["quantise_us"] > 0.0 == without["quantise_us"]
            assert row["exposed_us"] == pytest.approx(row["time_us"] - row["gemm_us"] - row["quantise_us"], abs=0.11)
        assert 0.48 < other["rows"][1]["gemm_us"] / one["rows"][1]["gemm_us"] < 0.62, (
            "its tensor cores are twice as fast"
        )
    same = [one["rows"] == other["rows"] for one, other in zip(fp8["gemms"], packed["gemms"], strict=True)]
    assert not all(same) and sum(same) >= 8, "fp8_buf is about proj_fprop and fc2_fprop"
    shown = " ".join(run(*LAYER, *arguments, "--fp8").output.split())
    for text in (
        "FP8 in bf16",
        "quantising",
        "estimate, because FP8: GEMMs and kernels",
        "fc1_fprop",
        "median error of GEMMs",
    ):
        assert text in shown, text


def test_fp8_on_other_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    found = answer("--tp", "2", "--tokens", "4096", "--gpu", "b200", "--fp8")
    assert any("the peaks of 4500 and 1979 TFLOP/s" in why for why in found["why"]), found["why"]
    without = replace(load_device("h200"), fp8=None)
    monkeypatch.setattr("tpoverlap.tuning.load_device", lambda _name: without)
    result = run(*LAYER, "--tp", "2", "--tokens", "64", "--gpu", "h200", "--fp8")
    assert result.exit_code == 2 and "knows no FP8 tensor cores on h200" in " ".join(result.output.split())


def test_hidden_launches_leave_the_device_alone() -> None:
    arguments = ("--tp", "2", "--tokens", "2048", "--gpu", "h200")
    counted, hidden = (answer(*arguments, *more, whole=True) for more in ((), ("--launches", "hidden")))
    assert not any(row["host_bound"] for gemm in hidden["gemms"] for row in gemm["rows"])
    for one, other in zip(counted["gemms"], hidden["gemms"], strict=True):
        assert other["rows"][0]["time_us"] <= one["rows"][0]["time_us"]
        assert other["break_even_tokens"] is not None


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--tp", "2", "--gpu", "h100"), "h100 was not measured"),
        (("--tp", "4", "--gpu", "h200"), "TP 4: measured was TP 2"),
        (("--tp", "2", "--gpu", "h200", "--dtype", "fp32"), "fp32: measured was bf16"),
        (("--tp", "4", "--gpu", "h200", "--topology", "gh200-x2"), "2 of 4 ranks are outside the NVLink domain of 2"),
    ],
)
def test_what_was_not_measured_is_an_estimate(arguments: tuple[str, ...], reason: str) -> None:
    found = answer(*arguments, "--tokens", "4096")
    assert found["label"] == "estimate" and any(reason in why for why in found["why"]), found["why"]
    shown = run(*LAYER, *arguments, "--tokens", "4096").output
    assert shown.startswith("estimate:") and reason in shown and "estimate, because" in shown


def test_a_group_that_leaves_the_domain_is_slower() -> None:
    arguments = ("--tp", "4", "--tokens", "4096", "--gpu", "gh200", "--launches", "hidden")
    inside = answer(*arguments, "--topology", "gh200-x4")
    outside = answer(*arguments, "--topology", "gh200-x2")
    nvl72 = answer("--tp", "8", "--tokens", "4096", "--gpu", "gb200-nvl72")
    assert inside["topology"]["ranks_outside_the_domain"] == 0 and outside["topology"]["ranks_outside_the_domain"] == 2
    assert nvl72["topology"]["ranks_outside_the_domain"] == 0 and nvl72["topology"]["basis"] == "assumed"
    for near, far in zip(inside["gemms"], outside["gemms"], strict=True):
        assert far["rows"][0]["sequential_us"] > near["rows"][0]["sequential_us"]
    few = ("--tp", "4", "--tokens", "512", "--gpu", "gh200", "--launches", "hidden")
    near, far = (answer(*few, "--topology", name)["gemms"][0]["rows"][0] for name in ("gh200-x4", "gh200-x2"))
    assert far["sequential_us"] > near["sequential_us"] + 10.0, "a kernel's rows cross the network, too"
    faster = answer(*arguments, "--topology", "gh200-x2", "--network-gb-s", "100")
    assert faster["gemms"][0]["rows"][0]["sequential_us"] < outside["gemms"][0]["rows"][0]["sequential_us"]


def doctor_file(path: Path, *, cliques: dict[str, list[int]], pairs: list[str], status: str = "ok") -> str:
    row = {"section": "gpu", "name": "NVLink domain", "status": status, "detail": "fabric state completed"}
    path.write_text(json.dumps({"schema": 1, "rows": [row | {"data": {"cliques": cliques, "nvlink_pairs": pairs}}]}))
    return str(path)


@pytest.mark.parametrize(
    ("cliques", "pairs", "domain"),
    [({}, [], 1), ({}, ["0-1", "2-3"], 2), ({}, ["0-1", "1-2", "2-3"], 4), ({"a/1": [0, 1, 2, 3]}, ["0-1"], 4)],
)
def test_doctors_file_says_the_domain(
    tmp_path: Path, cliques: dict[str, list[int]], pairs: list[str], domain: int
) -> None:
    path = doctor_file(tmp_path / "doctor.json", cliques=cliques, pairs=pairs)
    found = topology_of(load_device("h200"), path)
    assert (found.nvlink_domain, found.basis) == (domain, "probed")
    report = answer("--tp", "2", "--tokens", "4096", "--gpu", "h200", "--topology", path)
    assert report["topology"]["ranks_outside_the_domain"] == max(0, 2 - domain)


def test_what_is_no_topology(tmp_path: Path) -> None:
    h200 = load_device("h200")
    other = tmp_path / "other.json"
    other.write_text("[]")
    with pytest.raises(ConfigError, match=r"neither a preset \(hgx-8"):
        topology_of(h200, "nowhere.json")
    with pytest.raises(ConfigError, match="no row 'NVLink domain'"):
        topology_of(h200, str(other))
    with pytest.raises(ConfigError, match="could not tell the NVLink domain"):
        topology_of(h200, doctor_file(tmp_path / "a.json", cliques={}, pairs=[], status="unknown"))
    with pytest.raises(ConfigError, match="is not doctor's"):
        topology_of(h200, doctor_file(tmp_path / "b.json", cliques={}, pairs=["a-b"]))
    assert {preset.nvlink_domain for preset in PRESETS if preset.name.startswith("gh200")} == {1, 2, 4}
    assert on_topology(h200, PRESETS[0], 8, 50.0) is h200 and not on_topology(h200, PRESETS[0], 9, 50.0).is_measured


def test_tokens() -> None:
    assert parse_tokens("7,3,7").values == (7, 3)
    problem = Problem("gather", 1, 8192, 4096, 2)
    rows = parse_tokens("100:8192").ends(problem, 132)
    assert rows[0][0] == 99 and rows[-1][1] == 8192
    assert all(high == low for (_, high), (low, _) in pairwise(rows)), "no gap and no overlap"
    assert parse_tokens("5:5").ends(problem, 132) == [(4, 5)]
    for wrong in ("", "x", "1:2:3", "9:3", "0", "-4", "1,,2", "99999999999"):
        with pytest.raises(ConfigError, match="--tokens"):
            parse_tokens(wrong)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--gpu", "a100", "--tokens", "64"), "no device is called 'a100'"),
        (
            ("--gpu", "h200", "--tokens", "64", "--fp8", "--dtype", "fp32"),
            "fp8 with dtype fp32 is not in the cost model",
        ),
        (("--gpu", "h200", "--tokens", "64", "--fp8-buf"), "fp8_buf is about reduce-scatters of FP8 GEMMs"),
        (("--gpu", "h200", "--tokens", "9:3"), "give T, several"),
        (("--gpu", "h200", "--tokens", "512", "--capacity", "256"), "T=512 of --tokens is beyond --capacity 256"),
        (("--gpu", "h200", "--tokens", "512", "--json", "/nowhere/x.json"), "cannot write --json"),
        (("--gpu", "h200", "--tokens", "512", "--heads", "7"), "not divisible by heads=7"),
        (("--gpu", "h200", "--tokens", "512", "--topology", "mars"), "neither a preset"),
    ],
)
def test_wrong_input_is_a_usage_error(arguments: tuple[str, ...], message: str) -> None:
    result = run("--hidden", "4096", "--ffn", "14336", "--tp", "2", *arguments)
    assert result.exit_code == 2 and message in " ".join(result.output.split()), result.output


def test_files_are_written(tmp_path: Path) -> None:
    arguments = ("--hidden", "4096", "--ffn", "14336", "--tp", "2", "--tokens", "64,4096", "--gpu", "h200")
    result = run(*arguments, "--json", str(tmp_path / "p.json"), "--plot", str(tmp_path / "p.png"))
    assert run(*arguments, "--fp8", "--plot", str(tmp_path / "fp8.png")).exit_code == 0
    widths = [int.from_bytes((tmp_path / name).read_bytes()[16:20], "big") for name in ("p.png", "fp8.png")]
    assert widths[1] > widths[0], "a third panel: the gain over bf16"
    assert result.exit_code == 0, result.output
    assert len(json.loads((tmp_path / "p.json").read_text())["gemms"][0]["rows"]) == 2
    assert (tmp_path / "p.png").read_bytes()[:4] == b"\x89PNG"
    assert "NVLink domain of 8 (assumed" in result.output and "median error" in result.output
