"""``profile run``: what the ranks measure, what --try says, and arguments that are refused before anything starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner, Result

from tpoverlap.config import resolve
from tpoverlap.tools.cli import main
from tpoverlap.tools.profile import experiment
from tpoverlap.tools.profile.advice import Advice
from tpoverlap.tools.profile.experiment import RunJob, TokensReport, Trial, profile_rank
from tpoverlap.tools.profile.layer import LayerSizes, without_overlap

NAMES = {f"{block}_{phase}" for block in ("qkv", "proj", "fc1", "fc2") for phase in ("fprop", "dgrad", "wgrad")}
COMMUNICATING = NAMES - {"proj_wgrad", "fc2_wgrad"}
FILES = {"report.json", "timeline.png", "trace.json", "trace-rank0.json", "trace-rank1.json"}
SIZES = ("--hidden", "32", "--ffn", "64", "--device", "cpu")


def invoke(*arguments: object) -> Result:
    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    return CliRunner().invoke(main, ["profile", "run", *map(str, arguments)], catch_exceptions=False)


def job(directory: Path, **changes: Any) -> RunJob:
    values: dict[str, Any] = {
        "sizes": LayerSizes(32, 64, 2),
        "tokens": (40,),
        "device_type": "cpu",
        "dtype": torch.float32,
        "ub_cfgs": {"fc2_fprop": {"method": "pipeline", "num_splits": 2}},
        "rounds": 3,
        "try_advice": False,
        "out_dir": str(directory),
        "timeout_s": 60.0,
    }
    return RunJob(**(values | changes))


def test_every_gemm_is_measured_alone_and_overlapped(rank_pool: Any, tmp_path: Path) -> None:
    reports, others = rank_pool(2).run(profile_rank, job(tmp_path, tokens=(40, 7)), timeout_s=90)
    assert others == [] and [one.num_tokens for one in reports] == [40, 7]
    for one in reports:
        rows = {row.name: row for row in one.report.figures}
        assert set(rows) == COMMUNICATING and rows["fc2_fprop"].method == "pipeline"
        for row in rows.values():
            assert row.calls == 3 and row.tokens == (one.num_tokens, one.num_tokens)
            assert row.compute_alone_us and row.comm_alone_us and row.sequential_us
            assert row.sequential_us >= row.comm_alone_us
        saved = json.loads((tmp_path / f"T{one.num_tokens}" / "report.json").read_text())
        assert saved["num_tokens"] == one.num_tokens and saved["try"] is None
        assert {row["name"] for row in saved["gemms"]} == COMMUNICATING


def test_the_time_limit_ends_rounds_and_then_t(rank_pool: Any, tmp_path: Path) -> None:
    """Many rounds of two T in 2.5 seconds: fewer rounds of the first, the second within its share or left out."""
    begin_s = time.monotonic()
    asked = job(tmp_path, tokens=(40, 7), rounds=100_000, limit_s=2.5)
    reports, _ = rank_pool(2).run(profile_rank, asked, timeout_s=60)
    assert time.monotonic() - begin_s < 15.0
    assert [one.num_tokens for one in reports][:1] == [40]
    for one in reports:
        calls = {row.calls for row in one.report.figures}
        assert len(calls) == 1 and 3 <= calls.pop() < 100_000
        saved = json.loads((tmp_path / f"T{one.num_tokens}" / "report.json").read_text())
        assert saved["rounds"] == one.report.figures[0].calls and saved["rounds_asked"] == 100_000
    late = job(tmp_path, tokens=(40, 7), limit_s=0.0)
    assert rank_pool(2).run(profile_rank, late, timeout_s=60)[0] == [], "nothing is begun after the end"


def weights_of_sets(rank: int, world_size: int) -> tuple[int, int]:
    from tpoverlap.tools.profile.layer import GemmSet

    sets = [GemmSet(dist.group.WORLD, LayerSizes(32, 64, 2), 40, torch.float32, torch.device("cpu"), {})]
    sets.append(
        GemmSet(dist.group.WORLD, LayerSizes(32, 64, 2), 40, torch.float32, torch.device("cpu"), {}, like=sets[0])
    )
    try:
        a, b = ({getattr(one, name).weight.data_ptr() for name in ("qkv", "proj", "fc1", "fc2")} for one in sets)
        return len(a), len(a | b)
    finally:
        for one in sets:
            one.close()


def test_the_compared_sets_share_their_weights(rank_pool: Any) -> None:
    assert rank_pool(2).run(weights_of_sets, timeout_s=60) == [(4, 4), (4, 4)]


def try_something(rank: int, world_size: int, directory: str) -> list[TokensReport]:
    """With an advice that always comes, and a clock on which it takes a tenth off."""
    advice = Advice("fc1_fprop", "made-up", "", {}, {"method": "sequential"})
    moved = Advice("qkv_wgrad", "made-up", "", {}, {"method": "ring_exchange"}, "qkv_dgrad", ("qkv_wgrad",))
    before = experiment.advise, experiment._step_us
    experiment.advise = lambda figures, setting: [advice, moved]
    experiment._step_us = lambda one, x, num_tokens: (
        90.0 if one.manager.get("fc1_fprop").config.method == "sequential" else 100.0 + rank
    )
    try:
        return profile_rank(rank, world_size, job(Path(directory), try_advice=True))
    finally:
        experiment.advise, experiment._step_us = before


def test_the_advised_options_are_run_and_compared(rank_pool: Any, tmp_path: Path) -> None:
    (report,), _ = rank_pool(2).run(try_something, str(tmp_path), timeout_s=90)
    trial = report.trial
    assert trial is not None and (trial.rounds, trial.wins, trial.verdict) == (3, 3, "helped")
    assert (trial.before_us, trial.after_us) == (101.0, 90.0), "the slowest rank counts"
    assert trial.lines == (
        "fc1_fprop: {method: sequential}",
        "qkv_dgrad: {method: ring_exchange}",
        "# remove: qkv_wgrad",
    )
    assert set(trial.names) == COMMUNICATING - {"qkv_wgrad"} and min(min(pair) for pair in trial.names.values()) > 0
    saved = json.loads((tmp_path / "T40" / "report.json").read_text())["try"]
    assert saved["changed"] == list(trial.lines) and saved["verdict"] == trial.verdict


def wrong_rows(rank: int, world_size: int, directory: str) -> None:
    """The overlapped set computes with other weights than the plain one: nothing may be reported."""
    from tpoverlap.tools.profile.layer import GemmSet

    original = GemmSet.step

    def step(self: GemmSet, x: torch.Tensor, num_tokens: int) -> torch.Tensor:
        out = original(self, x, num_tokens)
        return out if self.manager.get("fc1_fprop").config.method == "sequential" else out.roll(1, 0)

    GemmSet.step = step  # type: ignore[method-assign]
    try:
        with pytest.raises(experiment.TpOverlapError, match="differs from the plain one"):
            profile_rank(rank, world_size, job(Path(directory)))
    finally:
        GemmSet.step = original  # type: ignore[method-assign]


def test_wrong_numbers_are_not_timed(rank_pool: Any, tmp_path: Path) -> None:
    rank_pool(2).run(wrong_rows, str(tmp_path), timeout_s=60)
    assert not (tmp_path / "T40" / "report.json").exists()


@pytest.mark.parametrize(
    ("before", "after", "wins", "verdict"),
    [
        (100.0, 90.0, 12, "helped"),
        (100.0, 90.0, 9, "helped"),
        (100.0, 90.0, 8, "did not help"),  # now and then only
        (100.0, 101.0, 9, "did not help"),
        (100.0, 110.0, 3, "made it slower"),
        (100.0, 110.0, 6, "did not help"),
    ],
)
def test_verdicts(before: float, after: float, wins: int, verdict: str) -> None:
    assert Trial((), before, after, wins, 12).verdict == verdict


def test_the_plain_twin_has_the_same_names_and_directions() -> None:
    config = resolve({"qkv_dgrad": {"method": "ring_exchange"}}, 2)
    plain = resolve(without_overlap(config), 2)
    assert set(plain.names) >= set(config.names)
    for name, options in config.names.items():
        assert plain.names[name].method == "sequential"
        assert plain.names[name].is_reduce_scatter == options.is_reduce_scatter


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tokens", "8,x"), "must be whole numbers"),
        (("--tokens", "0"), "at least 1"),
        (("--tokens", "8", "--tp", "3"), "not divisible by --tp 3"),
        (("--tokens", "8", "--ub-cfg", "none.yaml"), "none.yaml"),
        (("--tokens", "8", "--device", "cuda"), "no usable GPU"),
    ],
)
def test_refused_before_any_rank_starts(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    if "cuda" in arguments and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    result = invoke(*SIZES, *arguments, "-o", tmp_path / "out")
    assert result.exit_code == 2 and message in result.output


def test_an_output_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = invoke(*SIZES, "--tokens", "8", "-o", tmp_path / "file")
    assert result.exit_code == 2 and "cannot write to" in result.output


@pytest.mark.slow
def test_spawned(tmp_path: Path) -> None:
    result = invoke(*SIZES, "--tokens", "24", "--rounds", "3", "--try", "-o", tmp_path)
    assert result.exit_code == 0 and "fc2_dgrad" in result.output, result.output
    assert {path.name for path in (tmp_path / "T24").iterdir()} == FILES


@pytest.mark.slow
def test_under_torchrun(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "tpoverlap",
    ]
    command += ["profile", "run", *SIZES, "--tokens", "24", "--rounds", "3", "-o", str(tmp_path)]
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0 and done.stdout.count("wrote ") == 1, done.stdout + done.stderr
    assert {path.name for path in (tmp_path / "T24").iterdir()} == FILES
