"""`benchmarks.gemm_alone` runs, on the CPU, and times nothing that is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks import gemm_alone
from tpoverlap.testing import RankPool
from tpoverlap.tools.bench.session import Session


def run(rank: int, world_size: int, out: Path) -> None:
    assert dist.group.WORLD is not None, "the pool's"
    gemm_alone.measure_all(Session(gemm_alone.job_on("cpu", 1, None), dist.group.WORLD, 0), out)


def test_on_the_cpu(rank_pool: Callable[[int], RankPool], tmp_path: Path) -> None:
    out = tmp_path / "gemms.json"
    rank_pool(1).run(run, out)
    found = json.loads(out.read_text())
    assert found["left_out"] == 0 and found["environment"]["torch"] == torch.__version__
    kinds = [row["kind"] for row in found["rows"]]
    assert kinds == ["quantise", "forward", "weight"] * len(gemm_alone.TINY_TOKENS)
    for row in found["rows"]:
        assert not row["problems"], row
        assert all(times["eager_us"] > 0 for times in row["times"].values()), row
    assert set(found["rows"][1]["times"]) == {"bfloat16", "e4m3 fast", "e4m3", "e5m2 fast", "e5m2"}


def test_a_wrong_result_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[str] = []
    monkeypatch.setattr(gemm_alone, "measure", lambda _session, runs: timed.extend(runs) or {})

    def refused() -> torch.Tensor:
        raise RuntimeError("no such mode")

    def gives(run: Callable[[], torch.Tensor]) -> gemm_alone.Variant:
        return gemm_alone.Variant(run, lambda result: result, lambda: torch.ones(3), 0.01)

    variants = {
        "right": gives(lambda: torch.ones(3)),
        "wrong": gives(lambda: torch.tensor([1.0, 1.0, 1.1])),
        "nothing": gives(lambda: torch.full((3,), float("nan"))),
        "refused": gives(refused),
    }
    row = gemm_alone.row_of(None, "forward", (1, 1, 3), variants)  # type: ignore[arg-type]
    assert timed == ["right"]
    assert set(row["problems"]) == {"wrong", "nothing", "refused"} and "no such mode" in row["problems"]["refused"]


def test_every_shape_of_the_suites_is_there() -> None:
    found = list(
        gemm_alone.items(gemm_alone.TOKENS, gemm_alone.SUITE_FEATURES, gemm_alone.LAYER_FEATURES, gemm_alone.WIDTHS)
    )
    assert len(found) == len(set(found))
    assert {("forward", (t, 8192, 3584)) for t in (16, 512, 16384)} <= set(found)
    assert all(size % 16 == 0 for _, sizes in found for size in sizes), "FP8 GEMMs of weight gradients would be padded"
