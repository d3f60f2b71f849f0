"""The real thing on the CPU: every method against the reference, spawned and under torchrun, and broken on purpose."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner, Result

from tests.tools.train_job import DOCUMENTS, small_job
from tpoverlap.tools.cli import main
from tpoverlap.tools.train.batching import plan_steps
from tpoverlap.tools.train.fp8 import RECIPES, Fp8Linears
from tpoverlap.tools.train.job import ProgressListener, TrainJob, TrainOutcome
from tpoverlap.tools.train.methods import METHOD_CHOICES
from tpoverlap.tools.train.reference import ReferenceRun, run_reference
from tpoverlap.tools.train.verdict import judge
from tpoverlap.tools.train.weights import ModelConfig, full_weights
from tpoverlap.tools.train.worker import RankFailedError, spawn, train_on_rank

SMALL_CORPUS = ("--corpus", str(Path(json.__file__).parent))
"""Five files. All of the standard library take longer to parse than ranks to train; one test reads them."""
SMALL = ("--device", "cpu", "--capacity", "256", "--hidden", "48", "--heads", "6", "--ffn", "96", "--layers", "2")


def run(*arguments: str) -> Result:
    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    return CliRunner().invoke(main, ["train", *SMALL, *SMALL_CORPUS, *arguments], catch_exceptions=False)


def read(path: Path) -> dict[str, Any]:
    data = json.loads(path.read_text())
    assert isinstance(data, dict)
    return data


@pytest.mark.usefixtures("trains_on_shared_ranks")
@pytest.mark.parametrize(
    "method",  # the others are in the conformance suite as well; auto trains in most tests below
    [pytest.param(m, marks=pytest.mark.slow if m != "pipeline" else ()) for m in METHOD_CHOICES],
)
def test_every_method_trains_like_the_reference(method: str, tmp_path: Path) -> None:
    result = run("--steps", "6", "--method", method, "--check-reference", "--json", str(tmp_path / "run.json"))
    assert result.exit_code == 0, result.output
    summary = read(tmp_path / "run.json")["summary"]
    assert summary["max_abs_loss_difference"] <= 1e-4
    assert summary["padded_tokens"] == 0 and summary["allocations_after_setup"] == 0
    ran = set(summary["methods"].values())
    assert ran == {"sequential"} if method == "sequential" else method == "auto" or method in ran
    if method in ("pipeline", "bulk"):
        assert f"--method {method} is not legal for" in result.output


@pytest.mark.usefixtures("trains_on_shared_ranks")
@pytest.mark.parametrize(
    ("style", "mode", "microbatches", "more"),
    [
        pytest.param("te-style", "auto", 1, ("--compare", "--compare-steps", "2"), marks=pytest.mark.slow),
        ("te-style", "rs_dgrad", 5, ("--tp", "3")),
        pytest.param("plain", "rs_dgrad", 2, ("--method", "sequential"), marks=pytest.mark.slow),
        ("plain", "bulk", 3, ("--method", "ring_exchange")),
    ],
)
def test_layer_styles_and_microbatches_in_flight(
    style: str, mode: str, microbatches: int, more: tuple[str, ...], tmp_path: Path
) -> None:
    options = ("--layers", style, "--backward-mode", mode, "--pipeline-microbatches", str(microbatches), *more)
    result = run("--steps", "4", *options, "--check-reference", "--json", str(tmp_path / "run.json"))
    assert result.exit_code == 0, result.output
    summary = read(tmp_path / "run.json")["summary"]
    assert summary["max_abs_loss_difference"] <= 1e-4
    assert summary["padded_tokens"] == 0 and summary["allocations_after_setup"] == 0
    assert (summary["layers"], summary["pipeline_microbatches"]) == (style, microbatches)
    assert ("lm_head_fprop" in summary["methods"]) == (style == "te-style")
    dgrad = summary["methods"]["qkv_dgrad"]
    scatters = "ring_exchange" in dgrad if "sequential" not in more else "qkv_wgrad" not in summary["methods"]
    assert scatters == (mode == "rs_dgrad")


@pytest.mark.usefixtures("trains_on_shared_ranks")
@pytest.mark.parametrize(
    ("recipe", "more"),
    [
        ("", ("--backward-mode", "rs_dgrad", "--pipeline-microbatches", "3")),
        ("delayed", ("--backward-mode", "bulk", "--pipeline-microbatches", "2", "--tp", "3")),
        pytest.param("rowwise", ("--compare", "--compare-steps", "2"), marks=pytest.mark.slow),
        pytest.param("current", ("--method", "pipeline", "--dtype", "bfloat16"), marks=pytest.mark.slow),
        pytest.param("delayed", ("--method", "sequential", "--backward-mode", "rs_dgrad"), marks=pytest.mark.slow),
    ],
)
def test_fp8_layers_train_like_the_reference(recipe: str, more: tuple[str, ...], tmp_path: Path) -> None:
    sizes = ("--hidden", "96", "--heads", "6", "--ffn", "192", "--layers", "te-style")
    fp8 = ("--fp8", recipe) if recipe else ("--fp8",)  # without a value it is current scaling
    result = run("--steps", "4", *sizes, *fp8, *more, "--check-reference", "--json", str(tmp_path / "run.json"))
    assert result.exit_code == 0, result.output
    data = read(tmp_path / "run.json")
    summary = data["summary"]
    assert (
        summary["fp8"] == (recipe or "current")
        and summary["padded_tokens"] == 0
        and summary["allocations_after_setup"] == 0
    )
    if "bfloat16" not in more:  # half of what is allowed
        assert max(data["gradients"].values()) < 2.5e-2 and summary["max_abs_loss_difference"] < 1e-2


def test_the_check_notices_other_scales() -> None:
    """The reference of another R, of another recipe and of none against that of current scaling on two ranks."""
    steps = plan_steps(DOCUMENTS, capacity_tokens=128, num_steps=1, tp_size=2)
    model = ModelConfig(hidden=64, layers=1, heads=4, ffn=64)
    weights = full_weights(model, 1)

    def train(fp8: Fp8Linears | None) -> ReferenceRun:
        cpu = torch.device("cpu")
        return run_reference(model, weights, steps, device=cpu, dtype=torch.float32, learning_rate=1e-3, fp8=fp8)

    right = train(Fp8Linears(RECIPES["current"], 2))
    again = train(Fp8Linears(RECIPES["current"], 2))
    for other in (None, Fp8Linears(RECIPES["current"], 4), Fp8Linears(RECIPES["rowwise"], 2)):
        wrong = train(other)
        verdict = judge(wrong.losses, right.losses, wrong.first_gradients, right.first_gradients, "fp8 float32")
        assert sum("the first gradient of" in problem for problem in verdict.problems) > 3, verdict
    assert judge(again.losses, right.losses, again.first_gradients, right.first_gradients, "fp8 float32").problems == ()


def test_three_ranks_with_comparison_and_plot(tmp_path: Path) -> None:
    files = ("--json", str(tmp_path / "run.json"), "--plot", str(tmp_path / "run.png"))
    result = run("--tp", "3", "--steps", "5", "--check-reference", "--compare", "--compare-steps", "2", *files)
    assert result.exit_code == 0, result.output
    data = read(tmp_path / "run.json")
    steps, padded = data["steps"], data["comparison"][2]
    assert {step["active_tokens"] % 3 for step in steps} != {0}
    assert any(0 in step["rows_per_rank"] for step in steps)
    assert padded["variant"] == "padded to C" and padded["communicated_rows"] == [256, 256]
    assert all(row["active_tokens"] == row["communicated_rows"] for row in data["comparison"][:2])
    assert (tmp_path / "run.png").stat().st_size > 10_000
    assert "Comparison" in result.output


def test_one_rank_is_enough(tmp_path: Path) -> None:
    result = run("--tp", "1", "--steps", "5", "--check-reference", "--json", str(tmp_path / "run.json"))
    assert result.exit_code == 0, result.output


def test_under_torchrun_one_rank_reports(tmp_path: Path) -> None:
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
    command += ["train", *SMALL, "--steps", "5", "--check-reference", "--json", str(tmp_path / "run.json")]
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("Summary") == 1
    summary = read(tmp_path / "run.json")["summary"]
    assert summary["max_abs_loss_difference"] <= 1e-4
    assert summary["padded_tokens"] == 0 and summary["allocations_after_setup"] == 0


# -- broken on purpose ------------------------------------------------------------------------------------------------


def without_synchronised_gradients(
    job: TrainJob, group: dist.ProcessGroup, rank: int, report: ProgressListener
) -> TrainOutcome:
    import tpoverlap as tpo

    tpo.sync_replicated_grads = lambda model, group: None
    return train_on_rank(job, group, rank, report)


def killed_in_its_second_step(
    job: TrainJob, group: dist.ProcessGroup, rank: int, report: ProgressListener
) -> TrainOutcome:
    from tpoverlap.tools.train.trainer import RankTrainer

    zero_grad, calls = RankTrainer.zero_grad, []

    def zero_grad_or_die(self: RankTrainer) -> None:
        calls.append(None)
        if rank == 1 and len(calls) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        zero_grad(self)

    RankTrainer.zero_grad = zero_grad_or_die  # type: ignore[method-assign]
    return train_on_rank(job, group, rank, report)


def job_with_reference() -> tuple[TrainJob, ReferenceRun]:
    steps = plan_steps(DOCUMENTS, capacity_tokens=128, num_steps=5, tp_size=2)
    job = small_job(steps=steps, want_gradients=True, learning_rate=5e-3)
    weights = full_weights(job.model, job.seed)
    cpu = torch.device("cpu")
    run = run_reference(job.model, weights, steps, device=cpu, dtype=job.dtype, learning_rate=job.learning_rate)
    return job, run


def test_the_check_notices_gradients_that_were_not_synchronised() -> None:
    job, reference = job_with_reference()
    outcome = spawn(job, lambda progress: None, without_synchronised_gradients)
    losses = [record.loss for record in outcome.steps]
    problems = judge(losses, reference.losses, outcome.first_gradients, reference.first_gradients, "float32").problems
    named = {name for name in reference.first_gradients if any(f"gradient of {name} " in p for p in problems)}
    assert named == {"embedding", "head", "norm", "layers.0.attention_norm", "layers.0.mlp_norm"}
    assert any("the loss of step" in problem for problem in problems)


def test_a_rank_that_dies_in_training_ends_the_run() -> None:
    with pytest.raises(RankFailedError, match=r"rank 1 of 2 failed: its process ended with exit code -9"):
        spawn(small_job(), lambda progress: None, killed_in_its_second_step)
