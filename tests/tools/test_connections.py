"""`benchmarks.connections` runs each setting in processes of its own, and tells a difference from noise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import connections
from benchmarks.connections_ranks import TOKENS

Row = dict[str, Any]


@pytest.mark.timeout(115)
def test_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "connections.json"
    arguments = ["--out", str(out), "--device", "cpu", "--rounds", "1", "--repetitions", "1", "--budget-s", "60"]
    assert connections.main(arguments) == 0
    found = json.loads(out.read_text())
    assert [run["setting"] for run in found["runs"]] == [None, "1", "8"], "what the ranks have in their environment"
    assert found["left_out"] == found["errors"] == []
    labels = list(found["runs"][0]["rows"])
    assert labels == [row["label"] for row in found["compared"]] and len(labels) == 6 * len(TOKENS["cpu"])
    assert {label.split()[-1] for label in labels} == {"ring_exchange", "sequential", "bulk"}
    assert all(min(row["eager"]["us"]) > 0 for row in found["compared"])
    assert "ag beside dgrad 16x24x16 bulk" in capsys.readouterr().out


def run_of(setting: str | None, queued_us: float | None) -> Row:
    rows = {"ag x": {"eager_us": 50.0, "queued_us": queued_us, "queued_operations": 30}}
    return {"setting": setting, "rows": rows}


def runs_of(*times_us: tuple[float, float, float]) -> list[Row]:
    return [run_of(*pair) for times in times_us for pair in zip((None, "1", "8"), times, strict=True)]


def test_settings_are_compared_by_their_medians() -> None:
    (row,) = connections.compare(runs_of((100, 102, 104), (100, 104, 102)))
    assert row["queued"]["us"] == [100, 103, 103] and row["agrees"] is True
    assert row["queued"]["spread"] == pytest.approx(0.03) and row["queued"]["noise"] == pytest.approx(104 / 102 - 1)
    (row,) = connections.compare(runs_of((100, 104, 104), (100, 104, 102.5)))
    assert row["agrees"] is False and row["eager"]["spread"] == 0.0


def test_a_setting_that_was_not_measured_is_no_agreement() -> None:
    (row,) = connections.compare(runs_of((100, 100, 100))[:2])
    assert row["agrees"] is None and row["queued"]["us"] == [100, 100, None] and row["queued"]["noise"] is None
    (row,) = connections.compare([run_of(setting, None) for setting in (None, "1", "8")])
    assert row["agrees"] is None


def test_the_table_tells_noise_from_a_difference(capsys: pytest.CaptureFixture[str]) -> None:
    found = {"errors": [], "left_out": [], "seconds": 1.0}
    for repetitions, said in (
        (((100, 110, 100), (100, 110, 100)), "APART"),
        (((100, 120, 100), (100, 100, 100)), "noise"),
    ):
        connections.print_table(found | {"compared": connections.compare(runs_of(*repetitions))})
        printed = capsys.readouterr().out
        assert said in printed.splitlines()[2] and "0 of 1 rows within 3%" in printed


def test_a_failure_is_an_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: Any) -> None:
        raise RuntimeError("no ranks")

    monkeypatch.setattr(connections, "repeat", refuse)
    out = tmp_path / "connections.json"
    assert connections.main(["--out", str(out), "--device", "cpu"]) == 1
    assert "no ranks" in json.loads(out.read_text())["errors"][0]
