"""`benchmarks.bulk_beside` runs, on the CPU, judges what it should, and times nothing that is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import bulk_beside, bulk_beside_ranks
from benchmarks.bulk_beside import judge, missed, where_time_goes
from benchmarks.bulk_operations import BulkInputs, Results
from benchmarks.gemm_clock import GemmClock
from tests.tools.paper import CudaSession, Paper, on_paper
from tpoverlap.testing import RankPool
from tpoverlap.tools.bench.variants import COLLECTIVE, GEMM, PULL, PUSH

Row = dict[str, Any]
OURS = "copy engine"


@pytest.mark.usefixtures("benches_on_shared_ranks")
@pytest.mark.timeout(110)
def test_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "bulk.json"
    assert bulk_beside.main(["--out", str(out), "--device", "cpu", "--rounds", "1", "--budget-s", "40"]) == 0
    found = json.loads(out.read_text())
    assert found["environment"]["torch"] == torch.__version__ and not found["judged"] and not found["missed"]
    assert [row["direction"] for row in found["rows"]] == ["ag", "rs"] * 2 and found["left_out"] == []
    with_gemm = {GEMM, *found["options"], "NCCL beside", "NCCL, then the GEMM"}
    for row in found["rows"]:
        assert row["errors"] == {} and row["targets"] == []
        wanted = with_gemm | {f"{label}, nothing beside" for label in found["options"]} | {COLLECTIVE, PUSH, PULL}
        assert set(row["times"]) == wanted | ({"add alone"} if row["direction"] == "rs" else set())
        assert all(one["eager_us"] > 0 and one["queued_us"] is None for one in row["times"].values())
        assert set(row["gemm_us"]) == set(row["gemm_ratio"]) == with_gemm
        assert row["gemm_ratio"][GEMM] == 1.0 and min(row["gemm_us"].values()) > 0
    assert OURS in found["options"] and list(tmp_path.iterdir()) == [out]
    printed = capsys.readouterr().out
    for text in ("rs beside wgrad 64x24x8", "copy engine", "not judged", "0 rows left out"):
        assert text in printed, text


def stale_rows(rank: int, world_size: int, progress: str) -> Row:
    """Rank 1's gather misses a row, and its sum is its own part alone."""
    right = BulkInputs.ours

    def wrong(self: BulkInputs, manager: Any, work: Any, *, keeps: bool = False) -> Results:
        moved, product = right(self, manager, work, keeps=keeps)
        if rank == 1 and self.row.direction == "ag":
            moved[0] = moved[1]
        elif rank == 1:
            moved = self.sent[self.own]
        return moved, product

    BulkInputs.ours = wrong  # type: ignore[method-assign]
    try:
        return bulk_beside_ranks.measure_all(rank, world_size, bulk_beside.job_on("cpu", 1, 40.0), progress)
    finally:
        BulkInputs.ours = right  # type: ignore[method-assign]


def test_wrong_rows_are_never_timed(rank_pool: Callable[[int], RankPool], tmp_path: Path) -> None:
    found = rank_pool(2).run(stale_rows, str(tmp_path / "rows"))[0]
    for row in found["rows"]:
        assert OURS not in row["times"] and row["errors"][OURS].startswith("rank 1: the ")
        assert "NCCL beside" in row["times"] and "NCCL beside" in row["gemm_us"]
    assert json.loads((tmp_path / "rows").read_text()) == found


def on_a_device(rank: int, world_size: int, progress: str) -> Row:
    """Rows with GEMMs of 100 us on rank 0 and 200 us on rank 1, half as long again where rows travel beside them."""
    right = BulkInputs.gemm, BulkInputs.ours, bulk_beside_ranks.Session
    beside = [1.0]

    def gemm(self: BulkInputs) -> torch.Tensor:
        Paper.device(1e-4 * (1 + rank) * beside[0])
        return right[0](self)

    def ours(self: BulkInputs, manager: Any, work: Any, *, keeps: bool = False) -> Results:
        beside[0] = 1.5
        try:
            return right[1](self, manager, work, keeps=keeps)
        finally:
            beside[0] = 1.0
            Paper.device(3e-5)

    BulkInputs.gemm, BulkInputs.ours = gemm, ours  # type: ignore[method-assign]
    bulk_beside_ranks.Session = CudaSession  # type: ignore[misc]
    try:
        with on_paper():
            return bulk_beside_ranks.measure_all(rank, world_size, bulk_beside.job_on("cpu", 3, 40.0), progress)
    finally:
        BulkInputs.gemm, BulkInputs.ours = right[:2]  # type: ignore[method-assign]
        bulk_beside_ranks.Session = right[2]  # type: ignore[misc]


