"""The layers suite's tables: what they say of rows, and that README.md and docs/layers.md hold what the files give."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from benchmarks import layers_table, readme_table
from benchmarks.layers_table import ROOT, TABLES, begin, filled, full, headlines

RESULTS = ROOT / "benchmarks" / "results"
Row = dict[str, Any]


def method(queued_us: float | None, eager_us: float, host_us: float, of: tuple[float, float] = (1.0, 1.0)) -> Row:
    ratios = {"eager": eager_us / of[0], "queued": None if queued_us is None else queued_us / of[1]}
    return {
        "queued_us": queued_us,
        "eager_us": eager_us,
        "host_us": host_us,
        "of_compute_only": ratios,
        "of_twin": ratios,
    }


def results(queued: bool = True) -> Row:
    def us(value: float) -> float | None:
        return value if queued else None

    methods = {
        "auto": method(us(4400.0), 6000.0, 5500.0, (4000.0, 4000.0)),
        "no overlap": method(us(5000.0), 5600.0, 5000.0),
        "padded to capacity": method(us(8800.0), 9000.0, 5400.0),
        "compute only": method(us(4000.0), 4000.0, 2500.0),
    }
    targets = [
        {"rule": "ms", "mode": "eager", "value": 6.0, "bound": 4.8, "passed": False},
        {"rule": "of_compute_only", "mode": "queued", "value": 1.1, "bound": 1.2, "passed": True},
    ]
    row = {"suite": "layers", "kind": "transformer", "hidden": 4096, "ffn": 14336, "numbers": "bfloat16"}
    row |= {"num_tokens": 4096, "methods": methods, "targets": targets}
    failed = row | {"methods": {"auto": methods["auto"]}}
    return {"rows": [row, failed, {"suite": "gemm"}]}


def test_a_row_of_each_table() -> None:
    text = full(results())
    assert len(text.splitlines()) == 3, "a row without its twin has nothing to be compared with"
    cells = [cell.strip() for cell in text.splitlines()[2].strip("|").split("|")]
    assert cells[:8] == ["transformer 4096, 14336, bf16", "4096", "4.40", "5.00", "8.80", "4.00", "1.10", "1.10"]
    assert cells[8:] == ["6.00", "5.60", "4.00", "5.50", "5.00", "2.50", "1 of 2; missed: ms eager"]
    line = headlines(results()).splitlines()[2]
    assert line == "| transformer 4096, 14336, bf16 | 4096 | 4.00 | 4.40 | 5.00 | 8.80 | 1.10 | 1.50 |"


def test_eager_times_where_nothing_can_be_queued() -> None:
    cells = [cell.strip() for cell in full(results(queued=False)).splitlines()[2].strip("|").split("|")]
    assert cells[2:7] == ["6.00", "5.60", "9.00", "4.00", "1.50"]


def test_written_then_held(tmp_path: Path) -> None:
    source = tmp_path / "r.json"
    source.write_text(json.dumps(results()))
    (tmp_path / "docs").mkdir()
    for which, (_, name) in TABLES.items():
        (tmp_path / name).write_text(f"x\n\n{begin(which)}\nold\n{layers_table.END}\n\ny\n")
    arguments = [str(source), "--root", str(tmp_path)]
    run = CliRunner().invoke
    assert run(layers_table.main, [*arguments, "--check"]).exit_code == 1
    assert run(layers_table.main, [*arguments, "--write"]).exit_code == 0
    assert run(layers_table.main, [*arguments, "--check"]).exit_code == 0
    written = (tmp_path / "README.md").read_text()
    assert written.startswith("x\n\n") and written.endswith("\n\ny\n") and "old" not in written
    (tmp_path / "README.md").write_text(written.replace("4.40", "4.30"))
    assert run(layers_table.main, [*arguments, "--check"]).exit_code == 1


def test_what_cannot_be_done_is_said() -> None:
    with pytest.raises(click.ClickException, match="no row"):
        full({"rows": [{"suite": "gemm"}]})
    with pytest.raises(click.ClickException, match="each once"):
        filled("no markers", "full", "table")


def test_the_documents_hold_the_files_tables() -> None:
    """Whoever adds results runs both scripts with --write."""
    layers = RESULTS / "2026-11-30_h200x2_bench_layers.json"
    gemm = RESULTS / "2026-11-30_h200x2_bench_gemm.json"
    assert CliRunner().invoke(layers_table.main, [str(layers), "--check"]).exit_code == 0
    arguments = [str(gemm), "--check", "--readme", str(ROOT / "README.md")]
    assert CliRunner().invoke(readme_table.main, arguments).exit_code == 0
    assert layers.name in (ROOT / "docs" / "layers.md").read_text(encoding="utf-8"), (
        "the file is named beside its table"
    )
