"""`tpoverlap bench` for real, on two CPU ranks: files and exit codes, and methods that were broken on purpose."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner, Result

import tpoverlap as tpo
from tests.tools.paper import CudaSession, Paper, on_paper
from tpoverlap.testing import RankPool
from tpoverlap.tools.bench import timing
from tpoverlap.tools.bench.job import BenchJob
from tpoverlap.tools.bench.methods import Methods
from tpoverlap.tools.bench.report import BenchReport
from tpoverlap.tools.bench.worker import bench_rank
from tpoverlap.tools.cli import main

Row = dict[str, Any]
WHERE: Row = {"device": "cpu"}


def run(*arguments: str) -> Result:
    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    return CliRunner().invoke(main, ["bench", "--device", "cpu", "--rounds", "1", *arguments], catch_exceptions=False)


def read(path: Path) -> Row:
    data = json.loads(path.read_text())
    assert isinstance(data, dict)
    return data


def test_all_suites_end_to_end(tmp_path: Path) -> None:
    json_path, plot_path = tmp_path / "b.json", tmp_path / "b.png"
    suites = [option for name in ("gemm", "dynamic", "host") for option in ("--suite", name)]
    result = run(*suites, "--quick", "--json", str(json_path), "--plot", str(plot_path))
    assert result.exit_code == 0, result.output
    data = read(json_path)
    assert data["schema"] == 1 and data["problems"] == [] and data["left_out"] == []
    assert data["environment"]["tp_size"] == 2 and data["environment"]["group_backend"] == "gloo"
    rows = {name: [row for row in data["rows"] if row["suite"] == name] for name in ("gemm", "dynamic", "host")}
    assert [row["label"] for row in rows["gemm"]] == ["ag 64x128x96", "rs 64x128x96", "ag 256x128x96", "rs 256x128x96"]
    for row in rows["gemm"]:
        check_gemm_row(row)
    for row in rows["dynamic"]:
        assert all(len(walk["total_us"]) == 3 and not walk["errors"] for walk in row["walks"].values())
        assert all(one["ratio"] > 0 for one in row["exact_capacity"]) and len(row["exact_capacity"]) == 3
    operations = [row["label"] for row in rows["host"]]
    assert operations[0] == "torch.mm" and {"ag sequential", "rs pipeline 4", "rs plain sequential"} <= set(operations)
    ours = next(row for row in rows["host"] if row["label"] == "ag ring_exchange")["host_us"]
    assert set(ours) == {f"{kind}_{t}" for kind in ("no_grad", "autograd", "backward") for t in ("same", "new")}
    by_label = {row["label"]: row for row in rows["host"]}
    for label, steps in (
        ("ag ring_exchange", 2),
        ("rs ring_exchange", 2),
        ("rs pipeline 4", 4),
        ("rs sequential", None),
    ):
        one = by_label[label]
        assert one["steps"] == steps
        same = {key: one["host_us"][key] for key in ("no_grad_same", "autograd_same")}
        assert one["host_us_a_step"] == ({} if steps is None else {k: v / steps for k, v in same.items()})
    assert plot_path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and plot_path.stat().st_size > 20_000
    for text in ("say NOTHING about GPUs", "ag 64x128x96", "of limit", "torch async-TP skipped", "C/mean T", "a step"):
        assert text in result.output, text
    assert [path.name for path in tmp_path.iterdir() if path.suffix not in (".json", ".png")] == []


def check_gemm_row(row: Row) -> None:
    small = row["num_tokens"] < row["capacity_tokens"]
    wanted = {"auto", "ring_exchange", "sequential", "plain sequential"}
    wanted |= {"pipeline 2", "pipeline 4"} if row["direction"] == "rs" else set()
    wanted |= {"padded to capacity"} if small else set()
    assert wanted <= set(row["methods"]) and not row["errors"]
    assert set(row["alone"]) == {"gemm alone", "collective alone", "transfer alone, push", "transfer alone, pull"}
    assert row["targets"] == [], "no verdict about a CPU"
    gemm, transfer = row["alone"]["gemm alone"]["eager_us"], row["transfer_us"]["eager"]
    assert row["c"] == pytest.approx(transfer / gemm)
    for one in row["methods"].values():
        assert one["eager_us"] > 0 and one["queued_us"] is None
        assert one["of_limit"]["eager"] == pytest.approx(max(gemm, transfer) / one["eager_us"])
        assert one["relative_error"] < 1e-5
    assert row["methods"]["plain sequential"]["of_sequential"]["eager"] == 1.0


@pytest.mark.usefixtures("benches_on_shared_ranks")
def test_fp8_rows_stand_beside_the_others(tmp_path: Path) -> None:
    json_path, plot_path = tmp_path / "b.json", tmp_path / "b.png"
    numbers = ("--numbers", "fp8", "--numbers", "bfloat16")
    result = run(
        *numbers, "--shape", "65x32x48", "--shape", "96x32x48", "--json", str(json_path), "--plot", str(plot_path)
    )
    assert result.exit_code == 0, result.output
    data = read(json_path)
    labels = [f"{direction} {shape}" for shape in ("65x32x48", "96x32x48") for direction in ("ag", "rs")]
    assert [row["label"] for row in data["rows"]] == [label.replace(" ", " fp8 ") for label in labels] + labels
    half = len(labels)
    for row, wide in zip(data["rows"][:half], data["rows"][half:], strict=True):
        assert row["numbers"] == "fp8" and row["comm_bytes"] == wide["comm_bytes"] / (
            4 if row["direction"] == "ag" else 1
        )
        assert set(row["alone"]) == {*wide["alone"], "quantisation alone"}
        assert set(row["methods"]) == set(wide["methods"]) and not row["errors"]
        gemm, transfer = row["alone"]["gemm alone"]["eager_us"], row["transfer_us"]["eager"]
        for one in row["methods"].values():
            assert one["relative_error"] < 1e-5, "judged by what the FP8 operands stand for"
            assert one["of_limit"]["eager"] == pytest.approx(max(gemm, transfer) / one["eager_us"])
        assert row["auto"][0].startswith("under an FP8 recipe") and "chosen by" in row["auto"][1], row["auto"]
    assert set(data["summary"]["gemm"]["geometric_mean_of_limit"]) == {"ag", "rs", "ag fp8", "rs fp8"}
    assert plot_path.stat().st_size > 20_000


def test_time_that_is_up_is_said_and_an_empty_run_is_a_problem(rank_pool: Callable[[int], RankPool]) -> None:
    report = rank_pool(2).run(bench_rank, replace(_job(), minutes=1e-9), WHERE, timeout_s=60)[0]
    assert report.rows == [] and report.problems == ["nothing was measured"]
    assert report.left_out == [f"gemm {d} {t}x32x48" for t in (64, 48) for d in ("ag", "rs")]


# -- the queued mode, on a device of paper -----------------------------------------------------------------------------


def time_on_paper(rank: int, world_size: int) -> dict[str, tuple[float, float | None, int]]:
    """0.2 ms on the device, 1 ms on the host of rank 1; and an operation of 0.1 and 0.3 ms."""

    def host_bound() -> torch.Tensor:
        Paper.host(1e-3 * rank)
        Paper.device(2e-4)
        return torch.empty(0)

    def uneven() -> torch.Tensor:
        Paper.device(1e-4 + 2e-4 * rank)
        return torch.empty(0)

    group = dist.group.WORLD
    assert group is not None
    with on_paper():
        session = CudaSession(replace(_job(), rounds=3, queued_operations=20), group, rank)
        times = timing.measure(session, {"host bound": host_bound, "uneven": uneven})
    return {label: (one.eager_us, one.queued_us, one.queued_operations) for label, one in times.items()}


def test_queued_times_hold_no_host_time_and_the_slowest_rank_counts(rank_pool: Callable[[int], RankPool]) -> None:
    first, second = rank_pool(2).run(time_on_paper, timeout_s=60)
    assert first == second
    eager_us, queued_us, operations = first["host bound"]
    assert eager_us > 900 and queued_us == pytest.approx(200) and operations == 20
    assert first["uneven"][:2] == pytest.approx((300, 300))


def observe_on_paper(rank: int, world_size: int) -> tuple[list[str], list[tuple[str, str, int]]]:
    """(what ran, what `after_round` was told) of two rounds with 3 calls each, one of the two runs with a lead."""
    ran: list[str] = []
    told: list[tuple[str, str, int]] = []
    runs = {name: lambda name=name: ran.append(name) or torch.empty(0) for name in ("a", "b")}
    group = dist.group.WORLD
    assert group is not None
    with on_paper():
        session = CudaSession(replace(_job(), rounds=2, queued_operations=5), group, rank)
        leads = {"a": lambda: ran.append("lead") or torch.empty(0)}
        timing.measure(
            session,
            runs,  # type: ignore[arg-type]
            calls=3,
            leads=leads,  # type: ignore[arg-type]
            twice=("b",),
            after_round=lambda *given: told.append(given),
        )
    return ran, told


def test_leads_and_observers(rank_pool: Callable[[int], RankPool]) -> None:
    ran, told = rank_pool(2).run(observe_on_paper, timeout_s=60)[0]
    assert told == [(name, mode, n) for name in "abbbab" for mode, n in (("eager", 3), ("queued", 5))]
    assert ran.count("lead") == 2, "once a round"
    planned, rounds = 5, 2
    assert ran.count("a") == 1 + planned + rounds * (3 + 5)
    assert ran.count("b") == 1 + planned + 2 * rounds * (2 + 3 + 5), "a round more behind each"


# -- broken on purpose ------------------------------------------------------------------------------------------------


def _job(json_path: str | None = None) -> BenchJob:
    return BenchJob(
        suites=("gemm",),
        device_type="cpu",
        num_gpus=0,
        tp_size=2,
        ranks_per_host=2,
        shapes=((64, 32, 48), (48, 32, 48)),
        rounds=1,
        timeout_s=2.0,
        json_path=json_path,
    )


def _bench_with(rank: int, world_size: int, job: BenchJob, broken: Callable[[torch.Tensor], torch.Tensor]) -> Row:
    prepare = Methods.prepare

    def prepare_broken(self: Methods, label: str, *arguments: Any) -> Callable[[], torch.Tensor]:
        good = prepare(self, label, *arguments)
        if label != "ring_exchange" or rank != 1:
            return good
        return lambda: broken(good())

    Methods.prepare = prepare_broken  # type: ignore[method-assign]
    try:
        return bench_rank(rank, world_size, job, WHERE).as_dict()
    finally:
        Methods.prepare = prepare  # type: ignore[method-assign]


def stale_row(rank: int, world_size: int, job: BenchJob) -> Row:
    def broken(output: torch.Tensor) -> torch.Tensor:
        output = output.clone()
        output[-1] = output[0]
        return output

    return _bench_with(rank, world_size, job, broken)


def nan_in_one_element(rank: int, world_size: int, job: BenchJob) -> Row:
    def broken(output: torch.Tensor) -> torch.Tensor:
        output = output.clone()
        output[-1, -1] = float("nan")
        return output

    return _bench_with(rank, world_size, job, broken)


def never_calls(rank: int, world_size: int, job: BenchJob) -> Row:
    """Rank 1 raises before its operation, so that rank 0 waits in vain and its manager is of no use any more."""
    prepare = Methods.prepare

    def prepare_broken(self: Methods, label: str, *arguments: Any) -> Callable[[], torch.Tensor]:
        def refuse() -> torch.Tensor:
            raise ValueError("broken on purpose")

        return refuse if label == "ring_exchange" and rank == 1 else prepare(self, label, *arguments)

    Methods.prepare = prepare_broken  # type: ignore[method-assign]
    try:
        return bench_rank(rank, world_size, job, WHERE).as_dict()
    finally:
        Methods.prepare = prepare  # type: ignore[method-assign]


def another_scale(rank: int, world_size: int, job: BenchJob) -> Row:
    """All ranks quantise to powers of two in ring_exchange: a good FP8 product, but not of these operands."""
    prepare = Methods.prepare

    def prepare_broken(self: Methods, label: str, *arguments: Any) -> Callable[[], torch.Tensor]:
        *others, fp8 = arguments
        wrong = tpo.Fp8State(tpo.Float8CurrentScaling(use_power_2_scales=True))
        return prepare(self, label, *others, wrong if label == "ring_exchange" else fp8)

    Methods.prepare = prepare_broken  # type: ignore[method-assign]
    try:
        return bench_rank(rank, world_size, job, WHERE).as_dict()
    finally:
        Methods.prepare = prepare  # type: ignore[method-assign]


def test_an_fp8_product_of_other_numbers_is_wrong(rank_pool: Callable[[int], RankPool]) -> None:
    report = rank_pool(2).run(another_scale, replace(_job(), numbers=("fp8",)), timeout_s=60)[0]
    for row in report["rows"]:
        assert "ring_exchange" not in row["methods"] and "wrong numbers" in row["errors"]["ring_exchange"]
        assert "auto" in row["methods"]


@pytest.mark.parametrize("broken", [stale_row, nan_in_one_element])
def test_wrong_numbers_on_one_rank_are_never_timed(
    rank_pool: Callable[[int], RankPool], broken: Callable[..., Row], tmp_path: Path
) -> None:
    path = tmp_path / "b.json"
    reports = rank_pool(2).run(broken, _job(str(path)), timeout_s=60)
    assert read(path)["rows"] == reports[0]["rows"], "the file is up to date after the last row"
    for report in reports:
        for row in report["rows"]:
            assert "ring_exchange" not in row["methods"], "a wrong method was timed"
            assert "rank 1: wrong numbers" in row["errors"]["ring_exchange"]
            assert "auto" in row["methods"] and "sequential" in row["methods"]
        assert len(report["problems"]) == 4
    assert BenchReport.from_dict(reports[0]).problems == reports[0]["problems"]


def test_a_method_that_fails_leaves_the_others_measured(rank_pool: Callable[[int], RankPool]) -> None:
    report = rank_pool(2).run(never_calls, replace(_job(), shapes=((64, 32, 48),)), timeout_s=100)[0]
    assert len(report["rows"]) == 2, "the second one with a new manager"
    for row in report["rows"]:
        assert "PeerTimeoutError" in row["errors"]["ring_exchange"] or "ValueError" in row["errors"]["ring_exchange"]
        assert {"auto", "sequential", "plain sequential"} <= set(row["methods"])
