"""``tpoverlap tune`` on two CPU ranks: interrupted, continued, and its cache and file followed by managers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

import tpoverlap as tpo
from tpoverlap.config import resolve
from tpoverlap.testing import RankPool
from tpoverlap.tools.cli import SUBCOMMANDS, main
from tpoverlap.tools.tune.decide import winner
from tpoverlap.tools.tune.job import Ask
from tpoverlap.tools.tune.measure import describe, measure
from tpoverlap.tuning import Candidate

SIZES = ("--hidden", "16", "--ffn", "24", "--heads", "2", "--tp", "2")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["tune", *SIZES, *arguments])


@pytest.fixture
def shared_ranks(rank_pool: Callable[[int], RankPool], monkeypatch: pytest.MonkeyPatch) -> RankPool:
    """The command's own pool would take seconds to start."""

    @contextmanager
    def existing(world_size: int, *, device: str, group_timeout_s: float) -> Iterator[RankPool]:
        assert device == "cpu" and group_timeout_s >= 60.0
        yield rank_pool(world_size)

    monkeypatch.setattr("tpoverlap.testing.RankPool", existing)
    return rank_pool(2)


def follow(rank: int, size: int, yaml: str | None, cache: str | None) -> dict[str, Any]:
    """What a manager with the file, or the cache, says and does at a T of the measured range."""
    with tpo.UserBufferManager(
        None, (32, 16), dtype=torch.float32, ub_cfgs=yaml, tuning_cache=cache or False, timeout_s=20.0
    ) as manager:
        x, weight = torch.ones(32 // size, 16), torch.ones(24 // size, 16)
        tpo.all_gather_gemm(x, weight, manager.layer("fc1"))
        ran = [key for key, value in manager.stats()["fc1_fprop"].items() if key.startswith("method_") and value]
        return {"ran": ran, "explain": manager.explain("fc1_fprop", 32)}


def test_interrupted_then_continued_then_followed(
    tmp_path: Path, shared_ranks: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, cache = tmp_path / "ub.yaml", tmp_path / "cache"
    state = tmp_path / "ub.yaml.state.json"
    arguments = ("--device", "cpu", "--tokens", "9:32", "--rounds", "3", "-o", str(output), "--cache-dir", str(cache))
    calls: list[int] = []

    def counting(times: Any, default: int) -> int:
        calls.append(default)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return winner(times, default)

    monkeypatch.setattr("tpoverlap.tools.tune.session.winner", counting)
    assert run(*arguments).exit_code == 1 and not output.exists()
    first = json.loads(state.read_text())["results"]
    assert len(first) == 3
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    assert not state.exists() and len(calls) == 4 + 6, (
        "nine buckets, of which three were there and the fourth was begun"
    )
    assert "wrote" in result.output and "fc1_wgrad" in result.output
    (cached,) = cache.iterdir()
    assert f"{cached}: managers with tuning_cache={str(cache)!r} read it" in result.output, "on the CPU no other does"
    entries = json.loads(cached.read_text())["entries"]
    row = entries["gather width 16 features 12 R 2 itemsize 4"][-1]
    assert row["up_to"] == 32
    for one in shared_ranks.run(follow, str(output), None, timeout_s=60.0):
        assert one["ran"] == [f"method_{row['method']}"] and "by_tokens" in one["explain"], one
        assert f"{row['sequential_us']:.1f} us" in one["explain"]
    for one in shared_ranks.run(follow, None, str(cache), timeout_s=60.0):
        assert one["ran"] == [f"method_{row['method']}"] and "tuned cache" in one["explain"], one


def test_no_budget_writes_no_guess(tmp_path: Path, shared_ranks: RankPool) -> None:
    output = tmp_path / "ub.yaml"
    arguments = ("--device", "cpu", "--tokens", "32", "--no-cache", "-o", str(output))
    result = run(*arguments, "--minutes", "0")
    assert result.exit_code == 0 and "0 of" in result.output and "goes on from there" in result.output
    assert "method:" not in output.read_text(), "nothing was measured, so every name keeps its default"


def measured_with(rank: int, size: int, ask: Ask) -> tuple[Any, int]:
    """What `measure` returns, and how many tensors it drew."""
    draw, drawn = torch.randn, []

    def counting(*arguments: Any, **options: Any) -> torch.Tensor:
        drawn.append(arguments)
        return draw(*arguments, **options)

    torch.randn = counting  # type: ignore[assignment]
    try:
        return measure(rank, size, ask), len(drawn)
    finally:
        torch.randn = draw


ASK = Ask(
    "scatter", 16, 12, (17, 32),
    (Candidate("sequential"), Candidate("ring_exchange"), Candidate("pipeline", num_splits=2)),
    "fp32", "cpu", 3, 20.0,
)  # fmt: skip


@pytest.mark.parametrize("kind", ["gather", "scatter", "beside-gather", "beside-scatter"])
def test_operands_are_drawn_once(rank_pool: Callable[[int], RankPool], kind: Any) -> None:
    """Not for each candidate and each T: the weights of a large layer are gigabytes."""
    methods = {"gather": ASK.candidates[:2], "scatter": ASK.candidates}
    ask = replace(ASK, kind=kind, candidates=methods.get(kind, (Candidate("sequential"), Candidate("bulk"))))
    for times, drawn in rank_pool(2).run(measured_with, ask, timeout_s=60.0):
        assert drawn == 4, "one call an operand"
        assert len(times) == len(ask.candidates) and all(len(row) == 2 and min(row) > 0 for row in times)


def test_the_ranks_give_up_together(rank_pool: Callable[[int], RankPool]) -> None:
    endless = replace(ASK, tokens=(32,), rounds=100_000)
    assert rank_pool(2).run(measure, replace(endless, limit_s=0.5), timeout_s=30.0) == [None, None]
    for times in rank_pool(2).run(
        measure, replace(endless, tokens=(17, 32), share_s=0.5, limit_s=60.0), timeout_s=30.0
    ):
        assert [len(row) for row in times] == [2, 2, 2], "fewer rounds, but an answer"
    assert all(rank_pool(2).run(measure, replace(ASK, limit_s=60.0), timeout_s=30.0))


def never_ends(rank: int, size: int, ask: Ask) -> None:
    """A compiler that takes longer than the budget: the ranks' own limit is never looked at."""
    time.sleep(120.0)


def test_the_budget_is_kept_by_force(tmp_path: Path, shared_ranks: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tpoverlap.tools.tune.measure.measure", never_ends)
    shared_ranks.run(describe, "cpu")  # so that the start of the ranks is not in the time
    output = tmp_path / "ub.yaml"
    begin_s = time.monotonic()
    result = run("--device", "cpu", "--tokens", "32", "--no-cache", "-o", str(output), "--minutes", "0.03")
    assert result.exit_code == 0, result.output
    assert 1.8 <= time.monotonic() - begin_s < 20.0
    text = output.read_text()
    assert "0 of" in result.output and "fc1_fprop: not measured" in text and resolve(output, 2).names


@pytest.mark.slow
def test_ctrl_c_and_the_same_command_again(tmp_path: Path) -> None:
    """The real signal to the real command with its own ranks."""
    output, state = tmp_path / "ub.yaml", tmp_path / "ub.yaml.state.json"
    arguments = [*SIZES, "--device", "cpu", "--tokens", "9:32", "--no-cache", "-o", str(output)]
    command = [sys.executable, "-m", "tpoverlap", "tune", *arguments]
    process = subprocess.Popen([*command, "--rounds", "400"], stdout=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + 60.0
    while not state.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: ranks included
    said, _ = process.communicate(timeout=30.0)
    before = set(json.loads(state.read_text())["results"])
    assert process.returncode == 1 and "interrupted: " in said and not output.exists(), said
    assert 0 < len(before) < 9
    done = subprocess.run([*command, "--rounds", "3"], capture_output=True, text=True, timeout=90.0)
    assert done.returncode == 0 and output.exists() and not state.exists(), done.stdout + done.stderr


def test_topology_of_doctor(tmp_path: Path, shared_ranks: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its words head the file; on GPUs a --tp beyond what it found is refused before anything starts."""
    row = {"tp": 1, "gpus": [0], "pair_gb_s": None, "all_gb_s": None, "reason": "only PCIe"}
    path = tmp_path / "doctor.json"
    path.write_text(json.dumps({"rows": [{"name": "largest TP", "status": "ok", "data": row}]}))
    arguments = ("--tokens", "32", "--no-cache", "-o", str(tmp_path / "ub.yaml"), "--topology", str(path))
    assert run("--device", "cpu", "--minutes", "0", *arguments).exit_code == 0
    assert "# links, by doctor in doctor.json: only PCIe, by doctor" in (tmp_path / "ub.yaml").read_text()
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    refused = run(*arguments)
    assert refused.exit_code == 2 and "tune for --tp 1" in " ".join(refused.output.split()), refused.output


def test_is_a_subcommand() -> None:
    assert SUBCOMMANDS["tune"] == "tpoverlap.tools.tune.command:tune"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--tokens", "64"),
            "torch sees 0. Without them ask the cost model: tpoverlap predict --hidden 16 --ffn 24 --heads 2 --tp 2 ",
        ),
        (
            ("--tokens", "64", "--kv-heads", "1", "--gated"),
            "predict --hidden 16 --ffn 24 --heads 2 --kv-heads 1 --gated",
        ),
        (("--device", "cpu"), "give --tokens or --tokens-from, one of them"),
        (("--device", "cpu", "--tokens", "4", "--tokens-from", "x"), "give --tokens or --tokens-from, one of them"),
        (("--device", "cpu", "--tokens-from", "/nowhere.json"), "cannot read --tokens-from"),
        (("--device", "cpu", "--tokens", "4:2"), "give T, several"),
        (("--device", "cpu", "--tokens", "4", "--kv-heads", "0"), "--kv-heads"),
        (("--device", "cpu", "--tokens", "4", "-o", "/nowhere/ub.yaml"), "cannot write -o"),
    ],
)
def test_wrong_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = run("-o", str(tmp_path / "ub.yaml"), *arguments)
    assert result.exit_code == 2 and message in " ".join(result.output.split()), result.output
    assert list(tmp_path.iterdir()) == []


def test_heads_are_needed_for_kv_heads_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    sizes = ("--hidden", "16", "--ffn", "24", "--tokens", "64", "-o", str(tmp_path / "ub.yaml"))
    for more, message in (((), "predict --hidden 16 --ffn 24 --tp 2"), (("--kv-heads", "1"), "says nothing without")):
        result = CliRunner().invoke(main, ["tune", *sizes, *more])
        assert result.exit_code == 2 and message in " ".join(result.output.split()), result.output