def test_gemms_are_timed_by_events_while_the_device_is_queued(
    rank_pool: Callable[[int], RankPool], tmp_path: Path
) -> None:
    first, second = rank_pool(2).run(on_a_device, str(tmp_path / "rows"))
    assert first == second
    for row in first["rows"]:
        assert row["errors"] == {}
        assert row["gemm_us"][GEMM] == pytest.approx(200) and row["gemm_us"][OURS] == pytest.approx(300)
        assert row["gemm_ratio"][OURS] == pytest.approx(1.5) and row["gemm_ratio"]["NCCL beside"] == pytest.approx(1)
        assert row["times"][OURS]["queued_us"] == pytest.approx(330)
        (slower,) = (one for one in judge(row) if one["rule"].startswith("GEMM"))
        assert not slower["passed"]


def a_row(time_us: float, own_us: float, ratio: float, beside_us: float = 140.0) -> Row:
    times = {GEMM: 100.0, OURS: time_us, f"{OURS}, nothing beside": own_us, COLLECTIVE: 60.0}
    times |= {"NCCL beside": beside_us, "NCCL, then the GEMM": 160.0, PUSH: 40.0, "add alone": 5.0}
    return {
        "label": "rs x",
        "times": {label: {"eager_us": value + 1000, "queued_us": value} for label, value in times.items()},
        "gemm_us": {GEMM: 99.0, OURS: 99.0 * ratio},
        "gemm_ratio": {GEMM: 1.0, OURS: ratio},
    }


@pytest.mark.parametrize(
    ("row", "misses"),
    [
        (a_row(112.0, 50.0, 1.05), []),
        (a_row(112.1, 50.0, 1.05), ["collective"]),
        (a_row(112.0, 50.0, 1.051), ["GEMM"]),
        (a_row(112.0, 50.0, 1.0, beside_us=111.0), ["best"]),
        (
            a_row(113.0, 150.0, 1.0),
            ["collective"],
        ),  # NCCL's is shorter than the GEMM, so a slow one of ours is no excuse
    ],
)
def test_the_bounds_of_the_issue(row: Row, misses: list[str]) -> None:
    judged = judge(row)
    assert len(judged) == 3 and [one["rule"].split()[0] for one in judged if not one["passed"]] == misses


def test_a_collective_that_is_longer_cannot_be_hidden() -> None:
    row = a_row(200.0, 150.0, 1.0)
    row["times"][COLLECTIVE]["queued_us"] = 120.0
    assert not any(one["rule"].startswith("collective") for one in judge(row))
    assert bulk_beside.beyond_us(row, OURS) == 50.0
    del row["times"][OURS]
    assert [one["passed"] for one in judge(row)] == [False] and bulk_beside.beyond_us(row, OURS) is None


def test_a_miss_says_where_the_time_goes() -> None:
    row = a_row(130.0, 50.0, 1.1)
    row["targets"] = judge(row)
    assert where_time_goes(row) == (
        "130.0 us = GEMM 108.9 (99.0 alone) + 21.1 outside it; alone: own collective 50.0, push 40.0, the add 5.0"
    )
    lines = missed({"rows": [row], "judged": True})
    assert len(lines) == 2 and all(where_time_goes(row) in line for line in lines)
    assert missed({"rows": [row], "judged": False}) == []


def test_the_clock_keeps_nothing_of_rounds_that_are_over() -> None:
    clock = GemmClock(is_cuda=False)
    gemm = clock.around(lambda: torch.ones(1))
    assert [gemm().item() for _ in range(3)] == [1.0] * 3
    clock._pairs = [(0.0, 9.0), (1.0, 1.5), (2.0, 2.25)]
    assert clock.take(2) == pytest.approx(375_000.0)
    clock._pairs.append((0.0, 1.0))
    assert clock.take(2) == pytest.approx(1_000_000.0)


def test_rows_on_gpus() -> None:
    rows = bulk_beside_ranks.rows_of("cuda")
    assert len({row.in_features for row in rows}) == 1 and len(rows) == len(set(rows)) == 8
    assert [row.moved.width for row in rows] == [8192] * 8
    assert {(row.num_tokens, row.out_features) for row in rows} == {(8192, n) for n in (1280, 3584, 8192)} | {
        (1024, 1280)
    }
