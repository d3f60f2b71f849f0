"""Verdict, JSON, tables and plot of a made-up run."""

from __future__ import annotations

import io
import json
import math
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from tests.tools.train_job import CORPUS, made_up_outcome, small_job
from tpoverlap.errors import ConfigError
from tpoverlap.tools.train.outputs import require_writable, write_json
from tpoverlap.tools.train.plot import draw
from tpoverlap.tools.train.report import Report
from tpoverlap.tools.train.tables import show
from tpoverlap.tools.train.verdict import judge

LOSSES = [5.0, 4.0, 3.5, 3.0, 2.5]
GRADIENTS = {"norm": torch.ones(4), "head": torch.full((2, 2), 2.0)}


def make_report(losses: list[float] = LOSSES, compare_losses: list[float] | None = None) -> Report:
    job = small_job()
    outcome = made_up_outcome(job, losses, compare_losses)
    return Report(job, CORPUS, outcome, tuple(LOSSES), judge(losses, LOSSES, GRADIENTS, GRADIENTS, "float32"))


def test_equal_runs_pass() -> None:
    verdict = judge(LOSSES, [loss + 5e-5 for loss in LOSSES], GRADIENTS, GRADIENTS, "float32")
    assert verdict.problems == () and verdict.loss_fell is True
    assert verdict.max_abs_loss_difference == pytest.approx(5e-5)
    assert verdict.gradient_differences == {"norm": 0.0, "head": 0.0}


@pytest.mark.parametrize("wrong", [3.5002, math.nan, math.inf])
def test_one_wrong_loss_fails_and_is_named(wrong: float) -> None:
    verdict = judge([5.0, 4.0, wrong, 3.0, 2.5], LOSSES, GRADIENTS, GRADIENTS, "float32")
    assert any("loss of step 3" in problem for problem in verdict.problems)


@pytest.mark.parametrize("gradient", [torch.tensor([1.0, 1, 1, 1.01]), torch.full((4,), math.nan), torch.ones(3), None])
def test_one_wrong_gradient_fails_and_is_named(gradient: torch.Tensor | None) -> None:
    gradients = dict(GRADIENTS) if gradient is None else {**GRADIENTS, "norm": gradient}
    if gradient is None:
        del gradients["norm"]
    (problem,) = judge(LOSSES, LOSSES, gradients, GRADIENTS, "float32").problems
    assert "gradient of norm" in problem


def test_a_loss_that_does_not_fall_fails_and_one_step_says_nothing() -> None:
    (problem,) = judge([3.0, 3.1, 3.2], [3.0, 3.1, 3.2], GRADIENTS, GRADIENTS, "float32").problems
    assert "did not fall" in problem
    assert judge([3.0], [3.0], GRADIENTS, GRADIENTS, "float32").problems == ()


def test_json_has_the_promised_keys(tmp_path: Path) -> None:
    write_json(tmp_path / "run.json", make_report(compare_losses=[2.0, 2.0, 2.0]).to_dict())
    data = json.loads((tmp_path / "run.json").read_text())
    assert len(data["steps"]) == 5
    assert {"step", "active_tokens", "num_sequences", "loss", "reference_loss", "time_ms"} <= data["steps"][0].keys()
    promised = {"tp_size", "device", "backend", "capacity_tokens", "total_tokens", "padded_tokens"}
    promised |= {"allocations_after_setup", "max_abs_loss_difference", "methods"}
    assert promised <= data["summary"].keys()
    assert data["summary"]["total_tokens"] == sum(step["active_tokens"] for step in data["steps"])
    assert data["summary"]["padded_tokens"] == 0
    assert data["summary"]["corpus"]["documents_skipped"] == 1
    assert [row["median_ms"] for row in data["comparison"]] == [8.5, 8.5, 8.5]


def test_padding_is_counted_from_what_was_communicated() -> None:
    report = make_report()
    from dataclasses import replace

    first = report.outcome.steps[0]
    padded = replace(first, communicated_rows=first.communicated_rows + 7)
    outcome = replace(report.outcome, steps=(padded, *report.outcome.steps[1:]))
    assert replace(report, outcome=outcome).padded_tokens == 7


def test_nan_is_null_in_json(tmp_path: Path) -> None:
    write_json(tmp_path / "f.json", {"a": [math.nan, 1.0], "b": math.inf})
    assert json.loads((tmp_path / "f.json").read_text()) == {"a": [None, 1.0], "b": None}


@pytest.mark.parametrize("compare_losses", [[2.0, 2.0, 2.001], [2.0, math.nan, 2.0]])
def test_compared_variants_must_agree(compare_losses: list[float]) -> None:
    (problem,) = make_report(compare_losses=compare_losses).problems
    assert "variants' losses differ" in problem


def test_tables_show_every_step_and_every_problem() -> None:
    console = Console(width=80, record=True, quiet=False, file=open("/dev/null", "w"))  # noqa: SIM115
    show(console, make_report([5.0, 4.0, 3.6, 3.0, 2.5], [2.0, 2.0, 2.0]))
    text = console.export_text()
    for record in make_report().outcome.steps:
        assert "+".join(map(str, record.rows_per_rank)) in text
    assert "FAILED the loss of step 3" in text and "…" not in text
    assert (
        "padded to C" in text
        and "not overlapped" in text
        and "1 not within 2 to 128 bytes and skipped" in " ".join(text.split())
    )
    assert "off by" in text and "1.0e-01" in text, "step 3 against the reference"


def test_no_empty_column_without_a_reference() -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    report = replace(make_report(), reference_losses=None, verdict=None)
    show(console, report)
    text = console.export_text()
    assert "off by" not in text and "reference" not in text and "over all steps but the first" in text
    show(console, replace(report, outcome=replace(report.outcome, steps=report.outcome.steps[:1])))
    assert "in the only step" in console.export_text()


def test_t_of_a_step_is_compared_with_its_microbatches_capacities() -> None:
    """Two microbatches that fill C are 1.00 of it together, not 2.00."""
    report = make_report()
    job = replace(report.job, microbatches=2)
    steps = tuple(replace(one, active_tokens=2 * job.capacity_tokens) for one in report.outcome.steps)
    console = Console(width=120, record=True, file=io.StringIO())
    show(console, replace(report, job=job, outcome=replace(report.outcome, steps=steps)))
    shown = console.export_text()
    assert "1.00" in shown and " 2.00" not in shown, shown
    assert "a microbatch, of which T/C is the mean of 2" in " ".join(shown.split())


def test_plot_is_a_png_of_readable_size(tmp_path: Path) -> None:
    report = make_report()
    draw(tmp_path / "run.png", report.outcome.steps, report.reference_losses, 128, "a title")
    data = (tmp_path / "run.png").read_bytes()
    assert data.startswith(b"\x89PNG\r\n")
    width, height = struct.unpack(">II", data[16:24])
    assert width >= 800 and height >= 600


def test_writable_check_leaves_no_trace(tmp_path: Path) -> None:
    require_writable(tmp_path / "new.json", "--json")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "old.json").write_text("keep")
    require_writable(tmp_path / "old.json", "--json")
    assert (tmp_path / "old.json").read_text() == "keep"


@pytest.mark.parametrize("name", ["missing/run.json", "."])
def test_unwritable_path_names_option_and_reason(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot write --json .*: (No such file|Is a directory)"):
        require_writable(tmp_path / name, "--json")
