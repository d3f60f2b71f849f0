"""docs/tuning.md's tables are what the files give; the script on what tune and profile write; the meter's cost."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest

from benchmarks import meter_cost
from benchmarks.tuning_tables import ROOT, filled
from tests.tools.test_tune import JOB, MACHINE, SEQUENTIAL_BEST, Slow, search
from tpoverlap.testing import RankPool
from tpoverlap.tools.profile.experiment import profile_rank
from tpoverlap.tools.tune.output import results


def place(what: str, file: str) -> str:
    return f"before\n<!-- table: {what} {file} -->\nold\n<!-- table: end -->\nafter\n"


def test_the_document_holds_the_files_tables() -> None:
    """Whoever adds results runs python -m benchmarks.tuning_tables --write."""
    text = (ROOT / "docs" / "tuning.md").read_text(encoding="utf-8")
    assert text.count("<!-- table: ") == 2 * 6
    assert filled(text) == text


def test_tunes_table(tmp_path: Path) -> None:
    slow = Slow(SEQUENTIAL_BEST)
    outcome = search(tmp_path, slow, budget_s=45.0, clock=slow.clock)
    data = results(JOB, MACHINE, outcome, {"took_s": 40.0, "budget_s": 45.0})
    (tmp_path / "t.json").write_text(json.dumps(data))
    text = filled(place("tune", "t.json"), tmp_path)
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert "| sequential | 10.0 | ring_exchange 20.0 | 10.0 | ring_exchange 20.0 | confirmed |" in text
    assert "not measured: default" in text and "2 x toy" in text and "0.7 of 0.75 minutes" in text
    assert filled(text, tmp_path) == text, "written once, it stays"
    assert len([line for line in text.splitlines() if line.startswith("| ")]) == 2 + len(outcome.buckets)
    assert data["is_complete"] is False


def test_profiles_table(tmp_path: Path, rank_pool: Callable[[int], RankPool]) -> None:
    from tests.tools.test_profile_run import job

    rank_pool(2).run(profile_rank, job(tmp_path, tokens=(40,)), timeout_s=90)
    text = filled(place("profile", "T40/report.json"), tmp_path)
    report = json.loads((tmp_path / "T40" / "report.json").read_text())
    assert len([line for line in text.splitlines() if line.startswith("| ")]) == 2 + len(report["gemms"])
    report["try"] = {"verdict": "helped", "before_us": 100.0, "after_us": 90.0, "faster_rounds": 3, "rounds": 3}
    (tmp_path / "tried.json").write_text(json.dumps(report))
    assert "**Tried**: helped. Step 100 us before, 90 after (-10.0 %), faster in 3 of 3" in filled(
        place("profile", "tried.json"), tmp_path
    )


def test_a_missing_file_gives_no_number(tmp_path: Path) -> None:
    text = filled(place("tune", "none.json"), tmp_path)
    assert "*Not measured yet: there is no `none.json`.*" in text
    with pytest.raises(click.ClickException, match="no table is called 'other'"):
        filled(place("other", "none.json"), tmp_path)


# --- the meter's cost -------------------------------------------------------------------------------------------------

SIZES: dict[str, Any] = {"device": "cpu", "tokens": 24, "hidden": 32, "ffn": 64, "rounds": 12}


def measured(rank: int, world_size: int, sizes: dict[str, Any]) -> dict[str, Any]:
    return meter_cost.steps_of(rank, world_size, sizes)


def test_meter_cost_measures_both_on_ranks(rank_pool: Callable[[int], RankPool], tmp_path: Path) -> None:
    found = rank_pool(2).run(measured, SIZES, timeout_s=90)
    assert found[0]["wall"] == found[1]["wall"], "the slowest rank counts, on every rank"
    row = meter_cost.row_of(found[0], SIZES)
    assert row["metered_calls"] == row["operations"] > 0, "on the CPU every operation is"
    assert 0 < row["direct_us"] < 1000 and row["bitwise_equal"]
    assert row["host"]["without_us"] <= row["step"]["without_us"] * 1.5
    (tmp_path / "m.json").write_text(json.dumps({"rows": [row]}))
    assert f"| {SIZES['tokens']} | " in filled(place("meter", "m.json"), tmp_path)


def other_result(rank: int, world_size: int) -> str:
    """A meter that touches the result must not be timed."""
    import tpoverlap as tpo
    from tpoverlap.comm.meter import Meter

    original = tpo.nn.LayerNormMLP.forward

    def forward(self: Any, *arguments: Any, **options: Any) -> Any:
        out = original(self, *arguments, **options)
        return out if self.manager.channel.meter is None else out * 1.0000001

    tpo.nn.LayerNormMLP.forward = forward  # type: ignore[method-assign]
    try:
        meter_cost.steps_of(rank, world_size, SIZES)
    except AssertionError as error:
        return str(error)
    finally:
        tpo.nn.LayerNormMLP.forward = original  # type: ignore[method-assign]
        assert Meter.of.__name__ == "of"
    return ""


def test_another_result_is_not_timed(rank_pool: Callable[[int], RankPool]) -> None:
    for said in rank_pool(2).run(other_result, timeout_s=60):
        assert "meter=True changed the result" in said


@pytest.mark.parametrize(
    ("percent", "verdict"),
    [([0.2] * 100, "below 1 %"), ([3.0] * 100, "above 1 %"), ([-5.0, 5.0] * 50, "not decided")],
)
def test_overhead_is_decided_only_where_it_can_be(percent: list[float], verdict: str) -> None:
    found = meter_cost.overhead([1.0] * 100, [1.0 + one / 100 for one in percent])
    assert found["verdict"].startswith(verdict), found
    low, high = found["interval_percent"]
    assert low <= found["overhead_percent"] <= high
