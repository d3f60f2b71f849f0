"""FP8 in the shipped device files: fitted to committed results, with the error that a fit without a shape has of it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from benchmarks import fp8_fit
from benchmarks.device_sheets import SHEETS, scaled
from benchmarks.fp8_fit import Seen, cross_validate_fp8, fit_fp8, fp8_errors, read_fp8
from benchmarks.observations import RESULTS
from tpoverlap.tuning import Candidate, DeviceModel, Problem, estimate, load_device
from tpoverlap.tuning.device import Fp8Rates, GemmRates, Rate

H200 = load_device("h200")
DOCS = Path(__file__).parents[2] / "docs" / "tuning.md"


def fp8_of(device: DeviceModel) -> Fp8Rates:
    assert device.fp8 is not None
    return device.fp8


def test_shipped_files_are_up_to_date() -> None:
    """Whoever adds results runs python -m benchmarks.calibrate --write."""
    missing = [name for name in re.findall(r"\S+\.json", fp8_of(H200).source) if not (RESULTS / name).exists()]
    if missing:
        pytest.skip(f"fitted to {', '.join(missing)}, which is not in benchmarks/results: put it there")
    seen, hosts = read_fp8()
    calibrated = fit_fp8(replace(H200, fp8=None), seen, round(median(hosts), 1))
    calibrated = replace(calibrated, fp8=replace(fp8_of(calibrated), source=fp8_fit.source_of(seen)))
    for device in (calibrated, *(scaled(calibrated, sheet) for sheet in SHEETS)):
        shipped = load_device(device.name)
        assert fp8_of(shipped).source == fp8_of(device).source
        assert fp8_of(shipped).host_us == fp8_of(device).host_us
        for kind in ("gather", "scatter", "beside-scatter"):
            for tokens in (100, 1000, 10000):
                problem = Problem(kind, tokens, 8192, 3584, 2, fp8=True)  # type: ignore[arg-type]
                fresh, stored = (estimate(one, problem, Candidate("sequential")) for one in (device, shipped))
                # another mathematics library may end the search a step elsewhere
                assert stored.device_us == pytest.approx(fresh.device_us, rel=0.01), f"{device.name}.json: {problem}"
    assert fp8_of(H200).error["rows"] == len(seen)


def test_error_is_at_most_what_the_docs_claim() -> None:
    said = r"FP8 GEMMs it is below (\d+) % \(nine in ten within (\d+) %\), of quantising kernels below (\d+) %"
    claims = re.search(said, " ".join(DOCS.read_text(encoding="utf-8").split()))
    assert claims is not None, "docs/tuning.md states the error of FP8"
    error = fp8_of(H200).error
    keys = ("gemm_median_percent", "gemm_nine_in_ten_within_percent", "kernels_median_percent")
    for bound, key in zip(claims.groups(), keys, strict=True):
        assert error[key] <= float(bound), key
    assert error["gemm_median_percent"] <= 10.0 and error["rows"] >= 500


def _row(kind: str, sizes: list[int], **times: float | None) -> dict[str, Any]:
    found = {name.replace("_", " "): {"queued_us": us, "eager_us": 30.0} for name, us in times.items()}
    return {"kind": kind, "sizes": sizes, "times": found, "relative_errors": {}, "problems": {}}


def test_results_are_read(tmp_path: Path) -> None:
    rows = [
        _row("quantise", [16, 4096], measure=4.0, local=5.0, by_maxima=3.0),
        _row("forward", [64, 4096, 6144], bfloat16=9.0, e4m3_fast=5.0, e4m3=6.0, e5m2_fast=5.5, e5m2=6.5),
        _row("weight", [64, 4096, 6144], bfloat16=9.0, e5m2=None),
    ]
    for name, gpu in (("h200.json", "NVIDIA H200"), ("h100.json", "NVIDIA H100")):
        (tmp_path / name).write_text(json.dumps({"environment": {"gpus": [gpu]}, "rows": rows}))
    (tmp_path / "another.json").write_text(json.dumps({"environment": {"gpus": ["NVIDIA H200"]}, "rows": [{}]}))
    seen, hosts = read_fp8(tmp_path)
    assert [(one.source, one.kind, one.time_us) for one in seen] == [
        ("h200.json", "measure", 4.0),
        ("h200.json", "by maxima", 3.0),
        ("h200.json", "fprop", 5.0),
        ("h200.json", "dgrad", 6.5),
    ], "what layers run, on that GPU"
    assert hosts == [30.0], "a kernel of few rows: its eager time is the processor's"
    fprop = seen[2].problem
    assert fprop is not None and fprop.gemm_shape == (64, 6144, 4096) and fprop.fp8


def _made_by(rates: Fp8Rates) -> list[Seen]:
    """What a device with ``rates`` would have been measured at."""
    device, seen = replace(H200, fp8=rates), []
    for k, n in ((4096, 6144), (8192, 1280), (8192, 8192), (2048, 4096)):
        for tokens in (16, 256, 1024, 4096, 8192):
            one = Seen("a", "fprop", 0.0, (k, n), Problem("gather", tokens, k, n, 1, fp8=True))
            seen.append(replace(one, time_us=one.predict_us(device)))
    for width in (4096, 8192):
        for rows in (16, 1024, 8192):
            one = Seen("a", "pack", 0.0, (width,), passes=(3 * rows * width,))
            seen.append(replace(one, time_us=one.predict_us(device)))
    return seen


def test_fit_recovers_known_rates() -> None:
    truth = Fp8Rates(GemmRates(4.0, 0.007, 1.0, 0.0, 0.8, 0.1), Rate(3.0, 2500.0), 30.0, "")
    fitted = fit_fp8(replace(H200, fp8=None), _made_by(truth), 30.0)
    for problem in (Problem("gather", 3000, 6144, 2048, 1, fp8=True), Problem("scatter", 700, 8192, 3584, 1, fp8=True)):
        expected = estimate(replace(H200, fp8=truth), problem, Candidate("sequential")).time_us
        assert estimate(fitted, problem, Candidate("sequential")).time_us == pytest.approx(expected, rel=0.06)
    assert fp8_of(fitted).pass_over.time_us(5e7) == pytest.approx(truth.pass_over.time_us(5e7), rel=0.02)


def test_what_is_left_out_is_not_seen() -> None:
    truth = Fp8Rates(GemmRates(4.0, 0.007, 1.0, 0.0, 0.8, 0.1), Rate(3.0, 2500.0), 30.0, "")
    seen, group = _made_by(truth), (8192, 1280)
    nonsense = [replace(one, time_us=one.time_us * 10) if one.group == group else one for one in seen]
    bare = replace(H200, fp8=None)
    before, after = ([us for _, us in cross_validate_fp8(bare, rows, [group])] for rows in (seen, nonsense))
    assert len(before) == 5 and before == after
    rows = [(one, one.time_us * 1.1) for one in seen]
    found = fp8_errors(rows)
    assert found["gemm_median_percent"] == found["kernels_nine_in_ten_within_percent"] == 10.0
